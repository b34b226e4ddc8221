"""Instance normalization as one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.passes.base import Pass
from roundel.passes.batch_norms import per_channel
from roundel.passes.moments import Deviation, mean, normalized, reciprocal_deviation
from roundel.passes.rewriting import (
    Editor,
    dims,
    is_op,
    is_private,
    only_reader,
    operands,
    producer,
    real_constant,
    same_rank,
)

_SINCE = 6


class FuseInstanceNorm(Pass):
    """Fuses mean, variance, division, scale and shift over the spatial dimensions into
    InstanceNormalization.

    Both usual forms are known: `(x - mean) / deviation * scale + shift`, and the one of TensorFlow,
    `x * factor + (shift - mean * factor)`. Tolerance: the order of the sums, about 1e-5.
    """

    name: ClassVar[str] = "fuse instance norm"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        if editor.opset < _SINCE:
            return 0
        # A fusion removes nodes further on, hence the snapshot.
        nodes = [node for node in model.graph if is_op(node, "Div", "Mul", "Add")]
        return sum(_fuse(editor, node) for node in nodes if node.graph is model.graph)


@dataclass(frozen=True, slots=True, eq=False)
class _Match:
    found: Deviation
    last: ir.Node
    scale: NDArray[Any] | None
    shift: NDArray[Any] | None


def _fuse(editor: Editor, node: ir.Node) -> bool:
    match = _tensorflow_form(node) if is_op(node, "Add") else _plain_form(node)
    if match is None or match.found.source.dtype != ir.DataType.FLOAT:
        return False
    found, last = match.found, match.last
    count = _channels(found)
    if count is None or not same_rank(found.source, last.outputs[0]) or not is_private(found.nodes, last):
        return False
    base = last.name or last.outputs[0].name or "InstanceNormalization"
    scale = np.ones(count) if match.scale is None else match.scale
    shift = np.zeros(count) if match.shift is None else match.shift
    inputs = [
        found.source,
        editor.initializer(f"{base}_scale", scale.astype(np.float32)),
        editor.initializer(f"{base}_shift", shift.astype(np.float32)),
    ]
    editor.replace(last, "InstanceNormalization", inputs, {"epsilon": found.epsilon})
    editor.drop_all(found.nodes - {last})
    return True


def _channels(found: Deviation) -> int | None:
    shape = dims(found.source)
    if shape is None or len(shape) < 3 or found.axes != tuple(range(2, len(shape))):
        return None
    return shape[1] or None


def _plain_form(core: ir.Node) -> _Match | None:
    found = normalized(core)
    count = None if found is None else _channels(found)
    if found is None or count is None:
        return None
    rank, last = len(found.source.shape or ()), core
    scale, scaling = _applied(last, "Mul", rank, count)
    if scaling is not None:
        found, last = found.joined(scaling), scaling
    shift, shifting = _applied(last, "Add", rank, count)
    if shifting is not None:
        found, last = found.joined(shifting), shifting
    # Over the last of three dimensions alone, this is a layer normalization unless the scale says otherwise.
    if (scale is None and rank == 3) or _has_other_constant(last):
        return None
    return _Match(found, last, scale, shift)


def _applied(
    node: ir.Node, op_type: str, rank: int, count: int
) -> tuple[NDArray[np.float64] | None, ir.Node | None]:
    """The number per channel that the one reader of a node applies to it, and that reader."""
    reader = only_reader(node.outputs[0])
    if reader is None or not is_op(reader, op_type):
        return None, None
    for value, other in operands(reader):
        array = real_constant(other)
        numbers = None if array is None else per_channel(array, rank, count)
        if value is node.outputs[0] and array is not None and array.size == count and numbers is not None:
            return numbers, reader
    return None, None


def _has_other_constant(node: ir.Node) -> bool:
    """Whether a scale that is not one number per channel follows: then it is a layer normalization."""
    reader = only_reader(node.outputs[0])
    if reader is None or not is_op(reader, "Mul"):
        return False
    return any(real_constant(value) is not None for value in reader.inputs)


def _tensorflow_form(last: ir.Node) -> _Match | None:
    """Match `x * factor + (shift - mean(x) * factor)` with `factor = scale / deviation`."""
    for left, right in operands(last):
        times, minus = producer(left, "Mul"), producer(right, "Sub")
        if times is None or minus is None:
            continue
        moved = producer(minus.inputs[1], "Mul")
        for source, factor in operands(times):
            match = _with_factor(last, source, factor, (times, minus, moved))
            if match is not None:
                return match
    return None


def _with_factor(
    last: ir.Node, source: ir.Value, factor: ir.Value, nodes: tuple[ir.Node, ir.Node, ir.Node | None]
) -> _Match | None:
    times, minus, moved = nodes
    if moved is None:
        return None
    centers = [mean(value) for value, other in operands(moved) if other is factor]
    center = next((c for c in centers if c is not None), None)
    found, scale = _factor(factor)
    if center is None or found is None or center[1] is not source or found.source is not source:
        return None
    count = _channels(found)
    shift = real_constant(minus.inputs[0])
    if count is None or shift is None or center[2] != found.axes:
        return None
    rank = len(source.shape or ())
    shifts = per_channel(shift, rank, count)
    scales = None if scale is None else per_channel(scale, rank, count)
    if shifts is None or (scale is not None and scales is None):
        return None
    return _Match(found.joined(last, times, minus, moved, center[0]), last, scales, shifts)


def _factor(value: ir.Value) -> tuple[Deviation | None, NDArray[Any] | None]:
    plain = reciprocal_deviation(value)
    node = producer(value, "Mul")
    if plain is not None or node is None:
        return plain, None
    for inverse, other in operands(node):
        found, scale = reciprocal_deviation(inverse), real_constant(other)
        if found is not None and scale is not None:
            return found.joined(node), scale
    return None, None
