"""Plain values beside arrays: a JSON text as an array of bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray


def as_array(tree: Any) -> NDArray[np.uint8]:
    """Plain values as bytes; infinities and NaN survive."""
    return np.frombuffer(json.dumps(tree).encode(), np.uint8)


def as_tree(array: NDArray[Any]) -> Any:
    """The inverse of `as_array`."""
    return json.loads(array.tobytes())
