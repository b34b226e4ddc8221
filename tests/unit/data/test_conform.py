"""One array against one input: type, shape, finite values."""

from __future__ import annotations

import numpy as np
import pytest

from roundel.data import open_samples
from roundel.errors import DataError
from roundel.types import InputSpec


def fed(array: object, dtype: str, shape: tuple[int | str | None, ...] | None) -> np.ndarray:
    (sample,) = open_samples([array], [InputSpec("x", np.dtype(dtype), shape)])
    return sample["x"]


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("float64", "float32"),
        ("float32", "float16"),
        ("float16", "float32"),
        ("int32", "int64"),
        ("int64", "int8"),
        ("uint8", "int32"),
        ("bool", "int64"),
        ("int64", "bool"),
        (">f4", "float32"),
    ],
)
def test_casts_that_keep_the_values(have: str, want: str) -> None:
    array = np.array([[0, 1]], dtype=have)
    result = fed(array, want, (1, 2))
    assert result.dtype == np.dtype(want)
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize(
    ("array", "want", "seen"),
    [
        (np.array([[0, 255]], np.uint8), "float32", "uint8"),
        (np.array([[0, 1]], np.int64), "float32", "int64"),
        (np.array([[0.0, 1.0]]), "int64", "float64"),
        (np.array([[0, 300]]), "int8", "values from 0 to 300"),
        (np.array([[-1, 3]]), "uint8", "values from -1 to 3"),
        (np.array([[0, 2]]), "bool", "values from 0 to 2"),
        (np.array([[1e6, 0.0]]), "float16", "1 values overflow float16"),
        (np.array([[1j, 0]]), "float32", "complex128"),
    ],
)
def test_casts_that_are_refused(array: np.ndarray, want: str, seen: str) -> None:
    with pytest.raises(DataError) as caught:
        fed(array, want, (1, 2))
    assert seen in str(caught.value)
    assert f"x: {want} [1, 2]" in str(caught.value)
    assert "sample 0" in str(caught.value)


def test_pixels_get_their_own_hint() -> None:
    with pytest.raises(DataError, match="image preprocessing"):
        fed(np.zeros((1, 2), np.uint8), "float32", (1, 2))


@pytest.mark.parametrize(
    ("shape", "wanted", "result"),
    [
        ((3, 4), (1, 3, 4), (1, 3, 4)),
        ((3, 4), ("N", 3, 4), (1, 3, 4)),
        ((7, 3, 4), (None, 3, 4), (7, 3, 4)),
        ((7, 9), ("N", "T"), (7, 9)),
        ((), (), ()),
        ((), (1,), (1,)),
        ((2, 2), None, (2, 2)),
        ((1, 0, 4), (1, "past", 4), (1, 0, 4)),
    ],
)
def test_shapes_that_fit(
    shape: tuple[int, ...], wanted: tuple[int | str | None, ...] | None, result: tuple[int, ...]
) -> None:
    assert fed(np.zeros(shape, np.float32), "float32", wanted).shape == result


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((5, 4), (1, 3, 4)),
        ((1, 3, 5), (1, 3, 4)),
        ((4,), (1, 3, 4)),
        ((1, 1, 3, 4), (1, 3, 4)),
        ((0, 4), ("N", 4)),
    ],
)
def test_shapes_that_do_not(shape: tuple[int, ...], wanted: tuple[int | str | None, ...]) -> None:
    with pytest.raises(DataError) as caught:
        fed(np.zeros(shape, np.float32), "float32", wanted)
    assert str(list(shape)) in str(caught.value)
    assert str(InputSpec("x", np.dtype("float32"), wanted)) in str(caught.value)


def test_swapped_layout_gets_a_hint() -> None:
    with pytest.raises(DataError, match="channels last"):
        fed(np.zeros((1, 8, 9, 3), np.float32), "float32", (1, 3, 8, 9))
    with pytest.raises(DataError, match="channels first"):
        fed(np.zeros((1, 3, 8, 9), np.float32), "float32", (1, 8, 9, 3))


def test_not_finite_names_input_sample_and_count() -> None:
    bad = np.array([[0.0, np.nan, np.inf, -np.inf]], np.float32)
    spec = [InputSpec("x", np.dtype("float32"), (1, 4))]
    walk = iter(open_samples([np.zeros((1, 4)), bad], spec))
    next(walk)
    with pytest.raises(DataError) as caught:
        next(walk)
    assert "input 'x'" in str(caught.value)
    assert "sample 1" in str(caught.value)
    assert "1 NaN and 2 infinite of 4" in str(caught.value)


def test_samples_are_in_c_order() -> None:
    assert fed(np.zeros((4, 3), np.float32).T, "float32", (3, 4)).flags.c_contiguous


def test_strings_pass() -> None:
    assert fed(np.array(["a", "b"]), "object", (2,)).tolist() == ["a", "b"]
