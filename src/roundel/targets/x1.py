"""What a Phoenix NPU (XDNA1, compiler X1) does with each operator, measured on one: its place, its numbers.

One row for each operator type. The measurements are one person's, on one Ryzen 7 8700G with Ryzen AI 1.7.1;
docs/npu.md says how far each of them goes. An operator without a row is judged by AMD's table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Evidence(enum.Enum):
    """How well an operator's arithmetic is known."""

    MEASURED = "measured"  # every code of a fixture agreed
    RULE = "by the measured rule"  # the same rule, in a setting that no fixture had
    COPIED = "codes are moved"  # nothing is rounded
    ASSUMED = "assumed"  # no fixture exists
    CPU = "on the CPU"  # ONNX Runtime computes it


@dataclass(frozen=True, slots=True)
class X1Row:
    """One operator on X1.

    Attributes:
        op: operator type.
        runs: whether the NPU takes it, where its sides are quantized.
        seen: what shows it.
        arithmetic: how well the numbers are known.
        how: what the NPU computes, or is taken to compute.
    """

    op: str
    runs: bool
    seen: str
    arithmetic: Evidence = Evidence.ASSUMED
    how: str = "rounded once, halves up"


_LAYER = "the sum and the bias exactly, then one rounding, halves up"
_MOVED = "codes are moved"
_NEVER = "never ran on the NPU in any measured network"
_POOL = "sum x k / 2**n, rounded once, halves up"

_ROWS = (
    # Layers.
    X1Row("Conv", True, "all networks, grouped and depthwise ones too", Evidence.RULE, _LAYER),
    X1Row("ConvTranspose", True, "ran, though AMD's table leaves it out", how=_LAYER),
    X1Row("Gemm", True, "ResNet50's classifier", how=_LAYER),
    X1Row("MatMul", False, _NEVER),
    X1Row("Einsum", False, "YOLO-World's attention"),
    # Activations.
    X1Row("Relu", True, "all networks", Evidence.COPIED, "negative codes become the zero point"),
    X1Row("Clip", True, "35 of MobileNetV2", Evidence.COPIED, "codes are cut at the bounds"),
    X1Row("LeakyRelu", True, "123 of Real-ESRGAN", how="slope n / 256, then one rounding, halves up"),
    X1Row("PRelu", False, _NEVER),
    X1Row("HardSigmoid", True, "57 of YOLOv8n", how="min(max(x + 3, 0), 6) x 2731 / 2**14, halves up"),
    X1Row("Sigmoid", True, "written as HardSigmoid [inference]"),
    X1Row("Softmax", True, "4-D, alone"),
    # Arithmetic.
    X1Row("Add", True, "16 of ResNet50"),
    X1Row(
        "Mul",
        True,
        "YOLOv8n; its rounding is half up or half away from zero",
        how="halves up, the better guess",
    ),
    X1Row("Div", True, "4 of YOLO-World"),
    # Pools and what moves codes.
    X1Row("MaxPool", True, "all networks", Evidence.COPIED, _MOVED),
    X1Row("AveragePool", True, "BiSeNetV2", how=_POOL),
    X1Row(
        "GlobalAveragePool",
        True,
        "its factor is the NPU's own, with or without the Mul in the file",
        how=_POOL,
    ),
    X1Row("Resize", True, "nearest, and most bilinear ones"),
    X1Row("Concat", True, "YOLOv8n", Evidence.COPIED, _MOVED),
    X1Row("Slice", True, "YOLOv8n", Evidence.COPIED, _MOVED),
    X1Row("Reshape", True, "98 of a BiT network, up to 4-D", Evidence.COPIED, _MOVED),
    X1Row("Transpose", True, "4-D, alone", Evidence.COPIED, _MOVED),
    X1Row("Flatten", True, "ResNet50", Evidence.COPIED, _MOVED),
    X1Row("DepthToSpace", True, "super resolution", Evidence.COPIED, _MOVED),
    X1Row("Squeeze", False, "MiDaS' last node, YOLO-World"),
    X1Row("Unsqueeze", False, "4 of YOLO-World"),
    # Norms and reductions.
    X1Row("InstanceNormalization", False, "49 of a BiT network, though AMD's table lists it"),
    X1Row("LayerNormalization", False, "never ran, though AMD's table lists it"),
    X1Row("ReduceMax", False, "4 of YOLO-World, though AMD's table lists it"),
)
X1_ROWS: Mapping[str, X1Row] = MappingProxyType({row.op: row for row in _ROWS})
_UNKNOWN = X1Row("", True, "AMD's table")

MOST_DIMENSIONS = 4  # what touches a tensor of more never ran
NO_XCLBIN = (
    "Ryzen AI 1.8 installs no xclbin for Phoenix and Hawk Point, though its documentation names one: take"
    " phoenix/4x4.xclbin from 1.7.1. Without it the compiler builds for Strix, silently, and the run ends in"
    " a timeout."
)
NO_WINML = (
    "AMD's WinML pages recommend A8W8 and A16W8, which does not hold for Phoenix and Hawk Point: there all"
    " nodes of such a file run on the CPU."
)


def x1_row(op: str) -> X1Row:
    """What is known of the operator; of one without a row, nothing."""
    return X1_ROWS.get(op, _UNKNOWN)
