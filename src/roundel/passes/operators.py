"""Operators in the form that the NPU takes: pools, slices, layouts, written-out attributes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import onnx_ir as ir

from roundel.model import graph
from roundel.model.edit import Editor, rewrite

_FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})


def reduce_mean_to_pool(model: ir.Model) -> int:
    """Replaces ReduceMean over the last two of four dimensions by GlobalAveragePool.

    Without keepdims, a Flatten follows. Tolerance: the order in which a runtime adds up, about 1e-6.
    """
    return rewrite(model, _convert, "ReduceMean")


def _convert(editor: Editor, node: ir.Node) -> bool:
    source = graph.input_at(node, 0)
    shape = graph.dims(source)
    if source is None or shape is None or len(shape) != 4 or source.dtype not in _FLOATS:
        return False
    # Unlike a mean, a pool over an empty tensor is an error in ONNX Runtime.
    if graph.any_reduced_axes(node, 4) != (2, 3) or 0 in shape:
        return False
    if graph.attribute_int(node, "keepdims", 1):
        editor.replace(node, "GlobalAveragePool", [source], {})
    else:
        base = node.name or node.outputs[0].name or "ReduceMean"
        pooled = editor.insert(node, "GlobalAveragePool", [source], {}, f"{base}_pool")
        editor.replace(node, "Flatten", [pooled], {"axis": 1})
    return True


# Elements that the pooling engine of the NPU can average at once.
_LIMIT = 512


def split_large_pools(model: ir.Model) -> int:
    """Splits a GlobalAveragePool over more than 512 elements into AveragePool and GlobalAveragePool.

    The first kernel is, for each dimension, the largest factor up to its square root. A pool of which a
    part would still be too large stays whole. Tolerance: the order of the sum, about 1e-6.
    """
    return rewrite(model, _split, "GlobalAveragePool")


def _split(editor: Editor, node: ir.Node) -> bool:
    source = graph.input_at(node, 0)
    shape = graph.dims(source)
    if shape is None or len(shape) != 4 or 0 in shape:
        return False
    height, width = shape[2], shape[3]
    if not height or not width or not _LIMIT < height * width <= _LIMIT**2:
        return False
    kernel = (_near_root(height), _near_root(width))
    first = math.prod(kernel)
    if first == 1 or first > _LIMIT or height * width // first > _LIMIT:
        return False
    base = node.name or node.outputs[0].name or "GlobalAveragePool"
    attributes = {"kernel_shape": kernel, "strides": kernel, "pads": (0, 0, 0, 0)}
    part = editor.insert(node, "AveragePool", [source], attributes, f"{base}_part")
    node.replace_input_with(0, part)
    return True


def _near_root(size: int) -> int:
    return next(factor for factor in range(math.isqrt(size), 0, -1) if size % factor == 0)


_SLICE_TAKES_INPUTS_SINCE = 10


def split_to_slice(model: ir.Model) -> int:
    """Replaces each Split whose sizes are known by Slice nodes. Exact.

    Parts that nobody reads get no Slice. A Split whose sizes are not known is left alone.
    """
    return rewrite(model, _slices, "Split")


def _sizes(node: ir.Node, size: int | None) -> tuple[int, ...] | None:
    """Sizes of the parts, or None where they are not known."""
    sizes = graph.attribute_ints(node, "split")
    if sizes is None and graph.input_at(node, 1) is not None:
        sizes = graph.integers(node.inputs[1])
        if sizes is None:
            return None
    count = len(node.outputs)
    if sizes is None and size is not None:
        # Equal parts, of which the last may be smaller (num_outputs, since opset 18).
        chunk = -(-size // count)
        sizes = (chunk,) * (count - 1) + (size - chunk * (count - 1),)
    if sizes is None or len(sizes) != count or min(sizes) < 0:
        return None
    return sizes if size is None or sum(sizes) == size else None


def _slices(editor: Editor, node: ir.Node) -> bool:
    source = graph.input_at(node, 0)
    axis = graph.attribute_int(node, "axis", 0)
    shape = graph.dims(source)
    in_range = shape is not None and -len(shape) <= axis < len(shape)
    sizes = _sizes(node, shape[axis] if shape is not None and in_range else None)
    if source is None or sizes is None:
        return False
    base = node.name or node.outputs[0].name or "Split"
    for index, stop in enumerate(accumulate(sizes)):
        output = node.outputs[index]
        if not output.uses() and not output.is_graph_output():
            continue
        ranges = {"starts": stop - sizes[index], "ends": stop, "axes": axis}
        name = f"{base}_{index}"
        if editor.opset >= _SLICE_TAKES_INPUTS_SINCE:
            bounds = [editor.initializer(f"{name}_{key}", np.array([n])) for key, n in ranges.items()]
            part = editor.insert(node, "Slice", [source, *bounds], {}, name)
        else:
            part = editor.insert(node, "Slice", [source], {key: (n,) for key, n in ranges.items()}, name)
        editor.take_over(output, part)
    editor.drop(node)
    return True


_TO_NCHW = (0, 3, 1, 2)
_TO_NHWC = (0, 2, 3, 1)


def nchw_to_nhwc(model: ir.Model) -> int:
    """Changes the layout of four-dimensional graph inputs and outputs from NCHW to NHWC. Exact.

    Names stay; shapes change with the layout, and the caller feeds and reads NHWC from then on. Inside,
    a Transpose at each such input and output leaves the rest of the graph as it was.
    """
    editor = Editor(model)
    outputs = [v for v in dict.fromkeys(model.graph.outputs) if _is_image(v) and not v.is_graph_input()]
    inputs = [v for v in model.graph.inputs if _is_image(v) and not v.is_initializer()]
    for value in outputs:
        _turn_output(editor, value)
    for value in inputs:
        _turn_input(editor, value)
    return len(outputs) + len(inputs)


def _is_image(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 4


def _turn_input(editor: Editor, value: ir.Value) -> None:
    assert value.shape is not None, "checked by _is_image"
    inner = ir.node("Transpose", [value], {"perm": _TO_NCHW}, name=editor.fresh(f"{value.name}_to_nchw"))
    turned = inner.outputs[0]
    turned.name = editor.fresh(f"{value.name}_nchw")
    turned.shape, turned.type = value.shape, value.type
    # Graph outputs that are this very input turn with it, and stay.
    for use in value.uses():
        if use.node is not inner:
            use.node.replace_input_with(use.idx, turned)
    value.shape = ir.Shape([value.shape[axis] for axis in _TO_NHWC])
    first = next(iter(editor.graph), None)
    if first is None:
        editor.graph.append(inner)
    else:
        first.prepend(inner)


def _turn_output(editor: Editor, value: ir.Value) -> None:
    assert value.shape is not None, "checked by _is_image"
    name = value.name
    turn = ir.node("Transpose", [value], {"perm": _TO_NHWC}, name=editor.fresh(f"{name}_to_nhwc"))
    turned = turn.outputs[0]
    editor.hand_over(value, turned, f"{name}_nchw")
    turned.type = value.type
    turned.shape = ir.Shape([value.shape[axis] for axis in _TO_NHWC])
    editor.graph.append(turn)


def explicit_attributes(model: ir.Model) -> int:
    """Writes out kernel_shape, strides, pads, dilations and group, and resolves auto_pad. Exact.

    SAME padding depends on the size of the input: it is resolved where that is known or the stride is 1,
    and left alone elsewhere. A transposed convolution with an odd total padding is left alone too, because
    runtimes disagree on which side gets the extra row.
    """
    convs = rewrite(model, _write_conv, "Conv", "ConvTranspose")
    return convs + rewrite(model, _write_pool, "MaxPool", "AveragePool")


@dataclass(frozen=True, slots=True)
class _Window:
    """A sliding window over the spatial dimensions."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Rows that the window spans."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))


