"""What a transformer's graph shows: norms, where factors of channels can go, what carries rows whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

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
    is_private,
    only_reader,
    op_key,
    producer,
    real_constant,
)
from roundel.model.layers import Layer, read_layer, read_linear
from roundel.passes.moments import over_root, padded_square
from roundel.targets.operators import Trait, ops_with

NORM_OPERATORS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")

Slot = tuple[ir.Node, int]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """x / size(x) * scale + shift.

    Attributes:
        source: x.
        output: the result.
        nodes: everything between the two.
        centered: whether the mean of x is subtracted first (LayerNorm; RMSNorm does not).
        scale: the constant that multiplies, where there is one.
        shift: the constant that is added, where there is one.
    """

    source: ir.Value
    output: ir.Value
    nodes: frozenset[ir.Node]
    centered: bool
    scale: Slot | None
    shift: Slot | None

    def array(self, slot: Slot | None) -> NDArray[Any] | None:
        """The constant in a slot."""
        return None if slot is None else real_constant(input_at(*slot))

    def clear(self, editor: Editor) -> None:
        """Scale by 1 and shift by nothing, without nodes that would do only that."""
        for slot in (self.scale, self.shift):
            if slot is None:
                continue
            node, index = slot
            if is_op(node, "Mul", "Add"):
                computed = node.inputs[1 - index]
                assert computed is not None
                editor.take_over(node.outputs[0], computed)
                editor.drop(node)
            elif index == 2:
                node.resize_inputs(2)
            else:
                old = self.array(slot)
                assert old is not None
                editor.set_constant(node, index, np.ones_like(old), "scale")


def find_norms(graph: ir.Graph) -> tuple[Norm, ...]:
    """All norms over the last axis whose constants are known, in graph order."""
    found = []
    for node in graph:
        norm = read_norm(node) or _spelled_out(node)
        if norm is not None and not any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
            found.append(norm)
    return tuple(found)


def read_norm(node: ir.Node) -> Norm | None:
    """A norm as one operator."""
    source = input_at(node, 0)
    known = dims(source)
    if not is_op(node, *NORM_OPERATORS) or source is None or not known:
        return None
    if attribute_int(node, "axis", -1) not in (-1, len(known) - 1):
        return None
    scale, shift = real_constant(input_at(node, 1)), real_constant(input_at(node, 2))
    if scale is None or scale.shape != known[-1:] or (shift is None and input_at(node, 2) is not None):
        return None
    if shift is not None and shift.shape != scale.shape:
        return None
    return Norm(
        source=source,
        output=node.outputs[0],
        nodes=frozenset({node}),
        centered=node.op_type == "LayerNormalization",
        scale=(node, 1),
        shift=None if shift is None else (node, 2),
    )


def _spelled_out(core: ir.Node) -> Norm | None:
    """x / sqrt(mean(x * x) + epsilon), then a Mul and an Add with constants."""
    found = next((root for value, root in over_root(core, padded_square) if root.source is value), None)
    known = None if found is None else dims(found.source)
    if found is None or not known or found.axes != (len(known) - 1,):
        return None
    scale = _constant_behind(core.outputs[0], "Mul", known[-1])
    last = core if scale is None else scale[0]
    shift = _constant_behind(last.outputs[0], "Add", known[-1])
    last = last if shift is None else shift[0]
    whole = found.nodes | {core} | {slot[0] for slot in (scale, shift) if slot is not None}
    if not is_private(whole, last):
        return None
    return Norm(found.source, last.outputs[0], frozenset(whole), False, scale, shift)


def _constant_behind(value: ir.Value, op_type: str, width: int | None) -> Slot | None:
    """The constant, one number for each place of the last axis, that the one reader applies."""
    reader = only_reader(value)
    if reader is None or not is_op(reader, op_type):
        return None
    for index, other in enumerate(reader.inputs):
        array = real_constant(other)
        if array is not None and array.size == width and array.shape[-1:] == (width,):
            return reader, index
    return None


Channels = NDArray[np.int64]
Factors = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A constant input whose values are divided by the factors of their channels."""

    node: ir.Node
    index: int
    channels: Channels

    def apply(self, editor: Editor, factors: Factors) -> None:
        """Write the constant; one that other nodes read too is copied first."""
        old = real_constant(input_at(self.node, self.index))
        assert old is not None, "found by trace"
        divisors = np.append(factors, 1.0)[self.channels]  # channel -1 takes the last one
        new = (old.astype(np.float64) / divisors).astype(old.dtype)
        editor.set_constant(self.node, self.index, new, "constant")


