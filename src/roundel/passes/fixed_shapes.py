"""Open dimensions get their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir

from roundel.errors import RecipeError, did_you_mean
from roundel.passes.base import Pass

# Exporters write these for dimensions that have nothing to do with each other.
_ANONYMOUS = frozenset({"", "?", "None", "-1"})


class FixedShapes(Pass):
    """Fixes the shapes of graph inputs, by input name or by the name of an open dimension. Exact for
    data of that shape.

    A dimension name that one input fixes is fixed everywhere it appears.

    Args:
        shapes: sizes by input name (`{"image": (1, 3, 224, 224)}`) or by dimension name (`{"batch": (1,)}`).
    """

    name: ClassVar[str] = "fixed shapes"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)

    def __call__(self, model: ir.Model) -> int:
        inputs = {v.name: v for v in model.graph.inputs if v.name and not v.is_initializer()}
        symbols = {name for value in inputs.values() for name in _symbols(value)}
        bindings: dict[str, int] = {}
        count = 0
        for key, sizes in self._shapes.items():
            _check_sizes(key, sizes)
            if key in inputs:
                count += _fix(inputs[key], sizes, bindings)
            elif key in symbols:
                if len(sizes) != 1:
                    raise RecipeError(
                        f"'{key}' names one dimension, so it takes one size.",
                        where=f"fixed_shapes.{key}",
                        observed=_text(sizes),
                        expected="one size, such as [1]",
                    )
                _bind(bindings, key, sizes[0])
            else:
                raise _unknown(key, set(inputs), symbols)
        for node in model.graph:
            for value in node.outputs:
                _apply(value, bindings)
        return count + sum(_apply(value, bindings) for value in inputs.values())


def _check_sizes(key: str, sizes: tuple[int, ...]) -> None:
    if any(size < 1 for size in sizes):
        raise RecipeError(
            "A fixed size must be at least 1.",
            where=f"fixed_shapes.{key}",
            observed=_text(sizes),
            expected="positive sizes for all dimensions",
        )


def _fix(value: ir.Value, sizes: tuple[int, ...], bindings: dict[str, int]) -> bool:
    before = value.shape
    if before is not None:
        agrees = len(before) == len(sizes) and all(
            not isinstance(d, int) or d < 0 or d == size for d, size in zip(before, sizes, strict=True)
        )
        if not agrees:
            raise RecipeError(
                f"The fixed shape of input '{value.name}' contradicts the model.",
                where=f"fixed_shapes.{value.name}",
                observed=_text(sizes),
                expected=f"{_text(tuple(before))} as the model declares it",
                hint="Give the declared sizes, and choose only those of the open dimensions.",
            )
        for dim, size in zip(before, sizes, strict=True):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None and dim.value not in _ANONYMOUS:
                _bind(bindings, dim.value, size)
    value.shape = ir.Shape(sizes)
    return before is None or tuple(before) != sizes


def _bind(bindings: dict[str, int], name: str, size: int) -> None:
    if bindings.setdefault(name, size) != size:
        raise RecipeError(
            f"Dimension '{name}' is fixed to two sizes.",
            where="fixed_shapes",
            observed=f"{bindings[name]} and {size}",
            expected="the same size wherever the dimension appears",
        )


def _apply(value: ir.Value, bindings: Mapping[str, int]) -> bool:
    if value.shape is None or not bindings:
        return False
    fixed = [
        bindings.get(d.value, d) if isinstance(d, ir.SymbolicDim) and d.value is not None else d
        for d in value.shape
    ]
    if fixed == list(value.shape):
        return False
    value.shape = ir.Shape(fixed)
    return True


def _symbols(value: ir.Value) -> set[str]:
    return {
        dim.value
        for dim in value.shape or ()
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None and dim.value not in _ANONYMOUS
    }


def _unknown(key: str, inputs: set[str], symbols: set[str]) -> RecipeError:
    return RecipeError(
        f"The model has no input and no open dimension called '{key}'.",
        where=f"fixed_shapes.{key}",
        expected=f"an input ({', '.join(sorted(inputs)) or 'none'}) "
        f"or an open dimension ({', '.join(sorted(symbols)) or 'none'})",
        hint=did_you_mean(key, inputs | symbols),
    )


def _text(sizes: tuple[object, ...]) -> str:
    return "[" + ", ".join("?" if str(size) in ("None", "?") else str(size) for size in sizes) + "]"
