"""The operator table: one row for each operator type, read like a datasheet.

Whatever the house knows of an operator from its type alone stands here: what is quantized around it, what
the hardware computes with it, what it does to values and to channels. Where a file needs all operators of a
kind, it asks `ops_with`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from roundel.types import Doubles


class Style(enum.Enum):
    """How an operator's output relates to its input."""

    OWN = "own"  # the output has a range of its own
    SHARE = "share"  # the output holds the input's values: one scale for both
    FOLLOW = "follow"  # quantized only where the input already is (Relu, Clip)


class Trait(enum.Flag):
    """What is true of an operator, whatever its attributes."""

    CONV = enum.auto()  # a layer whose weight is a kernel
    MATRIX = enum.auto()  # a layer whose weight is a matrix
    LAYER = CONV | MATRIX  # multiplies by learned weights: nearly all of the work
    RECURRENT = enum.auto()
    ATTENTION = enum.auto()
    NORM = enum.auto()
    NONLINEAR = enum.auto()  # an activation, of whatever kind
    GATE = enum.auto()  # a sigmoid, which the NPU has as HardSigmoid
    MAKER = enum.auto()  # the hardware computes an activation behind it in the same step
    FUSED = enum.auto()  # an activation that it computes so
    AVERAGE = enum.auto()  # a pool that averages
    MAXIMUM = enum.auto()  # a pool that picks
    POOL = AVERAGE | MAXIMUM
    GAIN = enum.auto()  # the NPU's result is off by a factor near 1
    ONE_SCALE = enum.auto()  # the NPU copies codes or averages them: inputs and output in one scale
    SHAPES = enum.auto()  # gives every value once, in another shape or order of axes
    REARRANGES = enum.auto()  # gives every value once, in another place
    SELECTS = enum.auto()  # gives some of the values
    REPEATS = enum.auto()  # gives values more than once
    JOINS = enum.auto()  # gives the values of several tensors
    CASTS = enum.auto()  # gives the values in another type
    ELEMENTWISE = enum.auto()  # of two operands, either of which may be a constant
    ARITHMETIC = enum.auto()  # what the decoding of boxes is made of
    CHANNELWISE = enum.auto()  # leaves channels where they are


Function = Callable[..., Doubles]
_NONE = Trait(0)
EVERY_INPUT: tuple[int, ...] = (-1,)


@dataclass(frozen=True, slots=True)
class OpRule:
    """What to quantize around one operator.

    Args:
        op: operator type.
        data: input indices treated as activations (constants among them become weights).
        weights: input indices treated as weights.
        bias: input index of a bias whose scale is input scale x weight scale.
        style: relation of output to input.
        min_opset: below this opset the operator is left alone.
        channel_axis: the weight's output-channel axis, for per-channel scales.
        output_range: range of the output that is stored whatever the data (Softmax).
    """

    op: str
    data: tuple[int, ...] = EVERY_INPUT
    weights: tuple[int, ...] = ()
    bias: int | None = None
    style: Style = Style.OWN
    min_opset: int = 1
    channel_axis: int | None = None
    output_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Operator(OpRule):
    """A row of the table: the rule, and what else is known.

    Args:
        sets: the recipe's operator sets (placement.operators) that quantize it.
        standard_style: its style in the set 'standard', where that is another.
        traits: what is true of it.
        bounds: least and largest value that it can give.
        function: what it computes of one value, and of its float attributes as further arguments.
        attributes: those arguments' values where the node has none.
    """

    sets: tuple[str, ...] = ()
    standard_style: Style | None = None
    traits: Trait = _NONE
    bounds: tuple[float, float] | None = None
    function: Function | None = None
    attributes: Mapping[str, float] = field(default_factory=dict)


def _sigmoid(x: Doubles) -> Doubles:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))


def _hard_sigmoid(x: Doubles, alpha: float, beta: float) -> Doubles:
    return np.clip(alpha * x + beta, 0.0, 1.0)


def _hard_swish(x: Doubles) -> Doubles:
    return x * _hard_sigmoid(x, 1 / 6, 0.5)


def _gelu(x: Doubles) -> Doubles:
    return np.asarray(0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))))


def _elu(x: Doubles, alpha: float) -> Doubles:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0)))


_T = Trait
_BOTH = ("standard", "extended")
_WIDE = ("extended",)
_ACTIVATION = _T.NONLINEAR | _T.CHANNELWISE
_SHARE, _FOLLOW = Style.SHARE, Style.FOLLOW
_ONE, _SIGNED_ONE = (0.0, 1.0), (-1.0, 1.0)
_POOLED = _T.MAKER | _T.ONE_SCALE | _T.CHANNELWISE
_SUM = _T.ELEMENTWISE | _T.ARITHMETIC | _T.CHANNELWISE

