"""One array against one model input: element type, shape, finite values."""

from __future__ import annotations

from typing import Any

import numpy as np

from roundel.data.arrays import Array
from roundel.errors import DataError
from roundel.types import InputSpec

Shape = tuple[int, ...]


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a type is floating point, including bfloat16, which numpy itself does not know."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def fit_shape(shape: Shape, spec: InputSpec, where: str, *, free_batch: bool) -> Shape:
    """The shape under which an array is fed, with a missing batch axis added.

    Args:
        shape: the shape of the array.
        spec: the model input.
        where: the sample, for the error.
        free_batch: whether the first dimension may be any size, because rows are regrouped later.

    Raises:
        DataError: when the shape cannot be the input's.
    """
    if spec.shape is None:
        return shape
    batch = spec.shape[:1]
    lacks_batch = len(shape) == len(spec.shape) - 1
    if lacks_batch and (free_batch or not isinstance(batch[0], int) or batch[0] == 1):
        fed = (1, *shape)
    else:
        fed = shape
    if len(fed) == len(spec.shape):
        wanted = (None, *spec.shape[1:]) if free_batch and batch else spec.shape
        fits = all(not isinstance(w, int) or w == d for w, d in zip(wanted, fed, strict=True))
        if fits and (not fed or fed[0] > 0 or batch[0] == 0):
            return fed
    raise DataError(
        f"A sample does not have the shape of input '{spec.name}'",
        where=where,
        observed=f"shape {_dims(shape)}",
        expected=str(spec),
        hint=_shape_hint(fed, spec),
    )


def _dims(shape: tuple[object, ...]) -> str:
    return "[" + ", ".join(str(d) for d in shape) + "]"


def _shape_hint(fed: Shape, spec: InputSpec) -> str | None:
    if spec.shape is None or len(fed) != len(spec.shape):
        return None
    if fed[0] == 0:
        return "The array has no rows."
    for axes, words in (((0, 3, 1, 2), "channels last"), ((0, 2, 3, 1), "channels first")):
        if len(fed) != 4:
            continue
        turned = tuple(fed[a] for a in axes)
        if all(not isinstance(w, int) or w == d for w, d in zip(spec.shape[1:], turned[1:], strict=True)):
            return f"The array looks like {words}: transpose it with np.transpose(x, {axes})."
    return None


def fit_dtype(array: Array, spec: InputSpec, where: str) -> Array:
    """Cast to the input's element type where no value can change its meaning.

    Float widths convert into each other, integer widths too when every value fits, booleans become 0 and 1.
    Integers never become floats silently: pixels 0..255 in a float input are a classic mistake.

    Raises:
        DataError: when the cast is refused or a value does not fit.
    """
    have, want = array.dtype, spec.dtype
    if have == want:
        return array
    if is_float(want) and is_float(have):
        with np.errstate(over="ignore"):
            cast = array.astype(want)
        lost = int(np.count_nonzero(np.isfinite(array) & ~np.isfinite(cast)))
        if lost:
            raise _misfit(array, spec, where, f"{lost} values overflow {want}")
        return cast
    if want.kind in "iub" and have.kind in "iub":
        low, high = (0, 1) if want.kind == "b" else (np.iinfo(want).min, np.iinfo(want).max)
        if array.size and (int(array.min()) < low or int(array.max()) > high):
            raise _misfit(array, spec, where, f"values from {int(array.min())} to {int(array.max())}")
        return array.astype(want)
    if want.kind in "OUST" and have.kind in "OUST":
        return array.astype(want)
    raise _misfit(array, spec, where, None)


def _misfit(array: Array, spec: InputSpec, where: str, values: str | None) -> DataError:
    hint = None
    if values is None:
        hint = f"Convert the data explicitly: x.astype(np.{spec.dtype})."
        if array.dtype.kind in "OUST":
            hint = "To read files, pass the path of their folder; a list must hold the arrays themselves."
        if array.dtype == np.uint8 and is_float(spec.dtype):
            hint = (
                "Raw pixels are not what a float model was trained on. Normalise them as in training, "
                "or ask for image preprocessing (mean, std, scale)."
            )
    return DataError(
        f"A sample does not have the type of input '{spec.name}'",
        where=where,
        observed=f"{array.dtype}" + (f", {values}" if values else ""),
        expected=str(spec),
        hint=hint,
    )


def check_finite(array: Array, spec: InputSpec, where: str) -> None:
    """Refuse NaN and infinity, which would spoil every range measured behind them.

    Raises:
        DataError: with the count of each.
    """
    if not is_float(array.dtype) or bool(np.isfinite(array).all()):
        return
    nans = int(np.count_nonzero(np.isnan(array)))
    infs = int(np.count_nonzero(np.isinf(array)))
    raise DataError(
        f"A sample for input '{spec.name}' holds values that are not finite",
        where=where,
        observed=f"{nans} NaN and {infs} infinite of {array.size} values",
        expected="finite numbers",
        hint="Remove the sample, or look for a division by zero in its preprocessing.",
    )
