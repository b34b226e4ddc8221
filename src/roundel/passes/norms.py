"""Layer, instance and L2 normalization, which exporters spell out, as one node each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model import graph
from roundel.model.edit import Editor, rewrite
from roundel.passes.batch_norms import per_channel
from roundel.passes.moments import Matcher, Pattern, mean, normalized, reciprocal_deviation, squared

T = TypeVar("T")
_LAYER_NORM_SINCE = 17

# The operator computes its statistics in 32 bits, so a double model would lose precision.
_LAYER_NORM_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})


def fuse_layer_norm(model: ir.Model) -> int:
    """Fuses mean, variance, division, scale and shift over the last dimensions into LayerNormalization.

    Needs opset 17. Tolerance: the order of the sums, about 1e-6 (1e-3 in 16-bit floats).
    """
    known = graph.opset_version(model) >= _LAYER_NORM_SINCE
    return rewrite(model, _fuse_layer_norm, "Div", "Mul") if known else 0


def _fuse_layer_norm(editor: Editor, core: ir.Node) -> bool:
    found = normalized(core)
    shape = None if found is None else _normalized_shape(found)
    if found is None or shape is None or found.source.dtype not in _LAYER_NORM_TYPES:
        return False
    kind = found.source.dtype
    scale, found, last = _with_operand(found, core, "Mul", partial(_operand, shape))
    bias, found, last = _with_operand(found, last, "Add", partial(_operand, shape))
    if not graph.replaceable(found.source, found.nodes, last):
        return False
    base = last.name or last.outputs[0].name or "LayerNormalization"
    if scale is None:
        factor = editor.initializer(f"{base}_scale", np.ones(shape, dtype=kind.numpy()))
    else:
        factor = _shaped(editor, *scale)
    inputs = [found.source, factor, *([_shaped(editor, *bias)] if bias is not None else [])]
    attributes: dict[str, int | float] = {"axis": -len(shape), "epsilon": found.least}
    editor.replace_all(found.nodes, last, "LayerNormalization", inputs, attributes)
    return True


def _normalized_shape(found: Pattern) -> tuple[int, ...] | None:
    """Sizes of the normalized dimensions, if they are the last ones and known."""
    known = graph.dims(found.source)
    if known is None or found.axes != tuple(range(found.axes[0], len(known))):
        return None
    sizes = tuple(d for d in known[found.axes[0] :] if d is not None)
    return sizes if len(sizes) == len(found.axes) else None


def _applied(node: ir.Node, op_type: str) -> tuple[ir.Value, NDArray[Any], ir.Node] | None:
    """The real constant that the one reader of a node applies to it, and that reader."""
    reader = graph.only_reader(node.outputs[0])
    if reader is None or not graph.is_op(reader, op_type):
        return None
    for value, other in graph.operands(reader):
        array = graph.real_constant(other)
        if value is node.outputs[0] and array is not None:
            return other, array, reader
    return None


def _with_operand(
    found: Pattern, last: ir.Node, op_type: str, read: Callable[[ir.Node, ir.Value, NDArray[Any]], T | None]
) -> tuple[T | None, Pattern, ir.Node]:
    """What `read` makes of the constant applied behind the pattern, and the pattern that ends with it."""
    applied = _applied(last, op_type)
    made = None if applied is None else read(last, applied[0], applied[1])
    if applied is None or made is None:
        return None, found, last
    return made, found.joined(applied[2]), applied[2]


def _operand(
    shape: tuple[int, ...], node: ir.Node, value: ir.Value, array: NDArray[Any]
) -> tuple[ir.Value, NDArray[Any]] | None:
    """A constant, and what it is over the normalized dimensions."""
    kind = node.outputs[0].dtype
    spread = _spread(array, shape) if kind in (None, ir.DataType.from_numpy(array.dtype)) else None
    return None if spread is None else (value, spread)


def _spread(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
    """The constant over the normalized dimensions, if it does not vary over any other."""
    extra = array.ndim - len(shape)
    if extra > 0:
        if any(d != 1 for d in array.shape[:extra]):
            return None
        array = array.reshape(array.shape[extra:])
    fits = all(a in (1, s) for a, s in zip(reversed(array.shape), reversed(shape), strict=False))
    return np.broadcast_to(array, shape) if fits else None


def _shaped(editor: Editor, value: ir.Value, spread: NDArray[Any]) -> ir.Value:
    array = graph.real_constant(value)
    if array is not None and array.shape == spread.shape:
        return value
    return editor.initializer(value.name or "scale", np.array(spread))


_INSTANCE_NORM_SINCE = 6


def fuse_instance_norm(model: ir.Model) -> int:
    """Fuses mean, variance, division, scale and shift over the spatial dimensions into
    InstanceNormalization.

    Both usual forms are known: `(x - mean) / deviation * scale + shift`, and the one of TensorFlow,
    `x * factor + (shift - mean * factor)`. Tolerance: the order of the sums, about 1e-5.
    """
    known = graph.opset_version(model) >= _INSTANCE_NORM_SINCE
    return rewrite(model, _fuse_instance_norm, "Div", "Mul", "Add") if known else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Match:
    found: Pattern
    last: ir.Node
    scale: NDArray[Any] | None
    shift: NDArray[Any] | None


def _fuse_instance_norm(editor: Editor, node: ir.Node) -> bool:
    match = _tensorflow_form(node) if graph.is_op(node, "Add") else _plain_form(node)
    if match is None or match.found.source.dtype != ir.DataType.FLOAT:
        return False
    found, last = match.found, match.last
    count = _channels(found)
    if count is None or not graph.replaceable(found.source, found.nodes, last):
        return False
    base = last.name or last.outputs[0].name or "InstanceNormalization"
    scale = np.ones(count) if match.scale is None else match.scale
    shift = np.zeros(count) if match.shift is None else match.shift
    numbers = {"scale": scale, "shift": shift}.items()
    constants = [editor.initializer(f"{base}_{word}", each.astype(np.float32)) for word, each in numbers]
    inputs, attributes = [found.source, *constants], {"epsilon": found.least}
    editor.replace_all(found.nodes, last, "InstanceNormalization", inputs, attributes)
    return True


def _channels(found: Pattern) -> int | None:
    shape = graph.dims(found.source)
    if shape is None or len(shape) < 3 or found.axes != tuple(range(2, len(shape))):
        return None
    return shape[1] or None


def _plain_form(core: ir.Node) -> _Match | None:
    found = normalized(core)
    count = None if found is None else _channels(found)
    if found is None or count is None:
        return None
    rank = len(found.source.shape or ())

    def by_channel(_: ir.Node, __: ir.Value, array: NDArray[Any]) -> NDArray[Any] | None:
        return per_channel(array, rank, count) if array.size == count else None

    scale, found, last = _with_operand(found, core, "Mul", by_channel)
    shift, found, last = _with_operand(found, last, "Add", by_channel)
    # Over the last of three dimensions alone, this is a layer normalization unless the scale says otherwise.
    # So it is where a scale follows that is not one number per channel.
    if (scale is None and rank == 3) or _applied(last, "Mul") is not None:
        return None
    return _Match(found, last, scale, shift)


def _tensorflow_form(last: ir.Node) -> _Match | None:
    """Match `x * factor + (shift - mean(x) * factor)` with `factor = scale / deviation`."""
    for left, right in graph.operands(last):
        times, minus = graph.producer(left, "Mul"), graph.producer(right, "Sub")
        if times is None or minus is None:
            continue
        moved = graph.producer(minus.inputs[1], "Mul")
        for source, factor in graph.operands(times):
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
    centers = [mean(value) for value, other in graph.operands(moved) if other is factor]
    center = next((c for c in centers if c is not None), None)
    found, scale = _factor(factor)
    if center is None or found is None or center.source is not source or found.source is not source:
        return None
    count = _channels(found)
    shift = graph.real_constant(minus.inputs[0])
    if count is None or shift is None or center.axes != found.axes:
        return None
    rank = len(source.shape or ())
    shifts = per_channel(shift, rank, count)
    scales = None if scale is None else per_channel(scale, rank, count)
    if shifts is None or (scale is not None and scales is None):
        return None
    return _Match(found.joined(last, times, minus, moved, *center.nodes), last, scales, shifts)


def _factor(value: ir.Value) -> tuple[Pattern | None, NDArray[Any] | None]:
    plain = reciprocal_deviation(value)
    node = graph.producer(value, "Mul")
    if plain is not None or node is None:
        return plain, None
    for inverse, other in graph.operands(node):
        found, scale = reciprocal_deviation(inverse), graph.real_constant(other)
        if found is not None and scale is not None:
            return found.joined(node), scale
    return None, None


# Norms below the clamp are the only ones for which the fused operator differs. Up to this size of the
# clamp such vectors are zero for any practical purpose. PyTorch clamps the norm at 1e-12, TensorFlow its
# square at 1e-12.
_LARGEST_CLAMP = 1.001e-6

_NO_MAXIMUM = 1e30  # exporters write the largest float for "no maximum"

_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


def fuse_l2_norm(model: ir.Model) -> int:
    """Fuses `x / max(norm(x), tiny)` over one axis into LpNormalization with p = 2.

    Tolerance: rounding, about 1e-6, for vectors whose norm exceeds the clamp; a zero vector stays zero.
    Vectors that are shorter than the clamp but not zero come out longer than before, so the fusion is
    done only where the clamp on the norm is at most 1e-6. An epsilon that is added to the norm, rather
    than clamping it, and a norm without any clamp, which would divide zero by zero, are left alone.
    """
    return rewrite(model, _fuse_l2_norm, "Div", "Mul")


def _fuse_l2_norm(editor: Editor, last: ir.Node) -> bool:
    found = _quotient(last)
    if found is None or not 0 < found.least <= _LARGEST_CLAMP or found.source.dtype not in _TYPES:
        return False
    nodes = found.nodes | {last}
    if not graph.replaceable(found.source, nodes, last):
        return False
    editor.replace_all(nodes, last, "LpNormalization", [found.source], {"axis": found.axes[0], "p": 2})
    return True


def _quotient(last: ir.Node) -> Pattern | None:
    if last.op_type == "Div":
        found = _expanded(graph.input_at(last, 1), graph.input_at(last, 0))
        return found if found is not None and found.source is graph.input_at(last, 0) else None
    for value, other in graph.operands(last):
        inverse = graph.producer(other, "Reciprocal")
        found = None if inverse is None else _expanded(inverse.inputs[0], value)
        if inverse is not None and found is not None and found.source is value:
            return found.joined(inverse)
    return None


def _expanded(value: ir.Value | None, like: ir.Value | None) -> Pattern | None:
    """A clamped norm, perhaps expanded to the shape of the vector."""
    node = graph.producer(value, "Expand")
    if node is None:
        return _clamped(value, _norm)
    shape = graph.producer(graph.input_at(node, 1), "Shape")
    same = shape is not None and shape.inputs[0] is like and not shape.attributes
    sizes = graph.static_shape(like)
    if not same and (sizes is None or sizes != graph.static_shape(node.outputs[0])):
        return None
    found = _clamped(graph.input_at(node, 0), _norm)
    return None if found is None else found.joined(node)


def _norm(value: ir.Value | None) -> Pattern | None:
    """Match ReduceL2, or the root of a sum of squares that may be clamped inside."""
    node = graph.producer(value, "ReduceL2", "Sqrt")
    if node is None or node.op_type == "ReduceL2":
        return _reduction(node)
    inside = _clamped(graph.input_at(node, 0), _sum_of_squares)
    if inside is None:
        return None
    return replace(inside.joined(node), least=math.sqrt(inside.least))


def _sum_of_squares(value: ir.Value | None) -> Pattern | None:
    node = graph.producer(value, "ReduceSum", "ReduceSumSquare")
    if node is None or node.op_type == "ReduceSumSquare":
        return _reduction(node)
    root, found = squared(graph.input_at(node, 0)), _reduction(node)
    return None if root is None or found is None else replace(found.joined(*root.nodes), source=root.source)


def _reduction(node: ir.Node | None) -> Pattern | None:
    source = None if node is None else graph.input_at(node, 0)
    if node is None or source is None or source.shape is None:
        return None
    axes = graph.reduced_axes(node, len(source.shape))
    return Pattern(source, frozenset({node}), axes) if axes is not None and len(axes) == 1 else None


def _clamped(value: ir.Value | None, inner: Matcher) -> Pattern | None:
    """What `inner` matches, perhaps behind Max or Clip from below."""
    node = graph.producer(value, "Max", "Clip")
    if node is None:
        return inner(value)
    if node.op_type == "Max":
        pairs = [(a, graph.constant_scalar(b)) for a, b in graph.operands(node)]
    else:
        pairs = [(node.inputs[0], _lower_bound(node))] if node.inputs[0] is not None else []
    for body, clamp in pairs:
        found = inner(body) if clamp is not None and clamp >= 0 else None
        if found is not None and clamp is not None:
            return replace(found.joined(node), least=max(found.least, clamp))
    return None


def _lower_bound(clip: ir.Node) -> float | None:
    """The minimum of a Clip without a maximum."""
    upper = graph.input_at(clip, 2)
    if upper is not None and (graph.constant_scalar(upper) or 0.0) < _NO_MAXIMUM:
        return None
    if graph.attribute_float(clip, "max", math.inf) < _NO_MAXIMUM:
        return None
    lower = graph.input_at(clip, 1)
    return graph.constant_scalar(lower) if lower is not None else graph.attribute_float(clip, "min", -1.0)
