"""Activations: Gelu as one node, HardSwish as two, Clip with a bound that a quantizer can keep."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from roundel.model import graph
from roundel.model.edit import Editor, rewrite
from roundel.passes.batch_norms import is_constant_layer
from roundel.targets.operators import BIASED_LAYERS, Trait, ops_with

_SINCE = 20

# How far a constant may lie from its ideal; exporters round to the type of the tensor.
_CLOSE = {ir.DataType.FLOAT: 1e-6, ir.DataType.DOUBLE: 1e-12, ir.DataType.FLOAT16: 1e-3}


def fuse_gelu(model: ir.Model) -> int:
    """Fuses `0.5 * x * (1 + erf(x / sqrt(2)))`, in any order of its factors, into Gelu.

    Needs opset 20, where the operator exists. Tolerance: rounding of the product, about 1e-6.
    """
    return rewrite(model, _fuse, "Erf") if graph.opset_version(model) >= _SINCE else 0


def _fuse(editor: Editor, erf: ir.Node) -> bool:
    inner = _scaled_input(erf.inputs[0])
    add = graph.only_reader(erf.outputs[0])
    one = graph.with_number(add, "Add")
    if inner is None or add is None or one is None or one[1] != 1.0:
        return False
    source, nodes = inner[0], {inner[1], erf, add}
    product = _product(source, add)
    if product is None:
        return False
    last, nodes = product[0], nodes | product[1]
    if not graph.replaceable(source, nodes, last):
        return False
    editor.replace_all(nodes, last, "Gelu", [source], {})
    return True


def _scaled_input(value: ir.Value | None) -> tuple[ir.Value, ir.Node] | None:
    """Match `x / sqrt(2)` or `x * sqrt(1/2)`: x and the node."""
    node = graph.producer(value, "Div", "Mul")
    if node is None:
        return None
    if node.op_type == "Mul":
        pair = graph.with_number(node, "Mul")
        found = None if pair is None else (pair[0], 1 / pair[1] if pair[1] else math.inf)
    else:
        source, divisor = graph.input_at(node, 0), graph.constant_scalar(graph.input_at(node, 1))
        found = None if source is None or divisor is None else (source, divisor)
    if found is None:
        return None
    close = _CLOSE.get(found[0].dtype or ir.DataType.UNDEFINED, 0.0)
    return (found[0], node) if math.isclose(found[1], math.sqrt(2), rel_tol=close) else None


def _product(source: ir.Value, add: ir.Node) -> tuple[ir.Node, set[ir.Node]] | None:
    """The rest of the product, whose factors are x, 0.5 and the output of `add`."""
    first = graph.only_reader(add.outputs[0])
    if first is None or not graph.is_op(first, "Mul"):
        return None
    other = next((b for a, b in graph.operands(first) if a is add.outputs[0]), None)
    half = graph.with_number(graph.producer(other, "Mul"), "Mul")
    if half is not None and half[0] is source and half[1] == 0.5:
        maker = graph.producer(other, "Mul")
        assert maker is not None, "just matched"
        return first, {first, maker}
    second = graph.only_reader(first.outputs[0])
    if second is None or not graph.is_op(second, "Mul"):
        return None
    rest = next((b for a, b in graph.operands(second) if a is first.outputs[0]), None)
    factors = ((other, rest), (rest, other))
    matches = any(one is source and graph.constant_scalar(two) == 0.5 for one, two in factors)
    return (second, {first, second}) if matches else None


def decompose_hard_swish(model: ir.Model) -> int:
    """Replaces HardSwish(x) by x * HardSigmoid(x, 1/6, 1/2), its definition. Exact."""
    return rewrite(model, _decompose, "HardSwish")


def _decompose(editor: Editor, node: ir.Node) -> bool:
    source = graph.input_at(node, 0)
    if source is None:
        return False
    base = node.name or node.outputs[0].name or "HardSwish"
    gate = editor.insert(node, "HardSigmoid", [source], {"alpha": 1 / 6, "beta": 0.5}, f"{base}_gate")
    gate.shape, gate.type = node.outputs[0].shape, node.outputs[0].type
    editor.replace(node, "Mul", [source, gate], {})
    return True


_TOP = 127  # the largest code of a symmetric 8-bit type
_CARRIERS = ops_with(Trait.POOL | Trait.SHAPES) | {"Pad"}


def scale_clip_bounds(model: ir.Model) -> int:
    """Rescales a layer and its readers so that the Clip between them ends at 127 * 2**-k.

    min(max(x, 0), m) * f = min(max(f x, 0), f m): the layer before is multiplied by f, the layers behind
    are divided by it, and nothing else sees the difference. The quantizer's saturation can then do the
    work of the Clip, and the codes above the bound are not wasted. Tolerance: rounding of the weights in
    float32, about 1e-6.
    """
    return rewrite(model, _rescale, "Clip")


def rescalable_behind(node: ir.Node) -> list[ir.Node] | None:
    """The layers behind a Clip to [0, m] that can be rescaled together with the layer before it."""
    maker = graph.producer(node.inputs[0], *BIASED_LAYERS)
    if maker is None or graph.only_reader(maker.outputs[0]) is not node:
        return None
    low, high = (graph.constant_scalar(graph.input_at(node, index)) for index in (1, 2))
    if low != 0 or not (high or 0) > 0:
        return None
    # The NPU knows the pair of depthwise Conv and ReLU6 as it is, and no other bound for it.
    if not is_constant_layer(maker) or is_depthwise(maker):
        return None
    return _layers_behind(node.outputs[0])


def is_depthwise(conv: ir.Node) -> bool:
    """Whether every channel has a kernel of its own."""
    shape = graph.dims(graph.input_at(conv, 1)) or ()
    return graph.attribute_int(conv, "group", 1) > 1 and len(shape) > 1 and shape[1] == 1


def _rescale(editor: Editor, node: ir.Node) -> bool:
    behind = rescalable_behind(node)
    if not behind:
        return False
    bound = graph.constant_scalar(node.inputs[2])
    maker = node.inputs[0].producer() if node.inputs[0] is not None else None
    assert bound is not None
    assert maker is not None
    target = _TOP * 2.0 ** math.ceil(math.log2(bound / _TOP))
    factor = target / bound
    if factor == 1.0:
        return False
    for index in (1, 2):
        _multiply(editor, maker, index, factor)
    for layer in behind:
        _multiply(editor, layer, 1, 1 / factor)
    editor.set_constant(node, 2, np.asarray(target, np.float32), "bound")
    return True


def _multiply(editor: Editor, layer: ir.Node, index: int, factor: float) -> None:
    array = graph.real_constant(graph.input_at(layer, index))
    if array is not None:
        scaled = (array.astype(np.float64) * factor).astype(array.dtype)
        editor.set_constant(layer, index, scaled, "weight" if index == 1 else "bias")


def _layers_behind(value: ir.Value) -> list[ir.Node] | None:
    """Every layer that reads it, through operators that scale along; None where another reads it, too."""
    found: list[ir.Node] = []
    stack = [value]
    while stack:
        current = stack.pop()
        if current.is_graph_output():
            return None
        for use in current.uses():
            node = use.node
            if use.idx != 0 or node.graph is not value.graph:
                return None
            if graph.is_op(node, *BIASED_LAYERS) and graph.real_constant(graph.input_at(node, 1)) is not None:
                found.append(node)
            elif graph.is_op(node, *_CARRIERS) and _zero_pad(node):
                stack.extend(node.outputs)
            else:
                return None
    return found


def _zero_pad(node: ir.Node) -> bool:
    filler = graph.input_at(node, 2) if node.op_type == "Pad" else None
    return filler is None or graph.constant_scalar(filler) == 0
