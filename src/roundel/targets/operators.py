"""The operator tables: one line per operator, read like a datasheet."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Style(enum.Enum):
    """How an operator's output relates to its input."""

    OWN = "own"  # the output has a range of its own
    SHARE = "share"  # the output holds the input's values: one scale for both
    FOLLOW = "follow"  # quantized only where the input already is (Relu, Clip)


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
        output_range: range of the output that no data can change (Softmax).
    """

    op: str
    data: tuple[int, ...] = EVERY_INPUT
    weights: tuple[int, ...] = ()
    bias: int | None = None
    style: Style = Style.OWN
    min_opset: int = 1
    channel_axis: int | None = None
    output_range: tuple[float, float] | None = None


_SHARED_TABLE = (
    OpRule("Conv", data=(0,), weights=(1,), bias=2, channel_axis=0),
    OpRule("ConvTranspose", data=(0,), weights=(1,), bias=2, channel_axis=1),
    OpRule("Gemm", data=(0,), weights=(1,), bias=2, channel_axis=1),
    OpRule("MatMul", data=(0, 1), channel_axis=-1),
    OpRule("Relu", data=(0,), style=Style.FOLLOW),
    OpRule("Clip", data=(0,), style=Style.FOLLOW),
    OpRule("Reshape", data=(0,), style=Style.SHARE),
    OpRule("Transpose", data=(0,), style=Style.SHARE),
    OpRule("Squeeze", data=(0,), style=Style.SHARE),
    OpRule("Unsqueeze", data=(0,), style=Style.SHARE),
    OpRule("Resize", data=(0,), style=Style.SHARE, min_opset=11),
    OpRule("MaxPool", data=(0,), style=Style.SHARE, min_opset=12),
    OpRule("Split", data=(0,), style=Style.SHARE),
    OpRule("Gather", data=(0,), style=Style.SHARE),
    OpRule("Where", data=(1, 2)),
    OpRule("InstanceNormalization", data=(0,), weights=(1,), bias=2),
    OpRule("LayerNormalization", data=(0,), weights=(1, 2)),
    OpRule("EmbedLayerNormalization", data=()),
    OpRule("Softmax", data=(0,), output_range=(0.0, 1.0)),
    OpRule("Sigmoid", data=(0,)),
    OpRule("Tanh", data=(0,)),
    OpRule("Gelu", data=(0,)),
    OpRule("LeakyRelu", data=(0,)),
    OpRule("GlobalAveragePool", data=(0,)),
    OpRule("Pad", data=(0,)),
    OpRule("ArgMax", data=(0,)),
    OpRule("Add"),
    OpRule("Mul"),
    OpRule("Concat"),
)

STANDARD: Mapping[str, OpRule] = MappingProxyType(
    {rule.op: rule for rule in (*_SHARED_TABLE, OpRule("AveragePool", data=(0,), style=Style.SHARE))}
)

EXTENDED: Mapping[str, OpRule] = MappingProxyType(
    {
        rule.op: rule
        for rule in (
            *_SHARED_TABLE,
            OpRule("AveragePool", data=(0,)),
            OpRule("DepthToSpace", data=(0,)),
            OpRule("Div"),
            OpRule("Erf", data=(0,)),
            OpRule("HardSigmoid", data=(0,)),
            OpRule("LpNormalization", data=(0,)),
            OpRule("Max"),
            OpRule("Min"),
            OpRule("PRelu", data=(0,), weights=(1,)),
            OpRule("ReduceMean", data=(0,)),
            OpRule("Slice", data=(0,)),
            OpRule("SpaceToDepth", data=(0,)),
            OpRule("Sub"),
        )
    }
)

MATMUL: Mapping[str, OpRule] = MappingProxyType({op: EXTENDED[op] for op in ("Gemm", "MatMul")})

OPERATOR_SETS: Mapping[str, Mapping[str, OpRule]] = MappingProxyType(
    {"standard": STANDARD, "extended": EXTENDED, "matmul": MATMUL}
)

ELEMENTWISE = frozenset({"Add", "Mul", "Sub", "Div", "Min", "Max"})


def is_operand(op: str, index: int) -> bool:
    """Whether the operator computes with this input; a bound, a size or a padding value it only obeys."""
    rule = EXTENDED.get(op)
    if rule is None or rule.data in (EVERY_INPUT, ()):
        return True
    return index in (*rule.data, *rule.weights, rule.bias)


# A Q/DQ between these pairs would only cost accuracy: the hardware computes them as one operation.
FUSING_PRODUCERS = frozenset(
    {
        "Conv",
        "ConvTranspose",
        "Gemm",
        "MatMul",
        "Add",
        "MaxPool",
        "AveragePool",
        "GlobalAveragePool",
    }
)
FUSING_CONSUMERS = frozenset({"Relu", "LeakyRelu", "PRelu", "Clip"})
FUSING_CLIP_BOUNDS = frozenset({(0.0, 6.0), (0.0, 1.0)})
POOLS = frozenset({"AveragePool", "GlobalAveragePool"})
