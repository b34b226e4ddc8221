"""Convolutions and pools say what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import dims, get_int, get_ints, get_string, input_at, is_op, static_dims


class ExplicitAttributes(Pass):
    """Writes out kernel_shape, strides, pads, dilations and group, and resolves auto_pad. Exact.

    SAME padding depends on the size of the input: it is resolved where that is known or the stride is 1,
    and left alone elsewhere. A transposed convolution with an odd total padding is left alone too, because
    runtimes disagree on which side gets the extra row.
    """

    name: ClassVar[str] = "explicit conv attributes"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        count = 0
        for node in model.graph:
            if is_op(node, "Conv", "ConvTranspose"):
                count += _write_conv(node)
            elif is_op(node, "MaxPool", "AveragePool"):
                count += _write_pool(node)
        return count


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
    ones = (1,) * len(kernel)
    return _Window(kernel, get_ints(node, "strides") or ones, get_ints(node, "dilations") or ones)


def _write_conv(node: ir.Node) -> bool:
    kernel = get_ints(node, "kernel_shape")
    weight = static_dims(input_at(node, 1))
    kernel = kernel or (weight[2:] if weight else None)
    if not kernel:
        return False
    window = _window(node, kernel)
    written = {
        "kernel_shape": window.kernel,
        "strides": window.strides,
        "dilations": window.dilations,
    }
    pads = _pads(node, window)
    changed = _write(node, written, pads)
    if "group" not in node.attributes:
        node.attributes["group"] = ir.AttrInt64("group", 1)
        changed = True
    return changed


def _write_pool(node: ir.Node) -> bool:
    kernel = get_ints(node, "kernel_shape")
    if not kernel:
        return False
    window = _window(node, kernel)
    # Neither the standard nor the runtimes agree on automatic padding together with ceil_mode.
    if get_int(node, "ceil_mode", 0) and get_string(node, "auto_pad", "NOTSET") != "NOTSET":
        return False
    return _write(node, {"strides": window.strides}, _pads(node, window))


def _write(node: ir.Node, written: dict[str, tuple[int, ...]], pads: tuple[int, ...] | None) -> bool:
    changed = False
    if pads is not None:
        written = {**written, "pads": pads}
        changed = node.attributes.pop("auto_pad", None) is not None
    for name, values in written.items():
        if get_ints(node, name) != values:
            node.attributes[name] = ir.AttrInt64s(name, values)
            changed = True
    return changed


def _pads(node: ir.Node, window: _Window) -> tuple[int, ...] | None:
    """Explicit pads, or None where they are not known."""
    # With an output shape, pads follow from it, and the attribute is ignored.
    if "output_shape" in node.attributes:
        return None
    mode = get_string(node, "auto_pad", "NOTSET")
    none = (0,) * (2 * len(window.kernel))
    if mode == "NOTSET":
        return get_ints(node, "pads") or none
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
    extra = get_ints(node, "output_padding") or (0,) * len(window.kernel)
    totals = tuple(e + x - s for e, x, s in zip(window.extent, extra, window.strides, strict=True))
    return totals if all(t >= 0 and t % 2 == 0 for t in totals) else None


def _spatial(node: ir.Node, window: _Window) -> Sequence[int | None]:
    shape = dims(input_at(node, 0))
    rank = len(window.kernel)
    return shape[2:] if shape is not None and len(shape) == rank + 2 else (None,) * rank
