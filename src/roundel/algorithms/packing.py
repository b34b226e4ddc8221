"""Formats of tensors as plain words and arrays, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.types import Arrays, QParams, QType


def packed_params(params: Mapping[str, QParams]) -> tuple[list[list[Any]], Arrays]:
    """Formats as plain words, and scales and zero points as arrays, by their numbers."""
    words = [[name, p.qtype.value, p.axis] for name, p in params.items()]
    arrays: Arrays = {}
    for number, p in enumerate(params.values()):
        arrays |= {f"{number}.scale": np.asarray(p.scale), f"{number}.zero": np.asarray(p.zero_point)}
    return words, arrays


def unpacked_params(words: Sequence[Sequence[Any]], arrays: Mapping[str, NDArray[Any]]) -> dict[str, QParams]:
    """The inverse of `packed_params`."""
    return {
        name: QParams(arrays[f"{number}.scale"], arrays[f"{number}.zero"], QType(kind), axis)
        for number, (name, kind, axis) in enumerate(words)
    }
