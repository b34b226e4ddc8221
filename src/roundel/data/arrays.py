"""Anything that holds numbers becomes a numpy array here: tensors of any framework, and nested lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.errors import DataError

Array = NDArray[Any]


def is_array(value: object) -> bool:
    """Whether `value` is one array (numpy, or a tensor that can become one), not a container of arrays."""
    return isinstance(value, np.ndarray | np.generic) or (
        hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__array__")
    )


def to_array(value: object, where: str) -> Array:
    """Turn an array, a tensor or a nested list of numbers into a numpy array.

    Tensors are recognised by their methods, so that no framework is imported here.

    Args:
        value: what the user's data source gave.
        where: the sample and input, for the error.

    Raises:
        DataError: when there are no numbers in it, or they do not form a rectangular array.
    """
    if isinstance(value, np.ndarray):
        return value
    tensor: Any = value
    if hasattr(tensor, "detach") and hasattr(tensor, "cpu"):
        tensor = tensor.detach().cpu()
    try:
        array = np.asarray(tensor.numpy() if callable(getattr(tensor, "numpy", None)) else tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            "A value cannot be turned into a numpy array",
            where=where,
            observed=f"{type(value).__name__}: {error}",
            expected="a numpy array, a CPU-convertible tensor or a rectangular list of numbers",
            hint="Convert the value yourself, e.g. tensor.float().numpy(), before handing it over.",
        ) from error
    if array.dtype == object and not is_array(value) and not isinstance(value, list | tuple):
        raise DataError(
            "A sample holds something that is not an array",
            where=where,
            observed=f"an object of type {type(value).__name__}",
            expected="a numpy array, a tensor or a list of numbers",
        )
    return array