_ROWS = (
    # Layers.
    Operator("Conv", (0,), (1,), 2, channel_axis=0, sets=_BOTH, traits=_T.CONV | _T.MAKER),
    Operator("ConvTranspose", (0,), (1,), 2, channel_axis=1, sets=_BOTH, traits=_T.CONV | _T.MAKER),
    Operator("Gemm", (0,), (1,), 2, channel_axis=1, sets=(*_BOTH, "matmul"), traits=_T.MATRIX | _T.MAKER),
    Operator("MatMul", (0, 1), channel_axis=-1, sets=(*_BOTH, "matmul"), traits=_T.MATRIX | _T.MAKER),
    Operator("LSTM", traits=_T.RECURRENT),
    Operator("GRU", traits=_T.RECURRENT),
    Operator("RNN", traits=_T.RECURRENT),
    Operator("Attention", traits=_T.ATTENTION),
    Operator("MultiHeadAttention", traits=_T.ATTENTION),
    Operator("EmbedLayerNormalization", (), sets=_BOTH),
    # Norms.
    Operator("InstanceNormalization", (0,), (1,), 2, sets=_BOTH, traits=_T.NORM | _T.CHANNELWISE),
    Operator("LayerNormalization", (0,), (1, 2), sets=_BOTH, traits=_T.NORM),
    Operator("BatchNormalization", traits=_T.NORM | _T.CHANNELWISE),
    Operator("GroupNormalization", traits=_T.NORM),
    Operator("RMSNormalization", traits=_T.NORM),
    Operator("SimplifiedLayerNormalization", traits=_T.NORM),
    Operator("LpNormalization", (0,), sets=_WIDE),
    # Activations.
    Operator("Relu", (0,), style=_FOLLOW, sets=_BOTH, traits=_ACTIVATION | _T.FUSED),
    Operator("Clip", (0,), style=_FOLLOW, sets=_BOTH, traits=_T.FUSED | _T.CHANNELWISE),
    Operator("LeakyRelu", (0,), sets=_BOTH, traits=_ACTIVATION | _T.FUSED),
    Operator("PRelu", (0,), (1,), sets=_WIDE, traits=_ACTIVATION | _T.FUSED),
    Operator("Sigmoid", (0,), sets=_BOTH, traits=_ACTIVATION | _T.GATE, bounds=_ONE, function=_sigmoid),
    Operator(
        "HardSigmoid",
        data=(0,),
        sets=_WIDE,
        traits=_ACTIVATION | _T.GATE | _T.GAIN,
        bounds=_ONE,
        function=_hard_sigmoid,
        attributes={"alpha": 0.2, "beta": 0.5},
    ),
    Operator("HardSwish", traits=_ACTIVATION | _T.GATE, function=_hard_swish),
    Operator("Gelu", (0,), sets=_BOTH, traits=_ACTIVATION, function=_gelu),
    Operator("Tanh", (0,), sets=_BOTH, traits=_ACTIVATION, bounds=_SIGNED_ONE, function=np.tanh),
    Operator("Elu", traits=_ACTIVATION, function=_elu, attributes={"alpha": 1.0}),
    Operator("Erf", (0,), sets=_WIDE, traits=_ACTIVATION, bounds=_SIGNED_ONE),
    Operator("Selu", traits=_ACTIVATION),
    Operator("Softplus", traits=_ACTIVATION),
    Operator("Celu", traits=_ACTIVATION),
    Operator("Mish", traits=_ACTIVATION),
    Operator("Softsign", traits=_ACTIVATION),
    Operator("ThresholdedRelu", traits=_ACTIVATION),
    Operator("Softmax", (0,), output_range=_ONE, sets=_BOTH, traits=_T.NONLINEAR, bounds=_ONE),
    Operator("LogSoftmax", traits=_T.NONLINEAR),
    # Pools and what keeps their scale.
    Operator("MaxPool", (0,), style=_SHARE, min_opset=12, sets=_BOTH, traits=_T.MAXIMUM | _POOLED),
    Operator("GlobalMaxPool", traits=_T.MAXIMUM | _T.CHANNELWISE),
    Operator("AveragePool", (0,), sets=_BOTH, standard_style=_SHARE, traits=_T.AVERAGE | _T.GAIN | _POOLED),
    Operator("GlobalAveragePool", (0,), sets=_BOTH, traits=_T.AVERAGE | _T.GAIN | _POOLED),
    Operator("ReduceMean", (0,), sets=_WIDE, traits=_T.GAIN | _T.CHANNELWISE),
    Operator("Pad", (0,), sets=_BOTH, traits=_T.ONE_SCALE | _T.CHANNELWISE),
    Operator("Resize", (0,), style=_SHARE, min_opset=11, sets=_BOTH, traits=_T.CHANNELWISE),
    # Operators that only move values.
    Operator("Reshape", (0,), style=_SHARE, sets=_BOTH, traits=_T.SHAPES),
    Operator("Flatten", traits=_T.SHAPES | _T.CHANNELWISE),
    Operator("Transpose", (0,), style=_SHARE, sets=_BOTH, traits=_T.SHAPES),
    Operator("Squeeze", (0,), style=_SHARE, sets=_BOTH, traits=_T.SHAPES | _T.CHANNELWISE),
    Operator("Unsqueeze", (0,), style=_SHARE, sets=_BOTH, traits=_T.SHAPES),
    Operator("Identity", traits=_T.SHAPES | _T.CHANNELWISE),
    Operator("Dropout", traits=_T.SHAPES | _T.CHANNELWISE),
    Operator("DepthToSpace", (0,), sets=_WIDE, traits=_T.REARRANGES),
    Operator("SpaceToDepth", (0,), sets=_WIDE, traits=_T.REARRANGES),
    Operator("Split", (0,), style=_SHARE, sets=_BOTH, traits=_T.SELECTS),
    Operator("Gather", (0,), style=_SHARE, sets=_BOTH, traits=_T.SELECTS),
    Operator("Slice", (0,), sets=_WIDE, traits=_T.SELECTS | _T.ONE_SCALE),
    Operator("Expand", traits=_T.REPEATS),
    Operator("Tile", traits=_T.REPEATS),
    Operator("Cast", traits=_T.CASTS),
    Operator("Concat", sets=_BOTH, traits=_T.JOINS | _T.ONE_SCALE),
    Operator("Where", (1, 2), sets=_BOTH),
    Operator("ArgMax", (0,), sets=_BOTH),
    # Arithmetic.
    Operator("Add", sets=_BOTH, traits=_SUM | _T.MAKER),
    Operator("Mul", sets=_BOTH, traits=_SUM),
    Operator("Sub", sets=_WIDE, traits=_SUM),
    Operator("Div", sets=_WIDE, traits=_SUM),
    Operator("Min", sets=_WIDE, traits=_T.ELEMENTWISE | _T.CHANNELWISE),
    Operator("Max", sets=_WIDE, traits=_T.ELEMENTWISE | _T.CHANNELWISE),
    Operator("Sum", traits=_T.CHANNELWISE),
    Operator("Pow", traits=_T.ARITHMETIC),
    Operator("Exp", traits=_T.ARITHMETIC),
)
OPERATORS: dict[str, Operator] = {row.op: row for row in _ROWS}
# Of a Clip that the hardware computes with its maker.
FUSING_CLIP_BOUNDS = frozenset({(0.0, 6.0), (0.0, 1.0)})


