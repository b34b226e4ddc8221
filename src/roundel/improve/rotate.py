"""The residual stream of a transformer: everything that would change if its tensors were rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.improve.trace import (
    Norm,
    Slot,
    find_norms,
    only_layers_behind,
    patch_layer,
    row_outputs,
    rows_from,
)
from roundel.model.edit import Editor
from roundel.model.graph import (
    dims,
    input_at,
    readers,
    real_constant,
)
from roundel.model.layers import Layer, read_linear
from roundel.numerics.hadamard import rotation
from roundel.numerics.rounding import one_blas_thread
from roundel.recipe.settings import Rotate
from roundel.types import Doubles

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
        layer = None if node is None else read_linear(node) or patch_layer(node, self.width)
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
                self._pending.extend(row_outputs(node))
            else:
                self.exits.append((value, (node, index)))

    def _normed(self, norm: Norm, node: ir.Node, index: int) -> None:
        leaves = None if norm.output.is_graph_output() else only_layers_behind(norm.output, self.width)
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
