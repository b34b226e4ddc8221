"""Rows of the data against the batch that the model fixes; whole arrays as data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundel.data import open_samples
from roundel.errors import DataError
from roundel.types import InputSpec


def spec(*shape: int | str, name: str = "x") -> InputSpec:
    return InputSpec(name, np.dtype(np.float32), shape)


def rows(start: int, count: int) -> np.ndarray:
    return np.repeat(np.arange(start, start + count, dtype=np.float32)[:, None], 2, axis=1)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(1, 5))
def test_regrouping_keeps_every_row_in_order(sizes: list[int], batch: int) -> None:
    starts = np.cumsum([0, *sizes])
    data = [rows(int(s), n) for s, n in zip(starts, sizes, strict=False)]
    total = sum(sizes)
    samples = open_samples(data, [spec(batch, 2)])
    if total < batch:
        with pytest.raises(DataError, match="do not fill one batch"):
            list(samples)
        return
    got = [s["x"] for s in samples]
    assert all(g.shape == (batch, 2) for g in got)
    np.testing.assert_array_equal(np.concatenate(got), rows(0, total // batch * batch))
    assert ("leftover" in str(samples.description["notes"])) == bool(total % batch)


def test_waiting_rows_survive_a_reused_buffer() -> None:
    def stream() -> Iterator[np.ndarray]:
        buffer = np.empty((1, 2), np.float32)
        for value in range(4):
            buffer[:] = value
            yield buffer

    got = np.concatenate([s["x"] for s in open_samples(stream(), [spec(2, 2)])])
    np.testing.assert_array_equal(got, rows(0, 4))


def test_rows_must_agree_between_inputs() -> None:
    inputs = [spec(1, 2), spec(1, 2, name="y")]
    with pytest.raises(DataError, match="'x' has 2, 'y' has 3"):
        list(open_samples(iter([(rows(0, 2), rows(0, 3))]), inputs))


def test_an_input_without_batch_turns_regrouping_off() -> None:
    inputs = [spec(1, 2), InputSpec("k", np.dtype(np.float32), ())]
    assert len(list(open_samples([(rows(0, 1), np.float32(3))], inputs))) == 1
    with pytest.raises(DataError, match=r"\[2, 2\]"):
        list(open_samples([(rows(0, 2), np.float32(3))], inputs))


def test_a_state_beside_an_open_batch_is_fed_as_it_is() -> None:
    inputs = [spec("N", 2), spec(64, name="table")]
    item = {"x": rows(0, 3), "table": np.zeros(64, np.float32)}
    (sample,) = open_samples([item], inputs)
    assert (sample["x"].shape, sample["table"].shape) == ((3, 2), (64,))


@pytest.mark.parametrize("batch", [1, "N"])
def test_array_is_samples_along_the_first_axis(batch: int | str) -> None:
    data = rows(0, 5)
    samples = open_samples(data, [spec(batch, 2)])
    assert samples.count == 5
    got = [s["x"] for s in samples]
    assert [g.shape for g in got] == [(1, 2)] * 5
    np.testing.assert_array_equal(np.concatenate(got), data)


def test_array_with_a_batch_axis_per_sample() -> None:
    assert [s["x"].shape for s in open_samples(rows(0, 6).reshape(3, 2, 2), [spec("N", 2)])] == [(2, 2)] * 3


def test_array_that_is_one_sample() -> None:
    assert [s["x"].shape for s in open_samples(np.zeros(2, np.float32), [spec("N", 2)])] == [(1, 2)]
    assert [s["x"].shape for s in open_samples(np.zeros(7, np.float32), [spec(7)])] == [(7,)]


def test_array_is_chunked_for_a_fixed_batch() -> None:
    samples = open_samples(rows(0, 7), [spec(3, 2)])
    assert samples.count == 2
    assert [s["x"].shape for s in samples] == [(3, 2)] * 2
    assert samples.description["notes"] == ["1 leftover rows dropped: the model's batch is 3"]


def test_dict_and_tuple_of_stacked_arrays() -> None:
    inputs = [spec("N", 2), spec("N", 2, name="y")]
    x, y = rows(0, 3), rows(10, 3)
    for data in ({"y": y, "x": x}, (x, y), [x, y], {"x": x, "y": y, "label": np.arange(3)}):
        got = list(open_samples(data, inputs))
        assert len(got) == 3
        np.testing.assert_array_equal(got[2]["y"], y[2:])


def test_stacked_arrays_of_different_length() -> None:
    with pytest.raises(DataError, match="'x' has 3, 'y' has 2"):
        open_samples({"x": rows(0, 3), "y": rows(0, 2)}, [spec("N", 2), spec("N", 2, name="y")])


def test_array_of_wrong_rank() -> None:
    with pytest.raises(DataError) as caught:
        open_samples(np.zeros((1, 1, 1, 2), np.float32), [spec("N", 2)])
    assert "[1, 1, 1, 2]" in str(caught.value)
    assert "x: float32 [N, 2]" in str(caught.value)


def test_input_of_unknown_rank() -> None:
    got = list(open_samples(rows(0, 3), [InputSpec("x", np.dtype(np.float32), None)]))
    assert [g["x"].shape for g in got] == [(1, 2)] * 3
