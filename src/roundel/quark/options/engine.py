"""Options about the NPU's arithmetic and its limits."""

from __future__ import annotations

from typing import Any

from roundel.quark.request import Request
from roundel.quark.rows import COUNT, SWITCH, Effect, Option, always, computed, to_field

_SIMULATED = {
    "ConvertLeakyReluToDPUVersion": "leaky_relu",
    "ConvertSigmoidToHardSigmoid": "sigmoid_to_hard_sigmoid",
    "ConvertHardSigmoidToDPUVersion": "hard_sigmoid",
    "ConvertAvgPoolToDPUVersion": "average_pool",
    "ConvertReduceMeanToDPUVersion": "reduce_mean",
    "ConvertSoftmaxToDPUVersion": "softmax",
    "ConvertInstanceNormToDPUVersion": "instance_norm",
    "ConvertClipToDPUVersion": "clip",
}
_LIMITS = {
    "AdjustShiftCut": "adjust_shift_cut",
    "AdjustShiftBias": "adjust_shift_bias",
    "AdjustShiftRead": "adjust_shift_read",
    "AdjustShiftWrite": "adjust_shift_write",
    "AdjustHardSigmoid": "adjust_hard_sigmoid",
    "AdjustShiftSwish": "adjust_shift_swish",
}
_ALIGNED = {
    "AlignConcat": "align_concat",
    "AlignPool": "align_pool",
    "AlignPad": "align_pad",
    "AlignSlice": "align_slice",
}


def _simulate(value: Any, request: Request) -> Effect:
    return Effect(recipe={} if value else {f"npu.{name}": False for name in _SIMULATED.values()})


def _limits(value: Any, request: Request) -> Effect:
    return Effect(recipe={} if value else {f"npu.{name}": False for name in _LIMITS.values()})


ENGINE: tuple[Option, ...] = (
    *(to_field(key, False, SWITCH, f"npu.{name}") for key, name in _SIMULATED.items()),
    *(to_field(key, False, SWITCH, f"npu.{name}") for key, name in _LIMITS.items()),
    *(to_field(key, False, SWITCH, f"placement.{name}") for key, name in _ALIGNED.items()),
    always("AlignTranspose", False, SWITCH, "Transpose keeps its input's scale."),
    always("AlignReshape", False, SWITCH, "Reshape keeps its input's scale."),
    # The two switches for all of them come last: they win.
    computed("SimulateDPU", True, SWITCH, "npu.* (all arithmetic off)", _simulate),
    computed("NPULimitationCheck", True, SWITCH, "npu.adjust_* (all limits off)", _limits),
    always("MaxLoopNum", 5, COUNT, "limits are met by solving for them, not by repeating."),
)
