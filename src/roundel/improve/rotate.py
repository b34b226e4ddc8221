"""The residual stream of a transformer: everything that would change if its tensors were rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.improve.norms import Norm, Slot, find_norms
from roundel.model.edit import Editor
from roundel.model.graph import (
    any_reduced_axes,
    attribute_int,
    attribute_ints,
    constant_array,
    constant_scalar,
    dims,
    input_at,
    integers,
    is_op,
    only_reader,
    producer,
    readers,
    real_constant,
)
from roundel.model.layers import Layer, read_layer, read_linear
from roundel.numerics.hadamard import rotation
from roundel.numerics.rounding import one_blas_thread
from roundel.recipe.settings import Rotate
from roundel.targets.operators import Trait, ops_with
from roundel.types import Doubles

# Rows come out as they went in, so that a shift of all of them stays that shift.
_MOVERS = ops_with(Trait.SHAPES | Trait.SELECTS) | {"Expand", "ReduceMean"}
_ALONG_AXIS = {"Gather": 0, "Split": 0, "Concat": 0}
_SEED = 0  # of the matrix's signs: any will do, and the same in every run


Exit = tuple[ir.Value, Slot | None]  # a tensor of the stream, and its reader; None for the graph's own output


@dataclass(slots=True, eq=False)
class Stream:
    """Tensors that are rotated together, and everything around them.

    Attributes:
        width: size of the last axis.
        tensors: the stream itself, in the order of finding.
        writers: layers whose outputs belong to it, Conv nodes whose channels become its last axis included.
        constants: inputs that are added to it, stand beside it in a Concat, or hold its rows.
        readers: layers that read it without a norm.
        norms: norms of it, each with the layers that read its result.
        entries: tensors that come from anything else.
        exits: readers of any other kind, which must see the stream as it was.
    """

    width: int
    _norms: Mapping[ir.Node, Norm]
    tensors: dict[ir.Value, None] = field(default_factory=dict)
    writers: list[Layer] = field(default_factory=list)
    constants: dict[Slot, None] = field(default_factory=dict)
    readers: list[Layer] = field(default_factory=list)
    norms: dict[Norm, tuple[Layer, ...]] = field(default_factory=dict)
    entries: list[ir.Value] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    _pending: list[ir.Value] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its first tensor."""
        return str(next(iter(self.tensors)).name)

    def follow(self, start: ir.Value) -> None:
        """Go both ways until it ends everywhere."""
        self._pending.append(start)
        while self._pending:
            value = self._pending.pop()
            if value not in self.tensors:
                self.tensors[value] = None
                self._upwards(value)
                self._downwards(value)

    def _upwards(self, value: ir.Value) -> None:
        node = value.producer()
        layer = None if node is None else read_linear(node) or _patches(node, self.width)
        if node is None or node in self._norms:
            self.entries.append(value)
        elif layer is not None:
            self.writers.append(layer)
        else:
            inputs = rows_from(node, self.width)
            if inputs is None:
                self.entries.append(value)
                return
            for index in inputs:
                source = input_at(node, index)
                if real_constant(source) is not None:
                    self.constants[node, index] = None
                elif source is not None:
                    self._pending.append(source)

    def _downwards(self, value: ir.Value) -> None:
        if value.is_graph_output():
            self.exits.append((value, None))
        for use in value.uses():
            node, index = use.node, use.idx
            norm, layer = self._norms.get(node), read_linear(node)
            if norm is not None and norm.source is value:
                self._normed(norm, node, index)
            elif layer is not None and index == 0 and node.graph is value.graph:
                self.readers.append(layer)
            elif index in (rows_from(node, self.width) or ()) and node.graph is value.graph:
                self._pending.extend(_parts(node))
            else:
                self.exits.append((value, (node, index)))

    def _normed(self, norm: Norm, node: ir.Node, index: int) -> None:
        leaves = None if norm.output.is_graph_output() else _leaves(norm.output, self.width)
        if leaves is None:
            # Its result is seen as it is: the norm itself must see the stream as it was.
            self.exits.append((norm.source, (node, index)))
        else:
            self.norms[norm] = leaves


def find_streams(norms: Sequence[Norm]) -> tuple[Stream, ...]:
    """One stream for each set of tensors that the norms' inputs hang together by."""
    by_node = {node: norm for norm in norms for node in norm.nodes}
    found: list[Stream] = []
    for norm in norms:
        width = (dims(norm.source) or (None,))[-1]
        if width is not None and not any(norm.source in stream.tensors for stream in found):
            found.append(Stream(width, by_node))
            found[-1].follow(norm.source)
    return tuple(found)


