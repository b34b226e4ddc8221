"""Whole models to bfloat16, float16 and back, and between the forms of these; nothing is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import onnx_ir as ir

from roundel.calibrate.resolve import resolve
from roundel.errors import ModelError, RecipeError
from roundel.gate import OutputReport, compare_outputs
from roundel.model import load_model
from roundel.model.files import staged_or_temporary
from roundel.model.graph import is_constant, op_key
from roundel.model.normalise import bfloat16_node, computes_in_bfloat16, widen_floats
from roundel.model.session import open_session
from roundel.model.structure import ModelSource
from roundel.outputs import refuse_overwriting
from roundel.plain import Card, counted, decibel, to_plain
from roundel.plan import build_plan
from roundel.plan.types import Role
from roundel.qdq import attach, strip, write_qdq
from roundel.qdq.floats import Form, ShortTensor, lift, put
from roundel.qdq.nodes import QUARK
from roundel.recipe.load import load_recipe
from roundel.recipe.settings import Data
from roundel.rules.written import check_file
from roundel.stages import open_data, prepare
from roundel.types import FloatType, Sample
from roundel.version import VERSION

Target = Literal["bf16", "fp16", "fp32"]
_PLAIN = "plain: activations are left to the compiler and stay float32 on the CPU"
_TYPES = {"bf16": FloatType.BFLOAT16, "fp16": FloatType.FLOAT16}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ConvertResult(Card):
    """A finished conversion.

    Attributes:
        ir: the converted model in onnx-ir form.
        path: the written file, or None when no output was asked for.
        counts: activations and constants that were converted.
        outputs: closeness of each graph output to the source's, where data were given.
        notes: whatever a careful reader wants to know.
    """

    ir: ir.Model
    path: Path | None
    counts: Mapping[str, int]
    outputs: tuple[OutputReport, ...]
    notes: tuple[str, ...]

    def card(self) -> Mapping[str, object]:
        """What was converted, and how far the outputs move."""
        worst = min((out.sqnr_db for out in self.outputs), default=None)
        counts = ", ".join(counted(count, what.removesuffix("s")) for what, count in self.counts.items())
        file = "in memory" if self.path is None else self.path.name
        return {"file": file, "converted": counts, "worst output": decibel(worst), "notes": len(self.notes)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        file = {} if self.path is None else {"name": self.path.name, "bytes": self.path.stat().st_size}
        rest = {"converted": self.counts, "outputs": self.outputs, "notes": self.notes}
        return {"file": file, **to_plain(rest)}


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    model: ir.Model
    counts: Mapping[str, int]
    notes: tuple[str, ...] = ()


def convert(
    model: ModelSource,
    output: str | Path | None = None,
    *,
    to: Target = "bf16",
    form: Form = "pair",
    half_weights: bool = False,
    strip_functions: bool = False,
    external_data: bool = False,
    data: object = None,
    samples: int | None = None,
) -> ConvertResult:
    """Convert a whole model, as a compiler for bfloat16 does by itself.

    The result computes on any CPU what the short type makes of the model, so that its accuracy can be
    measured before anything is deployed. A model that already is in one of the forms is brought into the
    one asked for, tensor by tensor, with the same numbers.

    Args:
        model: a float model, or one in any of the forms below. It is never changed.
        output: the file to write. None keeps the result in memory.
        to: bf16, fp16, or fp32, which takes every short float out again.
        form: pair (AMD's operators), cast (Cast there and back) or plain (constants rounded, inputs cast).
        half_weights: constants in 16 bits: half the size, the same numbers.
        strip_functions: leave out the bodies of AMD's operators.
        external_data: weights in a file of their own beside the model.
        data: samples on which to compare the result with the source; whatever `quantize` takes.
        samples: use at most this many of them.

    Raises:
        RoundelError: the model, the data or an option is wrong; nothing was written.
    """
    _check_options(to, form, half_weights=half_weights, strip_functions=strip_functions)
    target = None if output is None else Path(output)
    refuse_overwriting({"output": target}, {"input model": model, "data": data})
    loaded = load_model(model, allow_quantized=True, opaque=QUARK)
    source = loaded.model
    made = _made(model, source, to, form, half_weights=half_weights)
    result = made.model
    result.producer_name, result.producer_version = "roundel", VERSION
    result = attach(result) if QUARK in result.graph.opset_imports else result
    shown = strip(result) if strip_functions else result
    with ExitStack() as cleanup:
        # The file takes its place only when everything below has ended well.
        file = cleanup.enter_context(
            staged_or_temporary(shown, target, external_data=external_data, reads=loaded.data_files)
        )
        # Operators without bodies run in no plain session: the same graph with them is the proof.
        proof = file if shown is result else cleanup.enter_context(staged_or_temporary(result, None))
        session = check_file(proof)
        reports: tuple[OutputReport, ...] = ()
        if data is not None:
            reports = compare_outputs(session, *_run(model, source, data, samples))
    return ConvertResult(shown, target, made.counts, reports, made.notes)


def _check_options(to: str, form: str, *, half_weights: bool, strip_functions: bool) -> None:
    for word, option, choices in ((to, "to", get_args(Target)), (form, "form", get_args(Form))):
        if word not in choices:
            raise RecipeError.unknown(f"There is no {option} '{word}'.", word, choices, where=option)
    if to == "fp32" and (half_weights or form != "pair"):
        raise RecipeError(
            "A float32 model has no short floats to write in a form or to store in 16 bits.",
            where="to fp32",
            hint="Leave out the form and the 16-bit weights, or convert to bf16 or fp16.",
        )
    if strip_functions and (to == "fp32" or form != "pair"):
        raise RecipeError(
            "Only the form 'pair' has functions that can be stripped.",
            where="strip_functions",
            observed=f"to {to}, form {form}",
            expected="form pair",
        )


def _made(source: ModelSource, loaded: ir.Model, to: Target, form: Form, *, half_weights: bool) -> _Made:
    bare = loaded.clone()
    tensors = lift(bare.graph)
    if computes_in_bfloat16(bare):
        widen_floats(bare)
    node = bfloat16_node(bare)
    if node is not None:
        raise ModelError(
            "The model computes in bfloat16 itself, beyond pairs that can be taken out.",
            where=f"{op_key(node)} node '{node.name}'",
            expected="AMD's pairs, casts there and back, or a float model",
        )
    ftype = _TYPES.get(to)
    if ftype is None:  # float32, with whatever the constants held
        widened = load_model(bare if tensors else source)
        return _Made(widened.model, _counted(tensors), widened.notes)
    if _covers(tensors, ftype):
        put(bare.graph, tensors, form, half_weights=half_weights)
        same = "every tensor was taken from one form to the other: the numbers are the same"
        return _Made(bare, _counted(tensors), (_PLAIN if form == "plain" else same,))
    made = _shortened(bare if tensors else source, to, form, half_weights=half_weights)
    return replace(made, notes=(*made.notes, _PLAIN)) if form == "plain" else made


def _covers(tensors: tuple[ShortTensor, ...], ftype: FloatType) -> bool:
    """Whether a whole model is stored in the type: a plain graph shows it at its inputs only."""
    inner = [t for t in tensors if not t.value.is_graph_input() and not is_constant(t.value)]
    return bool(inner) and all(tensor.ftype is ftype for tensor in tensors)


def _counted(tensors: tuple[ShortTensor, ...]) -> dict[str, int]:
    constants = sum(1 for tensor in tensors if is_constant(tensor.value))
    return {"activations": len(tensors) - constants, "constants": constants}


def _shortened(source: ModelSource, to: Target, form: Form, *, half_weights: bool) -> _Made:
    """A float model, every tensor of it in the short type."""
    changes = {"floats": {"form": form}, "output": {"half_weights": half_weights}}
    recipe = load_recipe(to, {**changes, "selection": {"all_op_types": True}})
    ready = prepare(source, recipe)
    plan = build_plan(ready.model, recipe)
    if not plan.tensors:
        raise ModelError("The model has no float32 tensor to convert.", expected="a float model")
    state = resolve(replace(ready, plan=plan))
    moving = sum(1 for tensor in plan.tensors.values() if tensor.role is Role.ACTIVATION)
    counts = {"activations": moving, "constants": len(plan.tensors) - moving}
    return _Made(write_qdq(ready.model, state, recipe), counts, (*ready.notes, *state.notes))


def _run(
    source: ModelSource, loaded: ir.Model, data: object, samples: int | None
) -> tuple[list[Sample], list[Sample]]:
    """What the source makes of the data: inputs and outputs."""
    if lift(loaded.clone().graph):
        before = attach(loaded)
    else:
        before = load_model(source).model  # as the conversion saw it: float16 is widened
    session = open_session(before, simulate=True)
    names = [out.name for out in session.get_outputs()]
    inputs = [dict(sample) for sample in open_data(before, Data(samples=samples), data)]
    return inputs, [dict(zip(names, session.run(None, sample), strict=True)) for sample in inputs]
