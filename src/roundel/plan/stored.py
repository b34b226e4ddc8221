"""Which stored tensor a node really reads or makes, looking through pairs that fuse."""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

from roundel.model.graph import only_reader
from roundel.plan.types import QuantPlan
from roundel.recipe import Npu
from roundel.targets.operators import FUSING_CONSUMERS, POOLS


def stored_output(node: ir.Node, stored: Container[str]) -> str | None:
    """The quantized tensor that holds the node's result: its own, or that of the activation behind it."""
    if not node.outputs:
        return None
    value = node.outputs[0]
    if value.name in stored:
        return str(value.name)
    reader = only_reader(value)
    if reader is None or not (reader.op_type in FUSING_CONSUMERS or reader.op_type in POOLS):
        return None
    if reader.op_type in POOLS and node.op_type != "Pad":
        return None
    after = reader.outputs[0].name
    return str(after) if after in stored else None


def becomes_hard_sigmoid(node: ir.Node, plan: QuantPlan, npu: Npu) -> bool:
    """Whether a Sigmoid is written as HardSigmoid.

    One whose output shares its scale with other tensors (class scores beside boxes, say) stays: the output
    of a HardSigmoid must have position 7 or more, and would cut the others off at 1.
    """
    if node.op_type != "Sigmoid" or not npu.sigmoid_to_hard_sigmoid:
        return False
    name = str(node.outputs[0].name).removesuffix("_QuantizeLinear_Input")
    return name not in plan.tensors or len(plan.leaders(name)) == 1


def stored_input(value: ir.Value | None, stored: Container[str]) -> str | None:
    """The quantized tensor behind a value: itself, or the input of the Pad that makes it."""
    if value is None:
        return None
    if value.name in stored:
        return str(value.name)
    maker = value.producer()
    if maker is not None and maker.op_type == "Pad" and maker.inputs[0] is not None:
        before = maker.inputs[0].name
        return str(before) if before in stored else None
    return None
