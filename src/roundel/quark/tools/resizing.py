"""Power-of-two scales around Resize, for engines that shift there."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from roundel.quark.tools.files import Rewritten
from roundel.quark.tools.wiring import is_dequantize, is_quantize, numbers, swap_constant, tidy


def convert_resize_fs_to_pof2s(model: ir.Model) -> Rewritten:
    """The pairs before and behind each Resize get the next power of two above their scale: nothing clips."""
    result = model.clone()
    count = 0
    for node in [n for n in result.graph if n.op_type == "Resize"]:
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        behind = [use.node for use in node.outputs[0].uses()]
        found = [_quantizer(before), *(reader for reader in behind if is_quantize(reader))]
        for quantizer in found:
            count += quantizer is not None and _round_scale(result.graph, quantizer)
    return tidy(result), f"rounded the scales of {count} pairs"


def _quantizer(node: ir.Node | None) -> ir.Node | None:
    if node is None or not is_dequantize(node) or node.inputs[0] is None:
        return None
    maker = node.inputs[0].producer()
    return maker if is_quantize(maker) else None


def _round_scale(graph: ir.Graph, quantizer: ir.Node) -> bool:
    given = numbers(quantizer)
    if given is None or given[0].size != 1:
        return False
    exact = float(given[0].reshape(()))
    rounded = np.float32(math.ldexp(1.0, math.ceil(math.log2(exact))))
    if rounded == exact:
        return False
    nodes = (quantizer, *(use.node for use in quantizer.outputs[0].uses()))
    swap_constant(graph, [(node, 1) for node in nodes], np.asarray(rounded))
    return True