def ops_with(traits: Trait) -> frozenset[str]:
    """The operator types that have any of these traits."""
    return frozenset(op for op, row in OPERATORS.items() if row.traits & traits)


# Where ONNX Runtime's own quantizer has another rule than the set 'standard'.
_RUNTIME = (
    OpRule("LayerNormalization", (0,), (1,), 2),
    OpRule("BatchNormalization", (0,), (1,), 2),
    *(OpRule(op, (0,), style=_SHARE) for op in ("Flatten", "Slice", "TopK", "GatherElements")),
    OpRule("CumSum", (0,)),
)


def operator_set(name: str) -> dict[str, OpRule]:
    """The rules of a recipe's operator set: standard, extended, matmul or runtime."""
    if name == "runtime":
        return {**operator_set("standard"), **{rule.op: rule for rule in _RUNTIME}}
    rows = {op: row for op, row in OPERATORS.items() if name in row.sets}
    if name != "standard":
        return dict(rows)
    return {op: replace(row, style=row.standard_style or row.style) for op, row in rows.items()}


def is_operand(op: str, index: int) -> bool:
    """Whether the operator computes with this input; a bound, a size or a padding value it only obeys."""
    rule = OPERATORS.get(op)
    if rule is None or rule.data in (EVERY_INPUT, ()):
        return True
    return index in (*rule.data, *rule.weights, rule.bias)


LAYERS = ops_with(Trait.LAYER)
BIASED_LAYERS = frozenset(op for op in LAYERS if OPERATORS[op].bias is not None)
FUSING_PRODUCERS = ops_with(Trait.MAKER)
FUSING_CONSUMERS = ops_with(Trait.FUSED)
GATES = ops_with(Trait.GATE)
AVERAGE_POOLS = ops_with(Trait.AVERAGE)
