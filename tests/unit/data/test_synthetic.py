"""Random samples: only when asked for, repeatable, and labelled."""

from __future__ import annotations

import numpy as np
import pytest

from roundel.data import RandomSpec, open_samples
from roundel.errors import DataError
from roundel.recipe.settings import Data
from roundel.types import InputSpec

INPUTS = [
    InputSpec("image", np.dtype(np.float32), ("N", 3, None, None)),
    InputSpec("last", np.dtype(np.float16), ("N", "h", "w", 3)),
    InputSpec("ids", np.dtype(np.int64), ("N", "seq")),
    InputSpec("mask", np.dtype(np.bool_), ("N", 1, "seq")),
    InputSpec("pixels", np.dtype(np.uint8), (64,)),
    InputSpec("cache", np.dtype(np.float32), ("N", 12, "past", 64)),
]


def test_shapes_types_and_values() -> None:
    samples = open_samples(RandomSpec(count=2), INPUTS)
    assert samples.count == 2
    for sample in samples:
        assert {name: a.shape for name, a in sample.items()} == {
            "image": (1, 3, 224, 224),
            "last": (1, 224, 224, 3),
            "ids": (1, 16),
            "mask": (1, 1, 16),
            "pixels": (64,),
            "cache": (1, 12, 1, 64),
        }
        assert all(sample[i.name].dtype == i.dtype for i in INPUTS)
        assert 0 <= sample["image"].min() < sample["image"].max() <= 1
        assert 0 <= sample["ids"].min() < sample["ids"].max() < 100
    assert samples.description["random"] is True
    assert samples.description["kind"] == "random data"


def test_passes_and_seeds() -> None:
    def draw(seed: int) -> np.ndarray:
        return np.stack([s["ids"] for s in open_samples(RandomSpec(3, seed), INPUTS)])

    np.testing.assert_array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))
    samples = open_samples(RandomSpec(2), INPUTS[:1])
    first, second = (next(iter(samples))["image"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_ranges_and_shapes() -> None:
    spec = RandomSpec(
        1, ranges={"image": (-2, -1), "ids": (5, 6)}, shapes={"ids": (2, 7), "image": (2, 3, 8, 8)}
    )
    (sample,) = open_samples(spec, [INPUTS[0], INPUTS[2]])
    assert sample["image"].shape == (2, 3, 8, 8)
    assert -2 <= sample["image"].min() <= sample["image"].max() < -1
    assert (sample["ids"] == 5).all()
    assert sample["ids"].shape == (2, 7)


def test_symbols_follow_a_given_shape() -> None:
    (sample,) = open_samples(RandomSpec(1, shapes={"mask": (1, 1, 9)}), INPUTS[2:4])
    assert sample["ids"].shape == (1, 9)


def test_fixed_batch_counts_samples() -> None:
    samples = open_samples(RandomSpec(3), [InputSpec("x", np.dtype(np.float32), (4, 2))], limit=2)
    assert samples.count == 2
    assert [s["x"].shape for s in samples] == [(4, 2)] * 2


def test_requests_that_are_refused() -> None:
    with pytest.raises(DataError, match="Did you mean 'image'"):
        open_samples(RandomSpec(ranges={"imag": (0, 1)}), INPUTS)
    with pytest.raises(DataError, match="empty"):
        open_samples(RandomSpec(ranges={"ids": (1, 1)}), INPUTS)
    with pytest.raises(DataError, match="too small"):
        open_samples(RandomSpec(0), INPUTS)
    with pytest.raises(DataError, match="need a shape"):
        open_samples(RandomSpec(), [InputSpec("x", np.dtype(np.float32), None)])
    with pytest.raises(DataError, match="cannot be made"):
        list(open_samples(RandomSpec(), [InputSpec("x", np.dtype(object), (1,))]))
    with pytest.raises(DataError, match="together with"):
        open_samples(RandomSpec(), INPUTS, images=Data())
    with pytest.raises(DataError, match=r"\[1, 3, 8, 8, 8\]"):
        list(open_samples(RandomSpec(shapes={"image": (1, 3, 8, 8, 8)}), INPUTS[:1]))


def test_real_data_are_not_random() -> None:
    assert open_samples(np.zeros((2, 16), np.int64), INPUTS[2:3]).description["random"] is False
