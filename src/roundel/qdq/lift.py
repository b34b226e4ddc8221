"""Read a short-float model: every tensor out of the nodes that store it, whichever form these have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import clip_bounds, constant_array, constant_scalar, is_constant, only_reader
from roundel.numerics.floats import largest, rounded
from roundel.qdq.floats import ONNX_TYPES, FloatCell
from roundel.qdq.nodes import QUARK, Names, constant
from roundel.types import FloatType

LEFT_NAME = "_QuantizeLinear_Input"  # of a graph output's tensor before its pair
_QUANTIZE, _DEQUANTIZE = "ExtendedQuantizeLinear", "ExtendedDequantizeLinear"
_FLOAT_TYPES = {dtype: ftype for ftype, dtype in ONNX_TYPES.items()}
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SAME_SCALE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor that the model stores in a short float, free of the nodes that did so.

    Attributes:
        value: the float32 tensor.
        base: the name that its nodes and constants derive theirs from.
        uses: who reads it through its pair.
        outputs: positions among the graph outputs that show it.
        ftype: the type.
        factor: its scale, or None.
        clipped: whether values beyond the type's range were clipped first.
    """

    value: ir.Value
    base: str
    uses: tuple[tuple[ir.Node, int], ...]
    outputs: tuple[int, ...]
    ftype: FloatType
    factor: NDArray[np.float32] | None
    clipped: bool


def lift(graph: ir.Graph) -> tuple[Stored, ...]:
    """Take every short-float tensor of the main graph out of its pair or casts, in place."""
    names = Names(graph)
    found = [_lift_moving(graph, node) for node in list(graph) if _entered(node) is not None]
    held = [v for v in graph.initializers.values() if v.dtype in _FLOAT_TYPES]
    found += [_lift_constant(graph, value, names) for value in held]
    if all(node.domain != QUARK for node in graph.all_nodes()):
        graph.opset_imports.pop(QUARK, None)
    return tuple(stored for stored in found if stored is not None)


def _entered(node: ir.Node) -> FloatType | None:
    """The short float that the node makes of float32."""
    if (node.domain, node.op_type) == (QUARK, _QUANTIZE):
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        return _FLOAT_TYPES.get(zero.dtype) if zero is not None and zero.dtype is not None else None
    to = _cast_to(node)
    return None if to is None else _FLOAT_TYPES.get(to)


def _cast_to(node: ir.Node) -> ir.DataType | None:
    if node.op_type != "Cast" or node.domain not in ("", "ai.onnx"):
        return None
    return ir.DataType(node.attributes["to"].as_int())


def _leaves(node: ir.Node, index: int) -> bool:
    """Whether the node turns the short float that it reads at this place back into float32."""
    pair = (node.domain, node.op_type) == (QUARK, _DEQUANTIZE)
    return index == 0 and (pair or _cast_to(node) is ir.DataType.FLOAT)


def _exits(short: ir.Value) -> list[ir.Node] | None:
    """The nodes that read a short float back; None where anything else reads it."""
    uses = list(short.uses())
    if not uses or short.is_graph_output() or not all(_leaves(use.node, use.idx) for use in uses):
        return None
    return [use.node for use in uses]


def _lift_moving(graph: ir.Graph, entry: ir.Node) -> Stored | None:
    ftype, source, exits = _entered(entry), entry.inputs[0], _exits(entry.outputs[0])
    if ftype is None or source is None or exits is None:
        return None
    nodes = [*exits, entry]
    if entry.domain == QUARK:
        factor = constant_scalar(entry.inputs[1])
        if factor is None or any(constant_scalar(node.inputs[1]) != factor for node in exits):
            return None
    else:
        factor = 1.0
        scaled = _scaling(entry, exits)
        if scaled is not None:
            factor, before, exits = scaled
            source, nodes = before.inputs[0], [*exits, *nodes, before]
    assert source is not None
    clip = source.producer()
    clipped = clip is not None and only_reader(source) is nodes[-1] and _clips(clip, ftype, factor)
    if clip is not None and clipped:
        source, nodes = clip.inputs[0], [*nodes, clip]
    assert source is not None
    outs = [node.outputs[0] for node in exits]
    scale = None if factor == 1.0 else np.asarray(factor, np.float32)
    uses, shown = _release(graph, source, outs)
    _discard(graph, nodes)
    return Stored(source, str(source.name).removesuffix(LEFT_NAME), uses, shown, ftype, scale, clipped)


