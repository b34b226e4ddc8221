"""Calibration data that do not fit, break off, or are not numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from helpers import build, node
from roundel.errors import DataError


def one(**arrays: Any) -> list[dict[str, Any]]:
    return [arrays]


def test_a_wrong_input_name(refused: Any, model: Path) -> None:
    error = refused(model, DataError, data=one(X=np.zeros((1, 3, 8, 8), np.float32)))
    assert "'x'" in error.what
    assert error.where == "sample 0"
    assert "'X'" in error.observed
    assert "'x'" in error.expected


def test_a_wrong_shape(refused: Any, model: Path) -> None:
    error = refused(model, DataError, data=one(x=np.zeros((1, 8, 8, 3), np.float32)))
    assert "shape of input 'x'" in error.what
    assert "[1, 8, 8, 3]" in error.observed
    assert "[n, 3, 8, 8]" in error.expected
    assert "transpose" in error.hint


def test_a_wrong_dtype(refused: Any, model: Path) -> None:
    error = refused(model, DataError, data=one(x=np.zeros((1, 3, 8, 8), np.int64)))
    assert "type of input 'x'" in error.what
    assert error.observed == "int64"
    assert "float32" in error.expected
    assert "astype(np.float32)" in error.hint


def test_raw_pixels_in_a_float_input(refused: Any, model: Path) -> None:
    error = refused(model, DataError, data=one(x=np.zeros((1, 3, 8, 8), np.uint8)))
    assert "pixels" in error.hint


def test_no_data_at_all(refused: Any, model: Path) -> None:
    error = refused(model, DataError, data=None)
    assert "needs calibration data" in error.what
    assert "--data" in error.hint
    assert "--random" in error.hint


@pytest.mark.parametrize("empty", [[], iter(()), np.zeros((0, 3, 8, 8), np.float32)], ids=type)
def test_data_without_samples(refused: Any, model: Path, empty: Any) -> None:
    error = refused(model, DataError, data=empty)
    assert error.what == "The calibration data are empty"
    assert "x: float32 [n, 3, 8, 8]" in str(error)


class Reader:
    """Shaped like ONNX Runtime's CalibrationDataReader."""

    def __init__(self, samples: list[Any], fail_at: int | None = None) -> None:
        self.samples, self.fail_at, self.at = samples, fail_at, 0

    def get_next(self) -> Any:
        if self.at == self.fail_at:
            raise ConnectionError("the disk went away")
        if self.at == len(self.samples):
            return None
        self.at += 1
        return self.samples[self.at - 1]


def test_an_empty_reader(refused: Any, model: Path) -> None:
    error = refused(model, DataError, data=Reader([]))
    assert "empty" in error.what
    assert "reader Reader" in error.where


def test_a_reader_that_fails_half_way(refused: Any, model: Path, samples: list[Any]) -> None:
    error = refused(model, DataError, data=Reader(samples, fail_at=2))
    assert "failed" in error.what
    assert error.where == "sample 2 of reader Reader"
    assert error.observed == "ConnectionError: the disk went away"
    assert isinstance(error.__cause__, ConnectionError)


def test_a_generator_that_fails_half_way(refused: Any, model: Path, samples: list[Any]) -> None:
    def broken() -> Iterator[Any]:
        yield samples[0]
        raise RuntimeError("no more")

    error = refused(model, DataError, data=broken())
    assert "sample 1" in error.where
    assert error.observed == "RuntimeError: no more"


@pytest.mark.parametrize(("bad", "counted"), [(np.nan, "1 NaN and 0"), (-np.inf, "0 NaN and 1")])
def test_nan_and_infinity_in_the_data(
    refused: Any, model: Path, samples: list[Any], bad: float, counted: str
) -> None:
    samples[1]["x"][0, 0, 0, 0] = bad
    error = refused(model, DataError, data=samples)
    assert "input 'x'" in error.what
    assert "not finite" in error.what
    assert error.where == "sample 1"
    assert counted in error.observed


def test_nan_that_arises_inside_the_model_names_the_tensor(refused: Any, tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Sqrt", ["c"], ["root"], name="root_of_negatives"),
        node("Conv", ["root", "w"], ["y"], name="next"),
    ]
    path = tmp_path / "nan.onnx"
    onnx.save(build(nodes, {"x": [1, 1, 4, 4]}, ["y"], {"w": np.ones((1, 1, 1, 1), np.float32)}), path)
    data = one(x=np.full((1, 1, 4, 4), -1, np.float32))
    error = refused(path, DataError, data=data)
    assert "NaN" in error.what
    assert "root" in str(error.where)
    assert "sample 0" in str(error)


def test_a_pickled_array_is_never_loaded(refused: Any, model: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "a.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    error = refused(model, DataError, data=folder)
    assert "pickled" in error.what
    assert "a.npy" in error.where
    assert not (tmp_path / "owned").exists()


def test_a_damaged_array_file(refused: Any, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "a.npy", np.zeros((1, 3, 8, 8), np.float32))
    content = (folder / "a.npy").read_bytes()
    (folder / "a.npy").write_bytes(content[:200])
    error = refused(model, DataError, data=folder)
    assert "a.npy" in str(error)


def test_data_that_do_not_exist(refused: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "calibration").mkdir()
    error = refused(model, DataError, data=tmp_path / "calibratoin")
    assert "'calibration'" in error.hint


def test_data_of_no_kind(refused: Any, model: Path) -> None:
    error = refused(model, DataError, data=42)
    assert "type int" in error.observed
    assert "get_next()" in error.expected


def test_an_interrupt_in_the_reader_passes_through(
    model: Path, output: Path, samples: list[Any], untouched: None
) -> None:
    def interrupted() -> Iterator[Any]:
        yield samples[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roundel.quantize(model, output, data=interrupted())


def test_a_damaged_statistics_file_is_not_overwritten(refused: Any, model: Path, tmp_path: Path) -> None:
    stats = tmp_path / "stats.npz"
    stats.write_bytes(b"not an archive")
    error = refused(model, DataError, stats=stats)
    assert "not a statistics file" in error.what
    assert "another file name" in error.hint
    assert "elete" not in str(error)