def rows_from(node: ir.Node, width: int) -> tuple[int, ...] | None:
    """Inputs whose rows (along the last axis, of this width) the node adds, moves or scales as a whole.

    None for a node that looks into rows, so that a rotation before it is not one behind it.
    """
    if not node.outputs or (dims(node.outputs[0]) or (None,))[-1] != width:
        return None
    rows = [i for i, v in enumerate(node.inputs) if v is not None and (dims(v) or (None,))[-1] == width]
    if is_op(node, "Add", "Sub"):
        return (0, 1) if len(rows) == 2 or any(constant_scalar(v) is not None for v in node.inputs) else None
    if is_op(node, "Mul", "Div"):
        return _scaled(node, rows)
    if is_op(node, *_MOVERS, "ReduceSum"):
        return (0,) if 0 in rows and _keeps_last(node) else None
    if is_op(node, "Concat") and len(rows) == len(node.inputs) and _keeps_last(node):
        return tuple(rows)
    return None


def _scaled(node: ir.Node, rows: list[int]) -> tuple[int, ...] | None:
    """One factor for each row, or one for all."""
    for index in rows[:1]:
        other = input_at(node, 1 - index)
        along = dims(other)
        if constant_array(input_at(node, index)) is None and along is not None and along[-1:] in ((), (1,)):
            return (index,) if node.op_type == "Mul" or index == 0 else None
    return None


def _keeps_last(node: ir.Node) -> bool:
    rank = len(dims(input_at(node, 0)) or ())
    if is_op(node, "Transpose"):
        order = attribute_ints(node, "perm")
        return order is not None and order[-1] == rank - 1
    if is_op(node, "Slice"):
        axes = integers(input_at(node, 3))
        return axes is not None and rank - 1 not in {axis % rank for axis in axes}
    if is_op(node, "ReduceMean", "ReduceSum"):
        axes = any_reduced_axes(node, rank)
        return axes is not None and rank - 1 not in axes
    if node.op_type in _ALONG_AXIS:
        return attribute_int(node, "axis", _ALONG_AXIS[node.op_type]) % rank != rank - 1
    return True  # the last axis is as long before as behind, so each row stays whole


def _parts(node: ir.Node) -> Sequence[ir.Value]:
    """What the rows of a node's input come out in."""
    return node.outputs if node.op_type == "Split" else node.outputs[:1]


def _patches(node: ir.Node, width: int) -> Layer | None:
    """The Conv whose channels the node turns into the last axis: the patches of a vision transformer."""
    order, source = attribute_ints(node, "perm"), input_at(node, 0)
    if not is_op(node, "Transpose") or source is None or order is None or order[-1] != 1:
        return None
    flat = producer(source, "Reshape", "Flatten")
    inner = input_at(flat, 0) if flat is not None else source
    conv = producer(inner, "Conv")
    if conv is None or inner is None or (dims(inner) or ())[1:2] != (dims(source) or ())[1:2]:
        return None
    if only_reader(source) is not node or (flat is not None and only_reader(inner) is not flat):
        return None
    layer = read_layer(conv)
    if layer is None or layer.groups != 1 or layer.stored.shape[0] != width:
        return None
    constants = [real_constant(value) for value in conv.inputs[1:] if value is not None]
    return None if any(array is None for array in constants) else layer


def _leaves(value: ir.Value, width: int) -> tuple[Layer, ...] | None:
    """The layers that read a norm's result, if nothing else does."""
    found: list[Layer] = []
    pending = [value]
    while pending:
        here = pending.pop()
        if here.is_graph_output():
            return None
        for use in here.uses():
            layer = read_linear(use.node)
            if use.node.graph is not value.graph:
                return None
            if layer is not None and use.idx == 0:
                found.append(layer)
            elif is_op(use.node, *_MOVERS) and use.idx in (rows_from(use.node, width) or ()):
                pending.extend(_parts(use.node))
            else:
                return None
    return tuple(found) or None


@dataclass(frozen=True, slots=True)
class RotateReport:
    """What became of one residual stream.

    Attributes:
        tensor: its first tensor.
        width: size of the axis that is rotated.
        norms: how many norms read it.
        layers: how many layers write it or read it.
        kept: whether it was rotated.
        where: what was put at its ends, or why it was left alone.
    """

    tensor: str
    width: int
    norms: int
    layers: int
    kept: bool
    where: str


@one_blas_thread()
def rotate(model: ir.Model, options: Rotate) -> tuple[RotateReport, ...]:
    """Rotate every residual stream that allows it, in place.

    What writes the stream is multiplied by a matrix, what reads it by its inverse; the scales and shifts of
    the norms between move into the layers behind them. The model computes what it did before, for every
    input, up to the rounding of float32.

    Args:
        model: prepared, with current shapes.
        options: whether a MatMul may be put where a stream begins or ends.
    """
    editor = Editor(model)
    reports = []
    for stream in find_streams(find_norms(model.graph)):
        why = _obstacle(stream, options)
        if why is None:
            _turn(editor, stream)
        reports.append(_told(stream, why))
    return tuple(reports)


