"""The first samples can be looked at before the pass that needs all of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from roundel.data import open_samples
from roundel.errors import DataError
from roundel.types import InputSpec, Sample

SPEC = [InputSpec("x", np.dtype(np.float32), (1, 2))]


def stream(count: int, pulled: list[int] | None = None) -> Iterator[Sample]:
    """One array, filled anew for each sample, as some readers do."""
    array = np.zeros((1, 2), np.float32)
    for number in range(count):
        if pulled is not None:
            pulled.append(number)
        array[:] = number
        yield {"x": array}


def numbers(samples: object) -> list[float]:
    return [float(sample["x"][0, 0]) for sample in samples]  # type: ignore[attr-defined]


def test_data_that_is_read_once_loses_nothing() -> None:
    pulled: list[int] = []
    samples = open_samples(stream(5, pulled), SPEC)
    assert numbers(samples.first(2)) == [0, 1]
    assert pulled == [0, 1], "no more than asked for"
    assert numbers(samples) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="read only once"):
        iter(samples)


def test_asking_twice_and_for_more_than_there_is() -> None:
    samples = open_samples(stream(3), SPEC)
    assert numbers(samples.first(1)) == [0]
    assert numbers(samples.first(9)) == [0, 1, 2]
    assert numbers(samples) == [0, 1, 2]


def test_the_limit_counts_all() -> None:
    samples = open_samples(stream(9), SPEC, limit=4)
    assert numbers(samples.first(3)) == [0, 1, 2]
    assert numbers(samples) == [0, 1, 2, 3]
    assert samples.count == 4


def test_data_that_can_be_read_again() -> None:
    samples = open_samples([{"x": np.full((1, 2), n, np.float32)} for n in range(3)], SPEC)
    samples.first(2)
    assert numbers(samples) == numbers(samples) == [0, 1, 2]