def _window(node: ir.Node, kernel: tuple[int, ...]) -> _Window:
    sizes = (graph.attribute_ints(node, name) or (1,) * len(kernel) for name in ("strides", "dilations"))
    return _Window(kernel, *sizes)


def _write_conv(_: Editor, node: ir.Node) -> bool:
    kernel = graph.attribute_ints(node, "kernel_shape")
    weight = graph.static_shape(graph.input_at(node, 1))
    kernel = kernel or (weight[2:] if weight else None)
    if not kernel:
        return False
    window = _window(node, kernel)
    written = {"kernel_shape": window.kernel, "strides": window.strides, "dilations": window.dilations}
    pads = _pads(node, window)
    changed = _write(node, written, pads)
    if "group" not in node.attributes:
        node.attributes["group"] = ir.AttrInt64("group", 1)
        changed = True
    return changed


def _write_pool(_: Editor, node: ir.Node) -> bool:
    kernel = graph.attribute_ints(node, "kernel_shape")
    if not kernel:
        return False
    window = _window(node, kernel)
    # Neither the standard nor the runtimes agree on automatic padding together with ceil_mode.
    automatic = graph.attribute_string(node, "auto_pad", "NOTSET") != "NOTSET"
    if automatic and graph.attribute_int(node, "ceil_mode", 0):
        return False
    return _write(node, {"strides": window.strides}, _pads(node, window))


