"""Questions and small edits that the tools share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import attribute_int, constant_array
from roundel.passes.cleanup import remove_dead_code
from roundel.qdq.nodes import Names, constant

QUANTIZE = frozenset({"QuantizeLinear", "ExtendedQuantizeLinear"})
DEQUANTIZE = frozenset({"DequantizeLinear", "ExtendedDequantizeLinear"})
_PARTS = ("codes", "scale", "zero_point")
LAYERS = ("Conv", "ConvTranspose", "Gemm")


def is_quantize(node: ir.Node | None) -> bool:
    """Whether the node makes codes."""
    return node is not None and node.op_type in QUANTIZE


def is_dequantize(node: ir.Node | None) -> bool:
    """Whether the node reads codes."""
    return node is not None and node.op_type in DEQUANTIZE


def pairs(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    """Every quantizer of a computed tensor with its dequantizers; nothing else reads its codes."""
    for node in list(graph):
        if not is_quantize(node) or node.outputs[0].is_graph_output():
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if readers and all(is_dequantize(reader) for reader in readers):
            yield node, readers


def numbers(node: ir.Node) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Scale and zero point of a Q or DQ node; None where they are computed."""
    scale = constant_array(node.inputs[1])
    if scale is None:
        return None
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        zero = constant_array(node.inputs[2])
        return None if zero is None else (scale, zero)
    kind = node.outputs[0].dtype if is_quantize(node) else node.inputs[0].dtype if node.inputs[0] else None
    return scale, np.zeros(scale.shape, kind.numpy() if kind is not None else np.uint8)


def along(values: NDArray[Any], node: ir.Node, rank: int) -> NDArray[Any]:
    """Scale or zero point of a DQ node in a shape that multiplies its codes."""
    if values.ndim == 0 or values.size == 1:
        return values.reshape(())
    shape = [1] * rank
    shape[attribute_int(node, "axis", 1) % rank] = -1
    return values.reshape(shape)


def stored_values(node: ir.Node) -> NDArray[np.float32] | None:
    """What a DQ node makes of constant codes; None where they are computed."""
    codes = constant_array(node.inputs[0])
    given = numbers(node)
    if codes is None or given is None:
        return None
    scale, zero = (along(part, node, codes.ndim) for part in given)
    difference = codes.astype(np.float64) - zero.astype(np.float64)
    return np.asarray(difference * scale.astype(np.float64), np.float32)


def stand_for(graph: ir.Graph, value: ir.Value, source: ir.Value) -> None:
    """Let `source` take the place of `value` everywhere; graph outputs keep their names."""
    positions = [i for i, out in enumerate(graph.outputs) if out is value]
    for use in list(value.uses()):
        use.node.replace_input_with(use.idx, source)
    for position in positions:
        name, maker = str(value.name), source.producer()
        value.name = f"{name}_replaced"
        if maker is None or source.is_graph_output():
            copy = ir.Value(name=name, shape=value.shape, type=value.type)
            graph.append(ir.Node("", "Identity", [source], outputs=[copy], name=f"{name}_Identity"))
            graph.outputs[position] = copy
        else:
            source.name = name
            source.shape, source.type = source.shape or value.shape, source.type or value.type
            graph.outputs[position] = source


def swap_constant(graph: ir.Graph, places: Iterable[tuple[ir.Node, int]], array: NDArray[Any]) -> None:
    """New content for the constant that is read here; it keeps its name where nobody else reads it."""
    spots = list(places)
    first, index = spots[0]
    old = first.inputs[index] if index < len(first.inputs) else None
    tensor = ir.tensor(array)
    new = ir.Value(shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    for node, place in spots:
        if place >= len(node.inputs):
            node.resize_inputs(place + 1)
        node.replace_input_with(place, new)
    name = str(old.name) if old is not None else f"{first.name}_{_PARTS[index]}"
    if old is not None and not old.uses() and not old.is_graph_output():
        graph.initializers.pop(name, None)
    new.name = Names(graph)(name)
    graph.register_initializer(new)


def fresh_constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """A new initializer under a name that nothing else has."""
    return constant(graph, Names(graph)(name), array)


def tidy(model: ir.Model) -> ir.Model:
    """Drop what nothing reads any more, and put the nodes into order."""
    remove_dead_code(model)
    model.graph.sort()
    return model


def set_type(value: ir.Value, dtype: ir.DataType) -> None:
    """Change what a value is known to hold."""
    value.type = ir.TensorType(dtype)
