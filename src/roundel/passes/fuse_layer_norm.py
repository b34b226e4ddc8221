"""Layer normalization as one node."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.passes.base import Pass
from roundel.passes.moments import Deviation, normalized
from roundel.passes.rewriting import (
    Editor,
    dims,
    is_op,
    is_private,
    only_reader,
    operands,
    real_constant,
    same_rank,
)

_SINCE = 17

# The operator computes its statistics in 32 bits, so a double model would lose precision.
_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})


class FuseLayerNorm(Pass):
    """Fuses mean, variance, division, scale and shift over the last dimensions into LayerNormalization.

    Needs opset 17. Tolerance: the order of the sums, about 1e-6 (1e-3 in 16-bit floats).
    """

    name: ClassVar[str] = "fuse layer norm"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        if editor.opset < _SINCE:
            return 0
        # A fusion removes nodes further on, hence the snapshot.
        nodes = [node for node in model.graph if is_op(node, "Div", "Mul")]
        return sum(_fuse(editor, node) for node in nodes if node.graph is model.graph)


def _fuse(editor: Editor, core: ir.Node) -> bool:
    found = normalized(core)
    shape = None if found is None else _normalized_shape(found)
    if found is None or shape is None or found.source.dtype not in _TYPES:
        return False
    nodes, last = set(found.nodes), core
    scale, scaling = _operand(last, "Mul", shape)
    if scaling is not None:
        nodes, last = nodes | {scaling}, scaling
    bias, shifting = _operand(last, "Add", shape)
    if shifting is not None:
        nodes, last = nodes | {shifting}, shifting
    if not same_rank(found.source, last.outputs[0]) or not is_private(nodes, last):
        return False
    base = last.name or last.outputs[0].name or "LayerNormalization"
    if scale is None:
        scale = editor.initializer(f"{base}_scale", np.ones(shape, dtype=found.source.dtype.numpy()))
    inputs = [found.source, _shaped(editor, scale, shape), *([_shaped(editor, bias, shape)] if bias else [])]
    attributes: dict[str, int | float] = {"axis": -len(shape), "epsilon": found.epsilon}
    editor.replace(last, "LayerNormalization", inputs, attributes)
    editor.drop_all(nodes - {last})
    return True


def _normalized_shape(found: Deviation) -> tuple[int, ...] | None:
    """Sizes of the normalized dimensions, if they are the last ones and known."""
    known = dims(found.source)
    if known is None or found.axes != tuple(range(found.axes[0], len(known))):
        return None
    sizes = tuple(d for d in known[found.axes[0] :] if d is not None)
    return sizes if len(sizes) == len(found.axes) else None


def _operand(node: ir.Node, op_type: str, shape: tuple[int, ...]) -> tuple[ir.Value | None, ir.Node | None]:
    """The constant that the one reader of a node applies to it, and that reader."""
    reader = only_reader(node.outputs[0])
    if reader is None or not is_op(reader, op_type):
        return None, None
    for value, other in operands(reader):
        array = real_constant(other)
        if value is node.outputs[0] and array is not None and _spread(array, shape) is not None:
            same = value.dtype is None or value.dtype == ir.DataType.from_numpy(array.dtype)
            return (other, reader) if same else (None, None)
    return None, None


def _spread(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
    """The constant over the normalized dimensions, if it does not vary over any other."""
    extra = array.ndim - len(shape)
    if extra > 0:
        if any(d != 1 for d in array.shape[:extra]):
            return None
        array = array.reshape(array.shape[extra:])
    fits = all(a in (1, s) for a, s in zip(reversed(array.shape), reversed(shape), strict=False))
    return np.broadcast_to(array, shape) if fits else None


def _shaped(editor: Editor, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    array = real_constant(value)
    assert array is not None, "found by _operand"
    if array.shape == shape:
        return value
    spread = _spread(array, shape)
    assert spread is not None, "found by _operand"
    return editor.initializer(value.name or "scale", np.array(spread))