def _scaling(entry: ir.Node, exits: list[ir.Node]) -> tuple[float, ir.Node, list[ir.Node]] | None:
    """The scale around a pair of casts: its value, the node before, and the products behind."""
    value = entry.inputs[0]
    before = value.producer() if value is not None else None
    if before is None or value is None or only_reader(value) is not entry:
        return None
    if before.op_type not in ("Div", "Mul"):
        return None
    given = constant_scalar(before.inputs[1])
    behind = [only_reader(node.outputs[0]) for node in exits]
    if not given or not np.isfinite(given):
        return None
    wanted = given if before.op_type == "Div" else 1 / given
    products = [node for node in behind if node is not None and node.op_type == "Mul"]
    factors = [constant_scalar(node.inputs[1]) for node in products]
    if len(products) != len(exits) or len(set(factors)) != 1 or factors[0] is None:
        return None
    near = abs(factors[0] - wanted) <= _SAME_SCALE * abs(wanted)
    return (factors[0], before, products) if near else None


def _clips(node: ir.Node, ftype: FloatType, factor: float) -> bool:
    """Whether a Clip only keeps values within what the type can hold."""
    bounds = clip_bounds(node) if node.op_type == "Clip" else None
    if bounds is None or bounds[0] is None or bounds[1] is None:
        return False
    top = largest(ftype) * factor
    return -bounds[0] == bounds[1] and abs(bounds[1] - min(top, _FLOAT32_MAX)) <= _SAME_SCALE * top


def _lift_constant(graph: ir.Graph, value: ir.Value, names: Names) -> Stored | None:
    exits, codes = _exits(value), constant_array(value)
    ftype = _FLOAT_TYPES[value.dtype] if value.dtype is not None else None
    if exits is None or codes is None or ftype is None:
        return None
    nodes, factor = list(exits), 1.0
    if exits[0].domain == QUARK:
        factor = constant_scalar(exits[0].inputs[1]) or 0.0
    else:
        behind = [only_reader(node.outputs[0]) for node in exits]
        products = [n for n in behind if n is not None and n.op_type == "Mul" and is_constant(n.inputs[1])]
        factors = {constant_scalar(n.inputs[1]) for n in products}
        if len(products) == len(exits) and len(factors) == 1 and None not in factors:
            factor = factors.pop() or 0.0
            exits, nodes = products, [*products, *nodes]
    if factor <= 0:
        return None
    outs = [node.outputs[0] for node in exits]
    content = np.asarray(codes.astype(np.float32) * np.float32(factor), np.float32)
    base = str(value.name).removesuffix("_quantized")
    whole = constant(graph, names(base), content)
    uses, shown = _release(graph, whole, outs)
    _discard(graph, nodes)
    scale = None if factor == 1.0 else np.asarray(factor, np.float32)
    return Stored(whole, base, uses, shown, ftype, scale, clipped=False)


def _release(
    graph: ir.Graph, source: ir.Value, outs: list[ir.Value]
) -> tuple[tuple[tuple[ir.Node, int], ...], tuple[int, ...]]:
    """Let the source stand for the outputs of its pair; returns who read these, and where they were shown."""
    uses = tuple((use.node, use.idx) for out in outs for use in out.uses())
    for node, index in uses:
        node.replace_input_with(index, source)
    shown = tuple(i for i, value in enumerate(graph.outputs) if any(value is out for out in outs))
    for position in shown:
        _show(graph, position, source)
    return uses, shown