Edits = tuple[Edit, ...]


def trace(value: ir.Value) -> Edits | None:
    """The constants to edit so that the last axis of a tensor is divided by factors; None if there is no way.

    Nothing but the tensor itself changes: every tensor above it that would change, too, has one reader.
    """
    known = dims(value)
    if not known or known[-1] is None:
        return None
    return _made(value, np.arange(known[-1]).reshape(*[1] * (len(known) - 1), -1))


def _made(value: ir.Value, channels: Channels) -> Edits | None:
    """The edits at and above the node that makes the value."""
    node = value.producer()
    rule = _RULES.get(op_key(node)) if node is not None else None
    return None if node is None or rule is None else rule(node, value, channels)


def _above(node: ir.Node, index: int, channels: Channels) -> Edits | None:
    """The edits for an input that only this node reads."""
    value = input_at(node, index)
    if value is None or only_reader(value) is not node or not _fits(value, channels):
        return None
    return _made(value, channels)


def _fits(value: ir.Value, channels: Channels) -> bool:
    """Whether the tensor has an axis of the right size for each axis along which the channels differ."""
    known = dims(value)
    return known is not None and _spans(known, channels)


def _spans(shape: Sequence[int | None], channels: Channels) -> bool:
    return len(shape) == channels.ndim and all(
        count in (1, size) for count, size in zip(channels.shape, shape, strict=True)
    )


def _last_only(channels: Channels) -> Channels | None:
    """The channels along the last axis, where they differ along no other."""
    return channels.reshape(-1) if channels.size == channels.shape[-1] else None


