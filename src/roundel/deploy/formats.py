"""Which number format a finished model is in, read from its Q/DQ nodes and casts."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.errors import ModelError
from roundel.model.graph import DEFAULT_DOMAINS, attribute_int, op_key, readers

QUARK = "com.amd.quark"

_QUANTIZE = frozenset({"QuantizeLinear", "com.microsoft::QuantizeLinear", f"{QUARK}::ExtendedQuantizeLinear"})
_DEQUANTIZE = frozenset(
    {"DequantizeLinear", "com.microsoft::DequantizeLinear", f"{QUARK}::ExtendedDequantizeLinear"}
)
# Quantized operators that are neither Q nor DQ: the provider takes Q/DQ models only.
_FOREIGN = frozenset(
    {
        "DynamicQuantizeLinear",
        "ConvInteger",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
        "com.microsoft::MatMulNBits",
        "com.microsoft::DynamicQuantizeMatMul",
        "com.microsoft::MatMulIntegerToFloat",
        "com.microsoft::QGemm",
        f"{QUARK}::BFPQuantizeDequantize",
        f"{QUARK}::MXQuantizeDequantize",
    }
)
_WEIGHT_READERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_MIDDLE = {ir.DataType.INT8: 0, ir.DataType.UINT8: 128, ir.DataType.INT16: 0, ir.DataType.UINT16: 32768}
_BITS = {
    **dict.fromkeys((ir.DataType.INT8, ir.DataType.UINT8), 8),
    **dict.fromkeys((ir.DataType.INT16, ir.DataType.UINT16), 16),
    ir.DataType.INT32: 32,
}


class ModelFormat(enum.Enum):
    """The formats that the Ryzen AI compiler tells apart."""

    XINT8 = "XINT8"
    A8W8 = "A8W8"
    A16W8 = "A16W8"
    BF16 = "BF16"
    FLOAT = "FLOAT"

    @property
    def integer(self) -> bool:
        """Whether the integer compiler takes it (the other one is the BF16 compiler)."""
        return self in (ModelFormat.XINT8, ModelFormat.A8W8, ModelFormat.A16W8)


@dataclass(frozen=True, slots=True)
class Recognised:
    """A model's format.

    Attributes:
        format: the format.
        reason: what in the graph shows it.
        notes: what a careful reader wants to know about it.
    """

    format: ModelFormat
    reason: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Quantizer:
    """What one Q or DQ node says about its tensor."""

    node: str
    dtype: ir.DataType
    scale: NDArray[Any]
    zero_point: NDArray[Any] | None
    weight: bool

    @property
    def bits(self) -> int:
        return _BITS[self.dtype]

    @property
    def power_of_two(self) -> bool:
        mantissa, _ = np.frexp(self.scale.astype(np.float64))
        return bool((mantissa == 0.5).all())

    @property
    def symmetric(self) -> bool:
        codes = np.zeros(1) if self.zero_point is None else self.zero_point
        return self.dtype not in _MIDDLE or bool((codes == _MIDDLE[self.dtype]).all())


def recognise(raw: ir.Model, inlined: ir.Model) -> Recognised:
    """The format of a model.

    Args:
        raw: the model as its file has it; AMD's operators may be calls of model-local functions.
        inlined: the same model with functions inlined.

    Raises:
        ModelError: the model is in no format that the NPU's compilers take.
    """
    graph = raw.graph if any(node.domain == QUARK for node in raw.graph.all_nodes()) else inlined.graph
    nodes = list(graph.all_nodes())
    _refuse_foreign(nodes)
    pairs = [node for node in nodes if op_key(node) in _QUANTIZE | _DEQUANTIZE]
    brain = [node for node in pairs if _stored_type(node) is ir.DataType.BFLOAT16]
    casts = [node for node in nodes if _casts_to_bfloat16(node)]
    integers = [_quantizer(node) for node in pairs if node not in brain]
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
        return Recognised(ModelFormat.BF16, what, notes)
    stored = _of_type(inlined, ir.DataType.BFLOAT16)
    if stored is not None and not integers:
        return Recognised(ModelFormat.BF16, f"'{stored.name}' is bfloat16", notes)
    if integers:
        found = _integer_format(integers)
        return Recognised(found.format, found.reason, (*found.notes, *notes))
    _refuse_half(inlined)
    return Recognised(ModelFormat.FLOAT, "float32, which the compiler turns into BF16", notes)


def _refuse_foreign(nodes: list[ir.Node]) -> None:
    for node in nodes:
        if op_key(node) in _FOREIGN:
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


def _casts_to_bfloat16(node: ir.Node) -> bool:
    cast = node.op_type == "Cast" and node.domain in DEFAULT_DOMAINS
    return cast and attribute_int(node, "to", 0) == ir.DataType.BFLOAT16.value


def _custom_op_notes(raw: ir.Model, nodes: list[ir.Node]) -> tuple[str, ...]:
    defined = {(function.domain, function.name) for function in raw.functions.values()}
    loose = {op_key(n) for n in nodes if n.domain == QUARK and (n.domain, n.op_type) not in defined}
    if not loose:
        return ()
    return (
        f"{', '.join(sorted(loose))}: custom operators that ONNX Runtime's CPU provider cannot run without "
        "AMD Quark's operator library, so the CPU fallback will not load this model.",
    )


def _integer_format(found: list[_Quantizer]) -> Recognised:
    wide = [q for q in found if q.bits == 16]
    notes = _asymmetry_note(found)
    if wide:
        heavy = next((q for q in wide if q.weight), None)
        if heavy is not None:
            raise ModelError(
                "The model has 16-bit weights; the NPU takes 8-bit weights only.",
                where=heavy.node,
                observed=heavy.dtype.name.lower(),
                expected="int8 weights",
                hint="Quantize with the preset a16w8.",
            )
        return Recognised(ModelFormat.A16W8, f"{len(wide)} of {len(found)} Q/DQ nodes are 16 bit", notes)
    against = _against_xint8(found)
    if against is None:
        why = "all scales are powers of two, 8 bit, symmetric, per tensor"
        return Recognised(ModelFormat.XINT8, why)
    return Recognised(ModelFormat.A8W8, f"8 bit; not XINT8: {against}", notes)


def _against_xint8(found: list[_Quantizer]) -> str | None:
    tests = (
        ("scales that are not powers of two", lambda q: not q.power_of_two),
        ("more than 8 bits (a bias)", lambda q: q.bits > 8),
        ("one scale per channel", lambda q: q.scale.size > 1),
        ("asymmetric zero points", lambda q: not q.symmetric),
    )
    for words, broken in tests:
        count = sum(1 for q in found if broken(q))
        if count:
            return f"{count} of {len(found)} Q/DQ nodes have {words}"
    return None


def _asymmetry_note(found: list[_Quantizer]) -> tuple[str, ...]:
    lopsided = sum(1 for q in found if not q.symmetric)
    if not lopsided:
        return ()
    return (f"{lopsided} Q/DQ nodes are asymmetric: that needs Ryzen AI 1.6 or newer.",)


def _quantizer(node: ir.Node) -> _Quantizer:
    scale = _constant(node, 1)
    if scale is None:
        raise ModelError(
            "A scale is computed at run time; the NPU's compilers need constants.",
            where=f"{op_key(node)} '{node.name}'",
            hint="Quantize statically, with calibration data.",
        )
    dtype = _stored_type(node)
    if dtype not in _BITS:
        raise ModelError(
            "A tensor is stored in a type that the NPU does not take.",
            where=f"{op_key(node)} '{node.name}'",
            observed=dtype.name.lower(),
            expected="int8, uint8, int16, uint16, or int32 for a bias",
        )
    return _Quantizer(str(node.name), dtype, scale, _constant(node, 2), _is_weight(node))


def _stored_type(node: ir.Node) -> ir.DataType:
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    codes = node.inputs[0] if op_key(node) in _DEQUANTIZE else node.outputs[0]
    for value in (zero_point, codes):
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        if tensor is not None:
            return tensor.dtype
        if value is not None and value.dtype is not None:
            return value.dtype
    wanted = attribute_int(node, "output_dtype", 0)
    return ir.DataType(wanted) if wanted else ir.DataType.UINT8


def _constant(node: ir.Node, index: int) -> NDArray[Any] | None:
    value = node.inputs[index] if len(node.inputs) > index else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def _is_weight(node: ir.Node) -> bool:
    return any(
        reader.op_type in _WEIGHT_READERS and index == 1 and _from_constant(node)
        for reader, index in _final_readers(node)
    )


def _final_readers(node: ir.Node) -> Iterator[tuple[ir.Node, int]]:
    for reader, index in readers(node.outputs[0]):
        if op_key(reader) in _DEQUANTIZE:
            yield from readers(reader.outputs[0])
        else:
            yield reader, index


def _from_constant(node: ir.Node) -> bool:
    source = node.inputs[0]
    if source is None:
        return False
    producer = source.producer()
    if producer is not None and op_key(producer) in _QUANTIZE:
        source = producer.inputs[0]
    return source is not None and ir.convenience.get_const_tensor(source) is not None
