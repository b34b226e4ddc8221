"""Arrays that are pictures: which axes are height, width and colour, and back to pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from roundel.errors import OutputError

if TYPE_CHECKING:
    from PIL.Image import Image

_COLOURS = (1, 3, 4)
_LEAST_SIDE = 5  # a smaller plane is a table of numbers, whatever its rank


def planes(array: NDArray[Any]) -> NDArray[Any] | None:
    """(planes, height, width) of an array that holds pictures; None for one that does not.

    Rank 3 and up: the last two axes are height and width, or the two before a last axis of 1, 3 or 4
    colours. A matrix is rows of numbers, not a picture: models give [batch, classes].
    """
    if array.ndim < 3 or array.dtype.kind not in "fiub":
        return None
    first = array.ndim > 2 and array.shape[-3] in _COLOURS
    if array.shape[-1] in _COLOURS and not first:
        array = np.moveaxis(array, -1, -3)
    height, width = array.shape[-2:]
    if min(height, width) < _LEAST_SIDE:
        return None
    return array.reshape(-1, height, width)


def to_picture(array: NDArray[Any], what: str) -> Image:
    """One picture: floats in 0..1 become 0..255, integers stay; what lies outside is cut off.

    Raises:
        OutputError: the array is not one grey or colour picture.
    """
    import PIL.Image

    stack = planes(array)
    if stack is None or len(stack) not in (1, 3):
        raise OutputError(
            "An output is not a picture.",
            where=what,
            observed=f"{array.dtype} array of shape {list(array.shape)}",
            expected="[1, C, H, W], [1, H, W, C] or [H, W, C] with 1 or 3 colours",
            hint="Save arrays instead: leave out --images.",
        )
    if stack.dtype.kind == "f":
        stack = np.rint(np.nan_to_num(stack) * 255)
    pixels = np.clip(stack, 0, 255).astype(np.uint8)
    return PIL.Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1))
