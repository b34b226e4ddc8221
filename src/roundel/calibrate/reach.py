"""How far a layer's scales may still move without leaving the NPU's shift limits."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from roundel.calibrate.positions import position
from roundel.calibrate.state import QuantState
from roundel.model.graph import only_reader
from roundel.plan.stored import stored_output
from roundel.targets.shifts import XINT8_LIMITS
from roundel.types import QParams


@dataclass(frozen=True, slots=True)
class Reach:
    """A layer's fixed positions.

    Attributes:
        input: position of its input.
        output: position of the tensor that holds its result.
        leaky: whether a LeakyRelu follows.
    """

    input: int
    output: int
    leaky: bool

    def cut(self, weight_scale: float) -> int:
        """Bits dropped from the accumulator."""
        return self.input + position(weight_scale) - self.output

    def allows_weight(self, scale: float) -> bool:
        """Whether the weight may have this scale."""
        low, high = XINT8_LIMITS.cut
        return low <= self.cut(scale) <= high

    def allows_bias(self, scale: float, weight_scale: float) -> bool:
        """Whether the bias may have this scale, given the weight's."""
        low, high = XINT8_LIMITS.bias(self.cut(weight_scale), leaky=self.leaky)
        return low <= self.input + position(weight_scale) - position(scale) <= high


def layer_reach(graph: ir.Graph, state: QuantState) -> dict[str, Reach]:
    """The reach of every layer between two stored tensors with one scale each, by node name."""
    found = {}
    for node in graph:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or node.inputs[0] is None:
            continue
        out = stored_output(node, state.plan.tensors)
        given, made = state.params.get(str(node.inputs[0].name)), state.params.get(out or "")
        if given is None or made is None or _several(given, made):
            continue
        reader = only_reader(node.outputs[0])
        leaky = reader is not None and reader.op_type == "LeakyRelu"
        found[str(node.name)] = Reach(position(float(given.scale)), position(float(made.scale)), leaky)
    return found


def _several(*params: QParams) -> bool:
    return any(p.scale.ndim for p in params)