def _norm(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    norm, last = read_norm(node), _last_only(channels)
    if norm is None or norm.output is not value or last is None:
        return None
    return tuple(Edit(*slot, last) for slot in (norm.scale, norm.shift) if slot is not None)


def _linear(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    layer, last = read_linear(node), _last_only(channels)
    if layer is None:
        # The left side of a product mixes rows of the right side only: channels stay where they are.
        stays = node.op_type == "MatMul" and channels.ndim > 1 and channels.shape[-2] == 1
        return _above(node, 1, channels) if stays else None
    if last is None:
        return None
    weight = Edit(node, 1, last[:, None] if layer.transposed else last[None])
    return (weight,) if layer.bias is None else (weight, Edit(node, 2, last))


def _sum(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    """A constant that is added or subtracted is rescaled, too."""
    for index, other in ((0, 1), (1, 0)):
        if real_constant(input_at(node, other)) is not None:
            rest = _above(node, index, channels)
            return None if rest is None else (*rest, Edit(node, other, _trimmed(node, other, channels)))
    return None


def _trimmed(node: ir.Node, index: int, channels: Channels) -> Channels:
    """Without leading axes that neither the channels nor the constant have."""
    value = real_constant(input_at(node, index))
    assert value is not None
    while channels.ndim > max(value.ndim, 1) and channels.shape[0] == 1:
        channels = channels[0]
    return channels


def _product(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    """One side of a product takes all factors: its constant, or what makes it."""
    for index in (1, 0):
        array = real_constant(input_at(node, index))
        if array is not None and array.size > 1 and _covers(array, channels):
            return (Edit(node, index, _trimmed(node, index, channels)),)
    for index in (0, 1):
        if constant_array(input_at(node, index)) is None and (found := _above(node, index, channels)):
            return found
    return None


def _covers(array: NDArray[Any], channels: Channels) -> bool:
    """Whether the constant has a number of its own for each place where channels differ."""
    return _spans((1,) * (channels.ndim - array.ndim) + array.shape, channels)


def _passed(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    """f(x / s) = f(x) / s for every s above zero."""
    return _above(node, 0, channels) if value is node.outputs[0] else None


def _reshaped(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    """The channels differ along trailing axes only: these axes have another outline in the input."""
    source = input_at(node, 0)
    inner, outer = dims(source), dims(value)
    if inner is None or outer is None or not channels.size:
        return None
    first = next((axis for axis, count in enumerate(channels.shape) if count > 1), channels.ndim - 1)
    tail = outer[first:]
    known = [size for size in tail if size is not None]
    if len(known) != len(tail):
        return None
    for start in range(len(inner), -1, -1):
        sizes = [size for size in inner[start:] if size is not None]
        if len(sizes) == len(inner) - start and math.prod(sizes) == math.prod(known):
            spread = np.broadcast_to(channels[(0,) * first], known).reshape(sizes)
            return _above(node, 0, _narrowed(spread.reshape(*[1] * start, *sizes)))
    return None


def _narrowed(channels: Channels) -> Channels:
    """Size 1 along each axis where all places are alike."""
    for axis in range(channels.ndim):
        head = np.take(channels, [0], axis)
        if np.array_equal(np.broadcast_to(head, channels.shape), channels):
            channels = head
    return channels


def _transposed(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    order = attribute_ints(node, "perm") or tuple(reversed(range(channels.ndim)))
    return _above(node, 0, channels.transpose(np.argsort(order)))


def _split(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    """The parts beside this one keep their values."""
    axis = attribute_int(node, "axis", 0) % channels.ndim
    sizes = [(dims(out) or ())[axis : axis + 1] for out in node.outputs]
    known = [size[0] for size in sizes if size and size[0] is not None]
    if len(known) != len(sizes):
        return None
    position = next(i for i, out in enumerate(node.outputs) if out is value)
    parts = [np.full(_resized(channels.shape, axis, size), -1) for size in known]
    own = _resized(channels.shape, axis, known[position])
    parts[position] = np.array(np.broadcast_to(channels, own))
    return _above(node, 0, np.concatenate(parts, axis))


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _picked(node: ir.Node, value: ir.Value, channels: Channels) -> Edits | None:
    """Some places along an axis; the others keep their values, so others may read them."""
    source = input_at(node, 0)
    own = _pick(node, 0)
    if source is None or own is None or source.is_graph_output():
        return None
    axis, places, size = own
    for use in source.uses():
        other = _pick(use.node, use.idx) if use.node.graph is node.graph else None
        if use.node is not node and (other is None or other[0] != axis or places & other[1]):
            return None
    if is_op(node, "Gather"):
        channels = np.expand_dims(channels, axis)
    whole = np.full(_resized(channels.shape, axis, size), -1)
    whole[(slice(None),) * axis + (sorted(places),)] = channels
    return _made(source, whole) if _fits(source, whole) else None


def _pick(node: ir.Node, index: int) -> tuple[int, frozenset[int], int] | None:
    """The axis and the places along it that a Gather of one, or a Slice, reads; and how many there are."""
    known = dims(input_at(node, 0))
    if index or not known or not is_op(node, "Gather", "Slice"):
        return None
    if is_op(node, "Gather"):
        places = constant_array(input_at(node, 1))
        axis = attribute_int(node, "axis", 0) % len(known)
        size = known[axis]
        if places is None or places.ndim or size is None:
            return None
        return axis, frozenset({int(places) % size}), size
    begins, ends, axes, steps = (integers(input_at(node, i)) for i in (1, 2, 3, 4))
    stepped = input_at(node, 4) is not None and steps != (1,)
    if stepped or not (begins and ends and axes) or len(axes) != 1:
        return None
    size = known[axes[0] % len(known)]
    if size is None:
        return None
    taken = range(size)[slice(begins[0], ends[0])]
    return axes[0] % len(known), frozenset(taken), size


_RULES: dict[str, Callable[[ir.Node, ir.Value, Channels], Edits | None]] = {
    **dict.fromkeys(NORM_OPERATORS, _norm),
    **dict.fromkeys(("MatMul", "Gemm"), _linear),
    **dict.fromkeys(("Add", "Sub"), _sum),
    **dict.fromkeys(("Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Div"), _passed),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshaped),
    **dict.fromkeys(("Gather", "Slice"), _picked),
    "Mul": _product,
    "Transpose": _transposed,
    "Split": _split,
}


# Rows come out as they went in, so that a shift of all of them stays that shift.
_MOVERS = ops_with(Trait.SHAPES | Trait.SELECTS) | {"Expand", "ReduceMean"}
_ALONG_AXIS = {"Gather": 0, "Split": 0, "Concat": 0}


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


def row_outputs(node: ir.Node) -> Sequence[ir.Value]:
    """What the rows of a node's input come out in."""
    return node.outputs if node.op_type == "Split" else node.outputs[:1]


def patch_layer(node: ir.Node, width: int) -> Layer | None:
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


def only_layers_behind(value: ir.Value, width: int) -> tuple[Layer, ...] | None:
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
                pending.extend(row_outputs(use.node))
            else:
                return None
    return tuple(found) or None
