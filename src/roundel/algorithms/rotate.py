"""QuaRot's R1: the residual stream of a transformer turned by an orthogonal matrix. Exact in float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.algorithms.linear_layers import Linear
from roundel.algorithms.norms import Norm, find_norms
from roundel.algorithms.rotate_stream import Exit, Stream, find_streams
from roundel.algorithms.splice import splice
from roundel.numerics.hadamard import rotation
from roundel.passes.rewriting import Editor, input_at, real_constant
from roundel.recipe import Rotate
from roundel.types import Doubles


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


def rotate(model: ir.Model, options: Rotate) -> tuple[RotateReport, ...]:
    """Rotate every residual stream that allows it, in place.

    What writes the stream is multiplied by a matrix, what reads it by its inverse; the scales and shifts of
    the norms between move into the layers behind them. The model computes what it did before, for every
    input, up to the rounding of float32.

    Args:
        model: prepared, with current shapes.
        options: seed, and whether a MatMul may be put where a stream begins or ends.
    """
    editor = Editor(model)
    reports = []
    for stream in find_streams(find_norms(model.graph)):
        why = _obstacle(stream, options)
        if why is None:
            _turn(editor, stream, options.seed)
        reports.append(_told(stream, why))
    return tuple(reports)


def _obstacle(stream: Stream, options: Rotate) -> str | None:
    """Why a stream must stay as it is."""
    ends = [*map(_entry, stream.entries), *map(str, stream.exits)]
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


def _listed(reasons: list[str], most: int = 3) -> str:
    unique = list(dict.fromkeys(reasons))
    rest = f" and {len(unique) - most} more" if len(unique) > most else ""
    return ", ".join(unique[:most]) + rest


def _inserted(stream: Stream) -> int:
    inside = {leaving.value for leaving in stream.exits} - set(stream.entries)
    return len(stream.entries) + len(inside)


def _turn(editor: Editor, stream: Stream, seed: int) -> None:
    centered = any(norm.centered for norm, _ in stream.norms)
    turn = rotation(stream.width, seed, keep_mean=centered)
    # The outputs' side first: a shift that a norm hands to a layer is then in the layer's new coordinates.
    for node, index in stream.constants:
        _turn_constant(editor, node, index, turn)
    for layer in stream.writers:
        layer.set_weight(editor, layer.weight @ turn)
        if input_at(layer.node, 2) is not None:
            _turn_constant(editor, layer.node, 2, turn)
    for node in stream.patches:
        _turn_patches(editor, node, turn)
    _turn_ends(editor, stream, turn)
    for layer in stream.readers:
        layer.set_weight(editor, turn.T @ layer.weight)
    for norm, layers in stream.norms:
        _turn_norm(editor, norm, layers, turn)


def _turn_constant(editor: Editor, node: ir.Node, index: int, turn: Doubles) -> None:
    old = real_constant(input_at(node, index))
    assert old is not None, "found by the trace"
    whole = np.broadcast_to(old, (*old.shape[:-1], len(turn)))
    editor.set_constant(node, index, (whole @ turn).astype(old.dtype), "constant")


def _turn_patches(editor: Editor, node: ir.Node, turn: Doubles) -> None:
    weight = real_constant(input_at(node, 1))
    assert weight is not None, "found by the trace"
    turned = np.tensordot(turn.T, weight, axes=1)
    editor.set_constant(node, 1, turned.astype(weight.dtype), "weight")
    if input_at(node, 2) is not None:
        _turn_constant(editor, node, 2, turn)


def _turn_ends(editor: Editor, stream: Stream, turn: Doubles) -> None:
    """A MatMul where the stream begins or ends at something that stays as it is."""
    leaving: dict[ir.Value, list[Exit]] = {}
    for end in stream.exits:
        leaving.setdefault(end.value, []).append(end)
    for value in stream.entries:
        outside = {end.reader for end in leaving.pop(value, ())}
        uses = [(use.node, use.idx) for use in value.uses()]
        inside = [use for use in uses if use not in outside]
        splice(editor, value, "MatMul", _typed(turn, value), readers=inside, outputs=False)
    for value, ends in leaving.items():
        readers = [end.reader for end in ends if end.reader is not None]
        outputs = any(end.reader is None for end in ends)
        splice(editor, value, "MatMul", _typed(turn.T, value), readers=readers, outputs=outputs)


def _typed(matrix: Doubles, value: ir.Value) -> NDArray[Any]:
    return np.ascontiguousarray(matrix, np.float64 if value.dtype is ir.DataType.DOUBLE else np.float32)


def _turn_norm(editor: Editor, norm: Norm, layers: tuple[Linear, ...], turn: Doubles) -> None:
    scale, shift = norm.array(norm.scale), norm.array(norm.shift)
    for layer in layers:
        weight = layer.weight.astype(np.float64)
        if shift is not None and np.any(shift):
            layer.add_bias(editor, shift.reshape(-1).astype(np.float64) @ weight)
        scaled = weight if scale is None else scale.reshape(-1, 1) * weight
        layer.set_weight(editor, turn.T @ scaled)
    norm.clear(editor)


def _told(stream: Stream, why: str | None) -> RotateReport:
    count = len(stream.writers) + len(stream.patches) + len(stream.readers)
    count += sum(len(layers) for _, layers in stream.norms)
    ends = _inserted(stream)
    where = why or (f"{ends} MatMul(s) at the ends of the stream" if ends else "folded into the layers")
    return RotateReport(stream.name, stream.width, len(stream.norms), count, why is None, where)
