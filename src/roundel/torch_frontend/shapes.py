"""Open dimensions: in torch's notation, with the names that the ONNX file shall have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundel.errors import DataError, RecipeError
from roundel.torch_frontend.examples import Example

BATCH = "batch"


def batch_shapes(example: Example) -> Any:
    """The first dimension of every tensor, under one name.

    Raises:
        DataError: the tensors have no common first dimension.
    """
    tensors = example.tensors()
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        raise DataError(
            "The inputs have no common first dimension that could be the batch.",
            where="example_inputs",
            observed=", ".join(str(tuple(tensor.shape)) for tensor in tensors),
            hint="Say which dimensions are open with dynamic_shapes, in torch.export's notation.",
        )

    def leaf(value: Any) -> Any:
        return {0: BATCH} if torch.is_tensor(value) else None

    if example.kwargs:
        return pytree.tree_map(leaf, dict(example.kwargs))
    return pytree.tree_map(leaf, example.args)


def for_export(shapes: Any) -> Any:
    """As torch.export wants it: a name becomes a dimension, the same one wherever it stands."""
    dims: dict[str, Any] = {}

    def change(dim: Any) -> Any:
        return dims.setdefault(dim, torch.export.Dim(dim)) if isinstance(dim, str) else dim

    return _each(shapes, change)


def for_naming(shapes: Any) -> Any:
    """As the ONNX exporter names dimensions: by strings."""

    def change(dim: Any) -> Any:
        return dim.__name__ if isinstance(dim, torch.export.Dim) else dim

    return _each(shapes, change)


def _each(shapes: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(shapes, Mapping):
        axes = bool(shapes) and all(isinstance(key, int) for key in shapes)
        return {k: change(v) if axes else _each(v, change) for k, v in shapes.items()}
    if isinstance(shapes, list | tuple):
        return type(shapes)(_each(part, change) for part in shapes)
    if shapes is None:
        return None
    raise RecipeError(
        "The dynamic shapes cannot be read.",
        where="dynamic_shapes",
        observed=repr(shapes),
        expected="by parameter name or position, a dict from axis to a name: {'x': {0: 'batch'}}",
    )
