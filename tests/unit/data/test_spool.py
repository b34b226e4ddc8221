"""Arrays that are kept in memory or in a file give back what was put in."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from roundel.data.kept import KeptArrays, KeptSamples, Spool
from roundel.errors import OutputError


@pytest.mark.parametrize("room", [0, 100, 10**9])
def test_every_array_comes_back_from_wherever_it_lies(room: int) -> None:
    arrays = [
        np.arange(1000, dtype=np.float32).reshape(10, 100).T,
        np.array(3.5),
        np.zeros((0, 4), np.int64),
        np.arange(7, dtype=np.uint8),
        np.array([["a", "bc"]], dtype=object),
    ]
    spool = Spool(room)
    kept = KeptArrays(spool.keep(array) for array in arrays)
    for before, after in zip(arrays, kept, strict=True):
        assert before.dtype == after.dtype
        assert np.array_equal(before, after)
    assert kept.in_memory <= max(room, 16)
    assert np.array_equal(kept[1:][2], arrays[3])


def test_several_threads_put_and_look_at_once() -> None:
    spool = Spool(0)
    with ThreadPoolExecutor(4) as pool:
        kept = list(pool.map(lambda i: spool.keep(np.full(999, i)), range(64)))
        sums = list(pool.map(lambda one: int(one.get().sum()), kept))
    assert sums == [999 * i for i in range(64)]


def test_samples_are_a_list_with_slices_and_columns() -> None:
    samples = KeptSamples(({"x": np.full(5, i), "y": np.full(2, -i)} for i in range(6)), room=60)
    assert len(samples) == 6
    assert [int(s["x"][0]) for s in samples[2:4]] == [2, 3]
    assert [int(a[0]) for a in samples.column("y")] == [0, -1, -2, -3, -4, -5]
    assert int(samples[-1]["x"][0]) == 5


def test_no_place_for_a_file_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(OutputError, match="TMPDIR"):
        Spool(0).keep(np.ones(10))