def _write(node: ir.Node, written: dict[str, tuple[int, ...]], pads: tuple[int, ...] | None) -> bool:
    changed = False
    if pads is not None:
        written = {**written, "pads": pads}
        changed = node.attributes.pop("auto_pad", None) is not None
    for name, values in written.items():
        if graph.attribute_ints(node, name) != values:
            node.attributes[name] = ir.AttrInt64s(name, values)
            changed = True
    return changed


def _pads(node: ir.Node, window: _Window) -> tuple[int, ...] | None:
    """Explicit pads, or None where they are not known."""
    # With an output shape, pads follow from it, and the attribute is ignored.
    if "output_shape" in node.attributes:
        return None
    mode = graph.attribute_string(node, "auto_pad", "NOTSET")
    none = (0,) * (2 * len(window.kernel))
    if mode == "NOTSET":
        return graph.attribute_ints(node, "pads") or none
    if mode == "VALID":
        return none
    totals = _transposed_totals(node, window) if node.op_type == "ConvTranspose" else _totals(node, window)
    if totals is None:
        return None
    less, more = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return less + more if mode == "SAME_UPPER" else more + less


def _totals(node: ir.Node, window: _Window) -> tuple[int, ...] | None:
    """Padding that gives ceil(size / stride) outputs."""
    totals = []
    for size, stride, extent in zip(_spatial(node, window), window.strides, window.extent, strict=True):
        if stride == 1:
            totals.append(extent - 1)
        elif size is None:
            return None
        else:
            outputs = -(-size // stride)
            totals.append(max((outputs - 1) * stride + extent - size, 0))
    return tuple(totals)


def _transposed_totals(node: ir.Node, window: _Window) -> tuple[int, ...] | None:
    """Padding that gives size * stride outputs, which does not depend on the size."""
    extra = graph.attribute_ints(node, "output_padding") or (0,) * len(window.kernel)
    totals = tuple(e + x - s for e, x, s in zip(window.extent, extra, window.strides, strict=True))
    return totals if all(t >= 0 and t % 2 == 0 for t in totals) else None


def _spatial(node: ir.Node, window: _Window) -> Sequence[int | None]:
    shape = graph.dims(graph.input_at(node, 0))
    rank = len(window.kernel)
    return shape[2:] if shape is not None and len(shape) == rank + 2 else (None,) * rank
