"""Where the quantizer's own saturation does the work of a Clip."""

from __future__ import annotations

import math

import onnx_ir as ir

from roundel.model.graph import clip_bounds
from roundel.numerics.affine import code_limits
from roundel.plan.types import Observed, QuantPlan
from roundel.types import QParams, ScaleKind, Scheme, Storage


def upper_bound(node: ir.Node) -> float | None:
    """m for a Clip to [0, m]; None for any other node."""
    if node.op_type != "Clip" or node.domain not in ("", "ai.onnx"):
        return None
    bounds = clip_bounds(node)
    if bounds is None or bounds[0] != 0 or bounds[1] is None or not bounds[1] > 0:
        return None
    return bounds[1]


def top_of_range(params: QParams) -> float:
    """The largest value that the codes can hold."""
    top = (params.qtype.qmax - params.zero_point.astype("float64")) * params.scale.astype("float64")
    return float(top.max())


def saturates(params: QParams, bound: float) -> bool:
    """Whether no code stands for a value above the bound, so that a Relu is as good as the Clip."""
    return top_of_range(params) <= bound * (1 + 1e-6)


def will_saturate(plan: QuantPlan, node: ir.Node) -> bool:
    """Whether, whatever the data, the Clip's output is stored with a top at or below its bound.

    Float scales follow the observed maximum, which the Clip keeps below its bound. Power-of-two scales
    do so only when the bound itself is the top of such a range.
    """
    bound = upper_bound(node)
    tensor = plan.tensors.get(str(node.outputs[0].name)) if bound is not None else None
    if bound is None or tensor is None or not isinstance(tensor.source, Observed):
        return False
    scheme = tensor.scheme
    floating = isinstance(scheme, Scheme) and scheme.scale is ScaleKind.FLOAT
    return floating or on_grid(bound, scheme)


def on_grid(bound: float, scheme: Storage) -> bool:
    """Whether the bound is the largest value of some power-of-two scale."""
    if not isinstance(scheme, Scheme):
        return False
    exponent = math.log2(bound / largest_code(scheme))
    return abs(exponent - round(exponent)) < 1e-6


def largest_code(scheme: Scheme) -> int:
    """The largest code, counted from the zero point of a symmetric scheme."""
    _, high = code_limits(scheme)
    return high if scheme.qtype.signed else high - (scheme.qtype.qmax + 1) // 2
