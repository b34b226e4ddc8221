"""What `roundel quantize --device` does by itself to keep nodes on the NPU."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from roundel.check.patterns import conv_before, is_depthwise
from roundel.check.stored import StoredTensors
from roundel.model.graph import op_key
from roundel.passes.scale_clip_bounds import rescalable
from roundel.plan.saturation import on_grid, saturates, upper_bound, will_saturate
from roundel.plan.types import Observed, QuantPlan, Shared
from roundel.targets.devices import Compiler, Device, Format
from roundel.types import ScaleKind, Scheme

_TOUCHED = frozenset({Format.XINT8, Format.A8W8})
_NEVER_LARGER = frozenset(
    {
        "MaxPool",
        "AveragePool",
        "GlobalAveragePool",
        "Reshape",
        "Flatten",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Split",
    }
)


@dataclass(frozen=True, slots=True)
class Legaliser:
    """Says which Clips become Relu, for one format on one device.

    Attributes:
        format: the number format.
        device: the device.
        plan: of a float model, None for a finished one.
        stored: of a finished model, None for a float one.
    """

    format: Format
    device: Device
    plan: QuantPlan | None
    stored: StoredTensors | None

    def becomes_relu(self, node: ir.Node) -> bool:
        """Whether the Clip is replaced by a Relu, because the quantizer saturates at its bound.

        A depthwise Conv keeps its Clip in XINT8: AMD's logs have that pair on the NPU, and the pair of
        depthwise Conv and Relu on the CPU.
        """
        bound = upper_bound(node)
        if bound is None or self.format not in _TOUCHED or self.device.compiler is not Compiler.X2:
            return False
        conv = conv_before(node)
        if conv is not None and is_depthwise(conv) and self.format is Format.XINT8:
            return False
        if self.plan is not None:
            return self._will(self.plan, node, bound)
        return self._does(node, bound)

    def _will(self, plan: QuantPlan, node: ir.Node, bound: float) -> bool:
        if will_saturate(plan, node):
            return True
        tensor = plan.tensors.get(str(node.outputs[0].name))
        if tensor is None or not isinstance(tensor.source, Observed | Shared):
            return False
        if not _held_below(node.outputs[0]).issuperset(plan.leaders(tensor.name)):
            return False
        if isinstance(tensor.scheme, Scheme) and tensor.scheme.scale is ScaleKind.FLOAT:
            return True
        return on_grid(bound, tensor.scheme) or bool(rescalable(node))

    def _does(self, node: ir.Node, bound: float) -> bool:
        tensors = self.stored.tensors if self.stored is not None else {}
        stored = tensors.get(str(node.outputs[0].name))
        params = None if stored is None else stored.params
        return params is not None and saturates(params, bound)


def _held_below(value: ir.Value) -> set[str]:
    """The tensor and those made from it that hold nothing larger: one scale for them keeps the bound."""
    found: set[str] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        found.add(str(current.name))
        stack.extend(
            out for node in current.consumers() if op_key(node) in _NEVER_LARGER for out in node.outputs
        )
    return found
