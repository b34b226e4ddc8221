from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from roundel.calibrate.collect import Collected
from roundel.calibrate.observers import (
    HistogramObserver,
    MinMaxObserver,
    Statistics,
    load_statistics,
    save_statistics,
)
from roundel.errors import DataError, OutputError


@pytest.fixture
def collected() -> Collected:
    a, b = MinMaxObserver(), HistogramObserver()
    for i in range(3):
        values = np.random.default_rng(i).standard_normal(500).astype(np.float32)
        a.update(values)
        b.update(values)
    stats = {"/conv.1/out": a, "weird name:0": b, "empty": HistogramObserver()}
    return Collected(stats, 3, [], [], "datakey", 1.0)


def told(statistics: Statistics) -> list[object]:
    """Everything that a file says."""
    found: list[object] = [statistics.model_key, statistics.data_key, statistics.samples_seen]
    for name, stat in statistics.stats.items():
        assert isinstance(stat, MinMaxObserver | HistogramObserver)
        found += [name, type(stat), stat.lows, stat.highs, stat.count]
        if isinstance(stat, HistogramObserver):
            found += [stat.histogram.exponent, stat.histogram.counts.tolist()]
    return found


def test_round_trip(tmp_path: Path, collected: Collected) -> None:
    path = tmp_path / "deep" / "stats.npz"
    save_statistics(path, collected, "modelkey")
    back = load_statistics(path)
    assert (back.model_key, back.data_key, back.samples_seen) == ("modelkey", "datakey", 3)
    assert list(back.stats) == list(collected.stats)
    for name, stat in collected.stats.items():
        again = back.stats[name]
        assert type(again) is type(stat)
        assert (again.lows, again.highs, again.count) == (stat.lows, stat.highs, stat.count)
        if isinstance(stat, HistogramObserver) and isinstance(again, HistogramObserver):
            assert again.histogram.exponent == stat.histogram.exponent
            assert np.array_equal(again.histogram.counts, stat.histogram.counts)
    assert [p.name for p in path.parent.iterdir()] == ["stats.npz"]


def test_an_existing_file_is_replaced(tmp_path: Path, collected: Collected) -> None:
    path = tmp_path / "s.npz"
    save_statistics(path, collected, "one")
    save_statistics(path, collected, "two")
    assert load_statistics(path).model_key == "two"


@pytest.mark.parametrize("cut", [0, 10, 200, -30])
def test_a_truncated_file_is_a_clear_error(tmp_path: Path, collected: Collected, cut: int) -> None:
    path = tmp_path / "s.npz"
    save_statistics(path, collected, "key")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match="not a statistics file"):
        load_statistics(path)


def test_every_flipped_byte_is_noticed_or_harmless(tmp_path: Path, collected: Collected) -> None:
    path = tmp_path / "s.npz"
    save_statistics(path, collected, "key")
    content, wanted = path.read_bytes(), told(load_statistics(path))
    noticed = 0
    places = range(0, len(content), 37)
    for at in places:
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        try:
            back = load_statistics(path)
        except DataError:
            noticed += 1
        else:
            assert told(back) == wanted, f"byte {at}"
    assert noticed > len(places) / 2


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04broken"])
def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a statistics file"):
        load_statistics(path)


def test_an_object_array_is_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, header=np.array([{"version": 1}], dtype=object))
    with pytest.raises(DataError, match="not a statistics file"):
        load_statistics(path)


def test_another_version(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, header=np.frombuffer(b'{"version": 99}', np.uint8))
    with pytest.raises(DataError, match="version") as caught:
        load_statistics(path)
    assert caught.value.observed == "99"


def test_a_missing_file_and_an_unwritable_place(tmp_path: Path, collected: Collected) -> None:
    with pytest.raises(DataError, match="not a statistics file"):
        load_statistics(tmp_path / "none.npz")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"):
        save_statistics(tmp_path / "file" / "s.npz", collected, "key")