def _obstacle(stream: Stream, options: Rotate) -> str | None:
    """Why a stream must stay as it is."""
    ends = [*map(_entry, stream.entries), *(_exit(*leaving) for leaving in stream.exits)]
    if not stream.norms:
        return f"no norm of it is read by layers alone, as in a post-norm network: {_listed(ends)}"
    if ends and not options.insert:
        return f"{_listed(ends)} (improve.rotate.insert would put a MatMul there)"
    if _inserted(stream) >= len(stream.norms):
        return f"as many MatMuls as norms would have to be inserted: {_listed(ends)}"
    return None


def _entry(value: ir.Value) -> str:
    node = value.producer()
    if node is None:
        return f"the stream comes from '{value.name}'"
    return f"{node.op_type} '{node.name}' writes the stream"


def _exit(value: ir.Value, reader: Slot | None) -> str:
    if reader is None:
        return f"'{value.name}' is an output of the model"
    return f"{reader[0].op_type} '{reader[0].name}' reads the stream"


def _listed(reasons: list[str], most: int = 3) -> str:
    unique = list(dict.fromkeys(reasons))
    rest = f" and {len(unique) - most} more" if len(unique) > most else ""
    return ", ".join(unique[:most]) + rest


def _inserted(stream: Stream) -> int:
    inside = {value for value, _ in stream.exits} - set(stream.entries)
    return len(stream.entries) + len(inside)


def _turn(editor: Editor, stream: Stream) -> None:
    centered = any(norm.centered for norm in stream.norms)
    turn = rotation(stream.width, _SEED, keep_mean=centered)
    # The outputs' side first: a shift that a norm hands to a layer is then in the layer's new coordinates.
    for node, index in stream.constants:
        _turn_constant(editor, node, index, turn)
    for layer in stream.writers:
        layer.set_operand(editor, layer.operand @ turn)
        if layer.bias is not None:
            _turn_constant(editor, layer.node, 2, turn)
    _turn_ends(editor, stream, turn)
    for layer in stream.readers:
        layer.set_operand(editor, turn.T @ layer.operand)
    for norm, layers in stream.norms.items():
        _turn_norm(editor, norm, layers, turn)


def _turn_constant(editor: Editor, node: ir.Node, index: int, turn: Doubles) -> None:
    old = real_constant(input_at(node, index))
    assert old is not None, "found by the trace"
    whole = np.broadcast_to(old, (*old.shape[:-1], len(turn)))
    editor.set_constant(node, index, (whole @ turn).astype(old.dtype), "constant")


def _turn_ends(editor: Editor, stream: Stream, turn: Doubles) -> None:
    """A MatMul where the stream begins or ends at something that stays as it is."""
    leaving: dict[ir.Value, list[Slot | None]] = {}
    for value, reader in stream.exits:
        leaving.setdefault(value, []).append(reader)
    for value in stream.entries:
        outside = leaving.pop(value, [])
        inside = [use for use in readers(value) if use not in outside]
        editor.insert_after(value, "MatMul", _typed(turn, value), readers=inside, outputs=False)
    for value, ends in leaving.items():
        seen = [end for end in ends if end is not None]
        editor.insert_after(value, "MatMul", _typed(turn.T, value), readers=seen, outputs=None in ends)


def _typed(matrix: Doubles, value: ir.Value) -> NDArray[Any]:
    return np.ascontiguousarray(matrix, np.float64 if value.dtype is ir.DataType.DOUBLE else np.float32)


def _turn_norm(editor: Editor, norm: Norm, layers: tuple[Layer, ...], turn: Doubles) -> None:
    scale, shift = norm.array(norm.scale), norm.array(norm.shift)
    for layer in layers:
        weight = layer.operand.astype(np.float64)
        if shift is not None and np.any(shift):
            layer.add_bias(editor, shift.reshape(-1).astype(np.float64) @ weight)
        scaled = weight if scale is None else scale.reshape(-1, 1) * weight
        layer.set_operand(editor, turn.T @ scaled)
    norm.clear(editor)


def _told(stream: Stream, why: str | None) -> RotateReport:
    count = len(stream.writers) + len(stream.readers)
    count += sum(len(layers) for layers in stream.norms.values())
    ends = _inserted(stream)
    where = why or (f"{ends} MatMul(s) at the ends of the stream" if ends else "folded into the layers")
    return RotateReport(stream.name, stream.width, len(stream.norms), count, why is None, where)
