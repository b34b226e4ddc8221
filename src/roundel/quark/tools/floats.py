"""Whole models to short floats and back, and the forms that these are written in."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from roundel.conversion import convert
from roundel.errors import RecipeError, did_you_mean
from roundel.model.graph import is_constant
from roundel.numerics.floats import largest
from roundel.pipeline import quantize
from roundel.qdq.nodes import Names, constant
from roundel.quark.tools.files import Rewritten, refuse_same, rewriting
from roundel.quark.tools.halves import convert_fp32_to_fp16
from roundel.quark.tools.tool import EXTERNAL, SOURCE, TARGET, Parameter, Tool
from roundel.quark.tools.wiring import is_quantize, tidy
from roundel.types import FloatType

_FORMS = {"with_cast": "cast", "customqdq": "pair", "simulate_bf16": "plain"}
_FORMAT = Parameter(
    "form",
    "with_cast, customqdq or simulate_bf16",
    ("--format",),
    default="with_cast",
    positional=False,
)


def _to_bf16(source: str, target: str, form: str, external_data: bool) -> str:
    refuse_same(source, target)
    if form == "bf16":
        raise RecipeError(
            "Graphs of bfloat16 tensors run nowhere: neither the NPU's compiler nor the CPU takes them.",
            where="--format bf16",
            hint="Use with_cast, which computes the same numbers.",
        )
    if form not in _FORMS:
        raise RecipeError(
            f"There is no format '{form}'.", expected=", ".join(_FORMS), hint=did_you_mean(form, _FORMS)
        )
    done = convert(source, target, to="bf16", form=_FORMS[form], external_data=external_data)  # type: ignore[arg-type]
    counts = ", ".join(f"{count} {what}" for what, count in done.counts.items())
    return f"{counts} in bfloat16\n{target}"


def _to_fp32(source: str, target: str, external_data: bool) -> str:
    refuse_same(source, target)
    convert(source, target, to="fp32", external_data=external_data)
    return f"all tensors in float32\n{target}"


def _to_bfp16(source: str, target: str, external_data: bool) -> str:
    refuse_same(source, target)
    result = quantize(source, target, recipe="bfp16", changes={"output": {"external_data": external_data}})
    return f"{len(result.plan.tensors)} tensors in bfp16\n{target}"


def _as_form(form: str) -> object:
    def run(source: str, target: str, external_data: bool) -> str:
        refuse_same(source, target)
        convert(source, target, to="bf16", form=form, external_data=external_data)  # type: ignore[arg-type]
        return f"bfloat16 tensors in the form '{form}'\n{target}"

    return run


def insert_clip_bfloat16_qdq(model: ir.Model) -> Rewritten:
    """A Clip to bfloat16's finite range before each activation that a pair rounds to it."""
    result = model.clone()
    names, bound, count = Names(result.graph), largest(FloatType.BFLOAT16), 0
    limits: tuple[ir.Value, ir.Value] | None = None
    for node in [n for n in result.graph if is_quantize(n)]:
        value, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        if value is None or is_constant(value) or zero is None or zero.dtype is not ir.DataType.BFLOAT16:
            continue
        if limits is None:
            ends = (np.float32(-bound), np.float32(bound))
            limits = tuple(constant(result.graph, names("bf16_limit"), np.asarray(e)) for e in ends)  # type: ignore[assignment]
        assert limits is not None
        out = ir.Value(name=names(f"{value.name}_clipped"), shape=value.shape, type=value.type)
        clip = ir.Node("", "Clip", [value, *limits], outputs=[out], name=names(f"{node.name}_clip"))
        result.graph.insert_before(node, clip)
        node.replace_input_with(0, out)
        count += 1
    return tidy(result), f"inserted {count} Clip nodes"


_KEEP_IO = Parameter(
    "keep_io_types",
    "graph inputs and outputs stay float32",
    ("--keep_io_types",),
    default=False,
    positional=False,
    switch=True,
)
_FILES = (SOURCE, TARGET, EXTERNAL)

FLOAT_TOOLS = (
    Tool("convert_fp32_to_bf16", "A float32 model in bfloat16.", _to_bf16, (*_FILES, _FORMAT)),
    Tool("convert_fp16_to_bf16", "A float16 model in bfloat16.", _to_bf16, (*_FILES, _FORMAT)),
    Tool("convert_fp32_to_bfp16", "A float32 model in block floating point.", _to_bfp16, _FILES),
    Tool("convert_fp16_to_bfp16", "A float16 model in block floating point.", _to_bfp16, _FILES),
    rewriting("convert_fp32_to_fp16", "A float32 model in float16.", convert_fp32_to_fp16, _KEEP_IO),
    Tool("convert_fp16_to_fp32", "A float16 model, or any short-float form, in float32.", _to_fp32, _FILES),
    Tool(
        "replace_bfloat16_qdq_cast",
        "bfloat16 pairs of AMD's operators as Cast pairs.",
        _as_form("cast"),  # type: ignore[arg-type]
        _FILES,
    ),
    Tool(
        "remove_bf16_cast",
        "bfloat16 casts between nodes taken out; constants keep their rounding.",
        _as_form("plain"),  # type: ignore[arg-type]
        _FILES,
    ),
    rewriting(
        "insert_clip_bfloat16_qdq", "A Clip before each bfloat16 activation.", insert_clip_bfloat16_qdq
    ),
)
