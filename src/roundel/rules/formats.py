"""Number formats by preset and by recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.errors import ModelError, RecipeError
from roundel.model.graph import op_key, readers
from roundel.model.load import quantized_node
from roundel.qdq import read
from roundel.qdq.nodes import QUARK
from roundel.recipe.load import RecipeSource, load_recipe, preset_names
from roundel.recipe.settings import Recipe
from roundel.targets.npu import Format
from roundel.targets.operators import LAYERS
from roundel.types import Scheme


def recipe_for(preset: RecipeSource) -> Recipe:
    """The recipe behind a preset; BF16 needs none of its own, since the compiler converts by itself."""
    bare = str(preset).strip().casefold() if isinstance(preset, str) else None
    if bare == Format.BF16.value and bare not in preset_names():
        return Recipe(name=bare, title="float32, which the BF16 compiler converts")
    return load_recipe(preset)


def format_of(recipe: Recipe) -> Format:
    """The format that a recipe writes.

    Raises:
        RecipeError: it writes none that the NPU takes.
    """
    kind = str(recipe.activations.type)
    if recipe.mode != "static":
        raise RecipeError(
            "Models of this mode run on the CPU; the NPU's compilers do not take them.",
            where=f"recipe {recipe.name}, mode {recipe.mode}",
            expected=", ".join(f.value for f in Format if f is not Format.FLOAT),
            hint="Choose --preset a8w8, or xint8 for Phoenix and Hawk Point.",
        )
    if recipe.name == Format.BF16.value or kind == "bfloat16":
        return Format.BF16
    if not isinstance(recipe.activations.scheme, Scheme):
        raise RecipeError(
            f"The NPU's compilers take no {kind} activations.",
            where=f"recipe {recipe.name}, activations.type",
            expected=", ".join(f.value for f in Format if f is not Format.FLOAT),
            hint="Choose --preset bf16: the same range as float32, in 16 bits.",
        )
    if kind.endswith("16"):
        return Format.A16W8
    return Format.XINT8 if recipe.activations.scale == "power_of_two" else Format.A8W8


_MOSTLY = 0.9  # share of power-of-two scales from which a file was meant as XINT8

_Read = Sequence[tuple[ir.Node, read.Quantizer]]


@dataclass(frozen=True, slots=True)
class Recognised:
    """A model's format.

    Attributes:
        format: the format.
        reason: what in the graph shows it.
        notes: what a careful reader wants to know about it.
    """

    format: Format
    reason: str
    notes: tuple[str, ...] = ()


def is_quantized(model: ir.Model) -> bool:
    """Whether the model is finished: it has quantized operators, or casts to bfloat16."""
    if quantized_node(model) is not None:
        return True
    return any(read.casts_to(node, ir.DataType.BFLOAT16) for node in model.graph)


def intended(stored: read.StoredTensors) -> Recognised:
    """The format that a finished model was meant to be in; never an error."""
    moving = [tensor for tensor in stored.tensors.values() if not tensor.constant]
    judged = moving or list(stored.tensors.values())
    brain = sum(1 for tensor in judged if tensor.dtype == read.BFLOAT16)
    if brain:
        return Recognised(Format.BF16, f"{brain} tensors pass through bfloat16")
    wide = sum(1 for tensor in judged if read.BITS.get(tensor.dtype) == 16)
    if wide:
        return Recognised(Format.A16W8, f"{wide} of {len(judged)} activations are 16 bit")
    powers = sum(1 for tensor in judged if tensor.power_of_two)
    if judged and powers >= _MOSTLY * len(judged):
        return Recognised(Format.XINT8, f"{powers} of {len(judged)} activation scales are powers of two")
    return Recognised(Format.A8W8, f"8 bit, {len(judged) - powers} activation scales of any size")


def recognise(raw: ir.Model, inlined: ir.Model) -> Recognised:
    """The format that a model, float or finished, is in by the format's own rules.

    Args:
        raw: the model as its file has it; AMD's operators may be calls of model-local functions.
        inlined: the same model with functions inlined.

    Raises:
        ModelError: the model is in no format that the NPU's compilers take.
    """
    graph = raw.graph if any(node.domain == QUARK for node in raw.graph.all_nodes()) else inlined.graph
    nodes = list(graph.all_nodes())
    _refuse_foreign(nodes)
    types = {node: read.stored_type(node) for node in nodes if op_key(node) in read.PAIRS}
    brain = [node for node, dtype in types.items() if dtype == read.BFLOAT16]
    casts = [node for node in nodes if read.casts_to(node, ir.DataType.BFLOAT16)]
    integers = [(node, _integer_quantizer(node)) for node, dtype in types.items() if dtype != read.BFLOAT16]
    if (brain or casts) and integers:
        raise ModelError(
            "The model mixes integer Q/DQ with bfloat16; no compiler for the NPU takes both.",
            observed=f"{len(integers)} integer Q/DQ nodes and {len(brain) + len(casts)} of bfloat16",
            expected="one format",
            hint="Quantize the float model again with one preset.",
        )
    notes = _custom_op_notes(raw, nodes)
    if brain or casts:
        what = f"{len(casts)} casts to bfloat16" if casts else f"{len(brain)} bfloat16 Q/DQ nodes"
        return Recognised(Format.BF16, what, notes)
    stored = _of_type(inlined, ir.DataType.BFLOAT16)
    if stored is not None and not integers:
        return Recognised(Format.BF16, f"'{stored.name}' is bfloat16", notes)
    if integers:
        found = _integer_format(integers)
        return Recognised(found.format, found.reason, (*found.notes, *notes))
    _refuse_half(inlined)
    return Recognised(Format.FLOAT, "float32, which the compiler turns into BF16", notes)


def _refuse_foreign(nodes: list[ir.Node]) -> None:
    for node in nodes:
        if op_key(node) in read.OTHER_FORMS:
            raise ModelError(
                "The model is quantized in a form that the NPU's compilers do not take.",
                observed=f"{op_key(node)} node '{node.name}'",
                expected="QuantizeLinear and DequantizeLinear pairs, bfloat16 casts, or a float32 model",
                hint="Quantize the float model with the preset xint8, a8w8, a16w8 or bf16.",
            )


def _refuse_half(model: ir.Model) -> None:
    value = _of_type(model, ir.DataType.FLOAT16)
    if value is not None:
        raise ModelError(
            "The model is in half precision, which the NPU's compilers do not take.",
            observed=f"'{value.name}' is float16",
            expected="a float32 model, which the compiler turns into BF16 itself",
            hint="Export the model in float32, or quantize it: roundel quantize widens float16.",
        )


def _of_type(model: ir.Model, dtype: ir.DataType) -> ir.Value | None:
    values = (*model.graph.inputs, *model.graph.initializers.values())
    return next((value for value in values if value.dtype is dtype), None)


def _custom_op_notes(raw: ir.Model, nodes: list[ir.Node]) -> tuple[str, ...]:
    defined = {(function.domain, function.name) for function in raw.functions.values()}
    loose = {op_key(n) for n in nodes if n.domain == QUARK and (n.domain, n.op_type) not in defined}
    if not loose:
        return ()
    return (
        f"{', '.join(sorted(loose))}: custom operators that ONNX Runtime's CPU provider cannot run without "
        "AMD Quark's operator library, so the CPU fallback will not load this model.",
    )


def _integer_quantizer(node: ir.Node) -> read.Quantizer:
    found = read.read_quantizer(node)
    if found is None:
        what = "scale" if read.constant_of(node.inputs[1]) is None else "zero point"
        raise ModelError(
            f"A {what} is computed at run time; the NPU's compilers need constants.",
            where=f"{op_key(node)} '{node.name}'",
            hint="Quantize statically, with calibration data.",
        )
    if found.dtype not in read.BITS:
        raise ModelError(
            "A tensor is stored in a type that the NPU does not take.",
            where=f"{op_key(node)} '{node.name}'",
            observed=found.dtype,
            expected="int8, uint8, int16, uint16, or int32 for a bias",
        )
    return found


def _integer_format(found: _Read) -> Recognised:
    wide = [(node, q) for node, q in found if read.BITS[q.dtype] == 16]
    notes = _asymmetry_note(found)
    if wide:
        heavy = next(((node, q) for node, q in wide if _is_weight(node)), None)
        if heavy is not None:
            raise ModelError(
                "The model has 16-bit weights; the NPU takes 8-bit weights only.",
                where=heavy[0].name,
                observed=heavy[1].dtype,
                expected="int8 weights",
                hint="Quantize with the preset a16w8.",
            )
        return Recognised(Format.A16W8, f"{len(wide)} of {len(found)} Q/DQ nodes are 16 bit", notes)
    against = _against_xint8(found)
    if against is None:
        why = "all scales are powers of two, 8 bit, symmetric, per tensor"
        return Recognised(Format.XINT8, why)
    return Recognised(Format.A8W8, f"8 bit; not XINT8: {against}", notes)


def _against_xint8(found: _Read) -> str | None:
    tests = (
        ("scales that are not powers of two", lambda q: not q.power_of_two),
        ("more than 8 bits (a bias)", lambda q: read.BITS[q.dtype] > 8),
        ("one scale per channel", lambda q: q.scale.size > 1),
        ("asymmetric zero points", lambda q: not q.symmetric),
    )
    for words, broken in tests:
        count = sum(1 for _, q in found if broken(q))
        if count:
            return f"{count} of {len(found)} Q/DQ nodes have {words}"
    return None


def _asymmetry_note(found: _Read) -> tuple[str, ...]:
    lopsided = sum(1 for _, q in found if not q.symmetric)
    if not lopsided:
        return ()
    return (f"{lopsided} Q/DQ nodes are asymmetric: that needs Ryzen AI 1.6 or newer.",)


def _is_weight(node: ir.Node) -> bool:
    return any(
        reader.op_type in LAYERS and index == 1 and _from_constant(node)
        for reader, index in _final_readers(node)
    )


def _final_readers(node: ir.Node) -> Iterator[tuple[ir.Node, int]]:
    for reader, index in readers(node.outputs[0]):
        if read.is_dequantize(reader):
            yield from readers(reader.outputs[0])
        else:
            yield reader, index


def _from_constant(node: ir.Node) -> bool:
    source = node.inputs[0]
    if source is None:
        return False
    producer = source.producer()
    if producer is not None and read.is_quantize(producer):
        source = producer.inputs[0]
    return read.constant_of(source) is not None
