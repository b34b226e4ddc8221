"""float16 (IEEE half): rounded to nearest even, the same numbers as ONNX Runtime's Cast."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 65504.0
"""The largest finite float16."""


def to_float16(x: NDArray[Any], *, saturate: bool = False) -> NDArray[np.float16]:
    """The float16 nearest to each value.

    Args:
        x: real values.
        saturate: give the largest finite number where Cast gives infinity, as the Q of a float16 pair does.
    """
    work = np.asarray(x, np.float32)
    if saturate:
        work = np.clip(work, -LARGEST, LARGEST)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return work.astype(np.float16)


def round_float16(x: NDArray[Any], *, saturate: bool = False) -> NDArray[np.float32]:
    """Each value rounded to float16, as float32."""
    return to_float16(x, saturate=saturate).astype(np.float32)