def _show(graph: ir.Graph, position: int, source: ir.Value) -> None:
    """Make the source a graph output under the name of the one that is there."""
    old = graph.outputs[position]
    name, shape, kind = old.name, old.shape, old.type
    old.name = None
    if source.is_graph_output() or source.producer() is None:
        copy = ir.Value(name=name, shape=source.shape, type=source.type)
        graph.append(ir.Node("", "Identity", [source], outputs=[copy], name=f"{name}_Identity"))
        graph.outputs[position] = copy
        return
    graph.outputs[position] = source
    source.name = name
    source.shape, source.type = source.shape or shape, source.type or kind


def _discard(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    """Remove nodes, each after those that read it, and the constants that nothing reads any more."""
    constants = {value for node in nodes for value in node.inputs[1:] if is_constant(value)}
    constants |= {node.inputs[0] for node in nodes if is_constant(node.inputs[0])}
    graph.remove(nodes, safe=True)
    for value in constants:
        forget(graph, value)


def forget(graph: ir.Graph, value: ir.Value | None) -> None:
    if value is not None and not value.uses() and not value.is_graph_output():
        graph.initializers.pop(str(value.name), None)


Form = Literal["pair", "cast", "plain"]


def put(graph: ir.Graph, tensors: Sequence[Stored], form: Form, *, half_weights: bool = False) -> None:
    """Store lifted tensors in the given form, in place.

    Args:
        graph: where they were lifted from.
        tensors: what `lift` gave.
        form: pair, cast, or plain: constants rounded, casts at the graph inputs only.
        half_weights: constants in 16 bits.
    """
    names = Names(graph)
    for tensor in tensors:
        if is_constant(tensor.value):
            _put_constant(graph, names, tensor, form, half_weights=half_weights)
        elif form != "plain" or tensor.value.is_graph_input():
            _put_moving(graph, names, tensor, "cast" if form == "plain" else form)
    if any(node.domain == QUARK for node in graph):
        graph.opset_imports.setdefault(QUARK, 1)
    graph.sort()


def _put_moving(graph: ir.Graph, names: Names, tensor: Stored, form: Literal["pair", "cast"]) -> None:
    source, out_name = tensor.value, None
    if tensor.outputs and graph.outputs[tensor.outputs[0]] is source:
        out_name = str(source.name)
        source.name = names(f"{tensor.base}{LEFT_NAME}")
    cell = FloatCell.make(graph, names, tensor.base, tensor.ftype, tensor.factor, form)
    out = names(f"{tensor.base}_DequantizeLinear_Output") if out_name is None else out_name
    nodes = cell.there_and_back(source, out, clip=tensor.clipped)
    _insert(graph, source, nodes)
    last = nodes[-1].outputs[0]
    for node, index in tensor.uses:
        node.replace_input_with(index, last)
    if out_name is not None:
        for position in tensor.outputs:
            last.shape, last.type = source.shape, source.type
            graph.outputs[position] = last


def _insert(graph: ir.Graph, source: ir.Value, nodes: list[ir.Node]) -> None:
    producer = source.producer()
    if producer is not None:
        graph.insert_after(producer, nodes)
    else:
        graph.insert_before(graph[0], nodes)


def _put_constant(graph: ir.Graph, names: Names, tensor: Stored, form: Form, *, half_weights: bool) -> None:
    value, array = tensor.value, constant_array(tensor.value)
    assert array is not None
    if form == "plain" and not half_weights:
        factor = np.float32(1) if tensor.factor is None else tensor.factor
        content = np.asarray(rounded(array / factor, tensor.ftype) * factor, np.float32)
        if len(value.uses()) == len(tensor.uses) and not value.is_graph_output():
            value.const_value = ir.tensor(content, name=value.name)
            return
        last = constant(graph, names(f"{tensor.base}_rounded"), content)
    else:
        kind: Literal["pair", "cast"] = "pair" if form == "pair" else "cast"
        cell = FloatCell.make(graph, names, tensor.base, tensor.ftype, tensor.factor, kind)
        out = names(f"{tensor.base}_DequantizeLinear_Output")
        nodes = cell.stored(array, out) if half_weights else cell.there_and_back(value, out, clip=False)
        _insert(graph, value, nodes)
        last = nodes[-1].outputs[0]
    for node, index in tensor.uses:
        node.replace_input_with(index, last)
    forget(graph, value)
