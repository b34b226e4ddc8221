"""Tensors in bfloat16 or float16: AMD's quantize and dequantize operators, or plain casts; to and fro."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.edit import Names, add_constant
from roundel.model.graph import clip_bounds, constant_array, constant_scalar, is_constant, only_reader
from roundel.numerics.floats import bits, largest, rounded
from roundel.qdq.nodes import AFTER, BEFORE, CODES, QUARK, Chain, forget, insert_behind, stand_for
from roundel.qdq.read import casts_to, is_dequantize, is_quantize
from roundel.types import FloatType

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SAME_SCALE = 1e-6
ONNX_TYPES = {FloatType.BFLOAT16: ir.DataType.BFLOAT16, FloatType.FLOAT16: ir.DataType.FLOAT16}
_FLOAT_TYPES = {dtype: ftype for ftype, dtype in ONNX_TYPES.items()}


Form = Literal["pair", "cast", "plain"]


@dataclass(slots=True, eq=False)
class FloatCell:
    """How one tensor gets into its type and back, with the constants that its nodes share.

    Args:
        graph: takes the constants.
        names: hands out free ones.
        base: the tensor's name.
        ftype: the type.
        factor: the tensor's scale; None where it is stored as it is.
        form: pair; casts for any other.
    """

    graph: ir.Graph
    names: Names
    base: str
    ftype: FloatType
    factor: NDArray[np.float32] | None
    form: Form
    ends: list[ir.Value] = field(init=False)  # scale and zero point of a pair; of a scaled cast the scale

    def __post_init__(self) -> None:
        numbers: dict[str, NDArray[Any]] = {}
        if self.factor is not None or self.form == "pair":
            numbers["_scale"] = np.asarray(1.0, np.float32) if self.factor is None else self.factor
        if self.form == "pair":
            numbers["_zero_point"] = np.zeros((), ONNX_TYPES[self.ftype].numpy())
        self.ends = [self._constant(word, number) for word, number in numbers.items()]

    def _constant(self, word: str, array: NDArray[Any]) -> ir.Value:
        return add_constant(self.graph, self.names(f"{self.base}{word}"), array)

    def there_and_back(self, value: ir.Value, out: str, *, clip: bool, suffix: str = "") -> list[ir.Node]:
        """From float32 to the value that the type holds, again in float32, in a tensor named `out`."""
        chain = Chain(value, self.names, self.base, suffix)
        short = ONNX_TYPES[self.ftype]
        if clip:
            chain.add("Clip", *self._bounds())
        if self.form == "pair":
            chain.add("ExtendedQuantizeLinear", *self.ends, label="QuantizeLinear", domain=QUARK, dtype=short)
        else:
            if self.ends:
                chain.add("Div", *self.ends)
            chain.add("Cast", label="QuantizeLinear", dtype=short, attributes=_to(short))
        self._back(chain)
        return chain.end(out)

    def stored(self, array: NDArray[Any], out: str) -> list[ir.Node]:
        """A constant whose 16 bits are in the file, read into a tensor named `out`."""
        content = array if self.factor is None else array / self.factor
        short = bits(content, self.ftype).view(ONNX_TYPES[self.ftype].numpy())
        chain = Chain(self._constant(CODES, short), self.names, self.base)
        self._back(chain)
        return chain.end(out)

    def _back(self, chain: Chain) -> None:
        if self.form == "pair":
            chain.add("ExtendedDequantizeLinear", *self.ends, label="DequantizeLinear", domain=QUARK)
            return
        chain.add("Cast", label="DequantizeLinear", attributes=_to(ir.DataType.FLOAT))
        if self.ends:
            chain.add("Mul", *self.ends)

    def _bounds(self) -> tuple[ir.Value, ir.Value]:
        """The finite range of the type, in units of the tensor."""
        top = largest(self.ftype) * (1.0 if self.factor is None else float(self.factor))
        bound = np.asarray(min(top, _FLOAT32_MAX), np.float32)
        return self._constant("_lowest", -bound), self._constant("_highest", bound)


def _to(dtype: ir.DataType) -> tuple[ir.Attr, ...]:
    return (ir.AttrInt64("to", dtype.value),)


@dataclass(frozen=True, slots=True, eq=False)
class ShortTensor:
    """A tensor that the model stores in a short float, free of the nodes that did so.

    Attributes:
        value: the float32 tensor.
        base: the name that its nodes and constants derive theirs from.
        ftype: the type.
        factor: its scale, or None.
        clipped: whether values beyond the type's range were clipped first.
        uses: who reads it through its pair.
        outputs: positions among the graph outputs that show it.
    """

    value: ir.Value
    base: str
    ftype: FloatType
    factor: NDArray[np.float32] | None
    clipped: bool = False
    uses: tuple[tuple[ir.Node, int], ...] = ()
    outputs: tuple[int, ...] = ()


def lift(graph: ir.Graph) -> tuple[ShortTensor, ...]:
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
    if not is_quantize(node):
        return next((ftype for ftype, dtype in ONNX_TYPES.items() if casts_to(node, dtype)), None)
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    return _FLOAT_TYPES.get(zero.dtype) if zero is not None and zero.dtype is not None else None


def _exits(short: ir.Value) -> list[ir.Node] | None:
    """The nodes that read a short float back; None where anything else reads it."""
    uses = list(short.uses())
    back = all(u.idx == 0 and (is_dequantize(u.node) or casts_to(u.node, ir.DataType.FLOAT)) for u in uses)
    return [use.node for use in uses] if uses and back and not short.is_graph_output() else None


def _lift_moving(graph: ir.Graph, entry: ir.Node) -> ShortTensor | None:
    ftype, source, exits = _entered(entry), entry.inputs[0], _exits(entry.outputs[0])
    if ftype is None or source is None or exits is None:
        return None
    nodes, factor = [*exits, entry], 1.0
    if is_quantize(entry):
        given = constant_scalar(entry.inputs[1])
        if given is None or any(constant_scalar(node.inputs[1]) != given for node in exits):
            return None
        factor = given
    else:
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
    base = str(source.name).removesuffix(BEFORE)
    return _released(graph, ShortTensor(source, base, ftype, _scale(factor), clipped), exits, nodes)


def _scale(factor: float) -> NDArray[np.float32] | None:
    return None if factor == 1.0 else np.asarray(factor, np.float32)


def _scaling(entry: ir.Node, exits: list[ir.Node]) -> tuple[float, ir.Node, list[ir.Node]] | None:
    """The scale around a pair of casts: its value, the node before, and the products behind."""
    value = entry.inputs[0]
    before = value.producer() if value is not None else None
    if before is None or value is None or only_reader(value) is not entry:
        return None
    if before.op_type not in ("Div", "Mul"):
        return None
    given, behind = constant_scalar(before.inputs[1]), _products(exits)
    if not given or not np.isfinite(given) or behind is None:
        return None
    wanted = given if before.op_type == "Div" else 1 / given
    factor, products = behind
    return (factor, before, products) if abs(factor - wanted) <= _SAME_SCALE * abs(wanted) else None


def _products(exits: list[ir.Node]) -> tuple[float, list[ir.Node]] | None:
    """The one number that everything read back is multiplied by, and the products."""
    behind = [only_reader(node.outputs[0]) for node in exits]
    products = [node for node in behind if node is not None and node.op_type == "Mul"]
    factors = {constant_scalar(node.inputs[1]) for node in products}
    factor = factors.pop() if len(factors) == 1 and len(products) == len(exits) else None
    return None if factor is None else (factor, products)


def _clips(node: ir.Node, ftype: FloatType, factor: float) -> bool:
    """Whether a Clip only keeps values within what the type can hold."""
    bounds = clip_bounds(node) if node.op_type == "Clip" else None
    if bounds is None or bounds[0] is None or bounds[1] is None:
        return False
    top = largest(ftype) * factor
    return -bounds[0] == bounds[1] and abs(bounds[1] - min(top, _FLOAT32_MAX)) <= _SAME_SCALE * top


def _lift_constant(graph: ir.Graph, value: ir.Value, names: Names) -> ShortTensor | None:
    exits, codes = _exits(value), constant_array(value)
    ftype = _FLOAT_TYPES[value.dtype] if value.dtype is not None else None
    if exits is None or codes is None or ftype is None:
        return None
    nodes, factor = list(exits), 1.0
    if is_dequantize(exits[0]):
        factor = constant_scalar(exits[0].inputs[1]) or 0.0
    else:
        behind = _products(exits)
        if behind is not None:
            factor, exits = behind
            nodes = [*exits, *nodes]
    if factor <= 0:
        return None
    content = np.asarray(codes.astype(np.float32) * np.float32(factor), np.float32)
    base = str(value.name).removesuffix(CODES)
    whole = add_constant(graph, names(base), content)
    return _released(graph, ShortTensor(whole, base, ftype, _scale(factor)), exits, nodes)


def _released(
    graph: ir.Graph, tensor: ShortTensor, exits: list[ir.Node], nodes: list[ir.Node]
) -> ShortTensor:
    """Let the tensor stand for the outputs of its pair, and remove nodes, each after those that read it."""
    outs = [node.outputs[0] for node in exits]
    uses = tuple((use.node, use.idx) for out in outs for use in out.uses())
    shown = tuple(i for i, value in enumerate(graph.outputs) if any(value is out for out in outs))
    for out in [*(graph.outputs[position] for position in shown), *outs]:
        stand_for(graph, out, tensor.value)
    constants = {value for node in nodes for value in node.inputs if is_constant(value)}
    graph.remove(nodes, safe=True)
    forget(graph, *constants)
    return replace(tensor, uses=uses, outputs=shown)


def put(graph: ir.Graph, tensors: Sequence[ShortTensor], form: Form, *, half_weights: bool = False) -> None:
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
            _put_moving(graph, names, tensor, form)
    if any(node.domain == QUARK for node in graph):
        graph.opset_imports.setdefault(QUARK, 1)
    graph.sort()


def _put_moving(graph: ir.Graph, names: Names, tensor: ShortTensor, form: Form) -> None:
    source, out_name = tensor.value, None
    if tensor.outputs and graph.outputs[tensor.outputs[0]] is source:
        out_name = str(source.name)
        source.name = names(f"{tensor.base}{BEFORE}")
    cell = FloatCell(graph, names, tensor.base, tensor.ftype, tensor.factor, form)
    out = names(f"{tensor.base}{AFTER}") if out_name is None else out_name
    nodes = cell.there_and_back(source, out, clip=tensor.clipped)
    insert_behind(graph, source, nodes)
    last = nodes[-1].outputs[0]
    for node, index in tensor.uses:
        node.replace_input_with(index, last)
    if out_name is not None:
        for position in tensor.outputs:
            last.shape, last.type = source.shape, source.type
            graph.outputs[position] = last


def _put_constant(
    graph: ir.Graph, names: Names, tensor: ShortTensor, form: Form, *, half_weights: bool
) -> None:
    value, array = tensor.value, constant_array(tensor.value)
    assert array is not None
    if form == "plain" and not half_weights:
        factor = np.float32(1) if tensor.factor is None else tensor.factor
        content = np.asarray(rounded(array / factor, tensor.ftype) * factor, np.float32)
        if len(value.uses()) == len(tensor.uses) and not value.is_graph_output():
            value.const_value = ir.tensor(content, name=value.name)
            return
        last = add_constant(graph, names(f"{tensor.base}_rounded"), content)
    else:
        cell = FloatCell(graph, names, tensor.base, tensor.ftype, tensor.factor, form)
        out = names(f"{tensor.base}{AFTER}")
        nodes = cell.stored(array, out) if half_weights else cell.there_and_back(value, out, clip=False)
        insert_behind(graph, value, nodes)
        last = nodes[-1].outputs[0]
    for node, index in tensor.uses:
        node.replace_input_with(index, last)
    forget(graph, value)
