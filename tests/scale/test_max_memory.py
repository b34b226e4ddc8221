"""With little memory: the same file, within the limit, or an error that names the least that will do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import roundel
from helpers import build, feeds, node, normal
from roundel import pipeline
from roundel.cli.app import app
from roundel.errors import RecipeError
from roundel.model.memory import Budget, parse_size, show_size

SMALL = {"x": [1, 3, 8, 8]}
LARGE = {"x": [1, 16, 160, 160]}

_RUN = """
import json, re, sys
import numpy as np
import roundel
rng = np.random.default_rng(1)
data = [{"x": rng.standard_normal((1, 16, 160, 160), dtype=np.float32)} for _ in range(4)]
options = json.loads(sys.argv[2])
roundel.quantize(sys.argv[1], recipe="xint8", effort="none", data=data, **options)
# Not ru_maxrss: a child process starts with its parent's.
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""


def small() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="first", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "v"], ["y"], name="second"),
    ]
    return build(nodes, SMALL, ["y"], {"w": normal(8, 3, 3, 3), "v": normal(4, 8, 1, 1, seed=1)})


def large() -> onnx.ModelProto:
    """Few weights and much activation: 6.5 MB in each of 24 tensors."""
    nodes, constants, current = [], {}, "x"
    for i in range(12):
        constants[f"w{i}"] = normal(64, 16 if i == 0 else 64, 1, 1, seed=i, scale=0.15)
        nodes.append(node("Conv", [current, f"w{i}"], [f"c{i}"], name=f"conv{i}"))
        nodes.append(node("Sigmoid", [f"c{i}"], [f"r{i}"], name=f"sigmoid{i}"))
        current = f"r{i}"
    nodes.append(node("GlobalAveragePool", [current], ["y"], name="pool"))
    return build(nodes, LARGE, ["y"], constants)


@pytest.mark.parametrize(("recipe", "effort"), [("xint8", "none"), ("xint8", "fast"), ("a8w8", "fast")])
def test_the_same_file_whatever_lies_in_memory(
    monkeypatch: pytest.MonkeyPatch, recipe: str, effort: str
) -> None:
    data = feeds(SMALL, count=12)
    usual = roundel.quantize(small(), recipe=recipe, data=data, effort=effort)
    tight = Budget(live=1, held=0)
    monkeypatch.setattr(pipeline, "run_budget", lambda *_: tight)
    spilled = roundel.quantize(small(), recipe=recipe, data=data, effort=effort)
    assert usual.model.SerializeToString() == spilled.model.SerializeToString()


def test_without_copies_of_the_weights_the_result_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    data = feeds(SMALL, count=12)
    usual = roundel.quantize(small(), recipe="xint8", data=data)
    monkeypatch.setattr(pipeline, "run_budget", lambda *_: Budget(lean=0))
    lean = roundel.quantize(small(), recipe="xint8", data=data)
    assert lean.record.outputs[0].sqnr_db == pytest.approx(usual.record.outputs[0].sqnr_db, abs=1.0)


def peak(model: Path, **options: Any) -> int:
    command = [sys.executable, "-c", _RUN, str(model), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory in kilobytes")
def test_the_limit_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    onnx.save(large(), path)
    free = peak(path)
    limit = free - 60_000_000
    assert peak(path, max_memory=limit) <= limit


def test_too_little_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(RecipeError, match="more memory than it may take") as caught:
        roundel.quantize(small(), recipe="xint8", data=feeds(SMALL), max_memory="10M")
    least = re.search(r"([\d.]+[MG]) or more", str(caught.value))
    assert least is not None
    roundel.quantize(small(), recipe="xint8", data=feeds(SMALL), max_memory=parse_size(least[1]) + 30_000_000)


def test_a_forecast_grows_with_the_work_and_its_memory_does_not() -> None:
    few, many, high = (
        roundel.forecast(large(), recipe="xint8", samples=count, data=feeds(LARGE, count=3), effort=effort)
        for count, effort in ((1, "none"), (3, "none"), (3, "high"))
    )
    assert 0 < few.seconds < many.seconds < high.seconds
    assert abs(few.memory - many.memory) < 50_000_000
    assert few.least <= few.memory
    assert high.temporary > many.temporary
    assert not few.timed
    assert high.timed
    assert high.long


def test_the_command_says_what_to_expect_and_keeps_the_sample_it_timed(tmp_path: Path) -> None:
    onnx.save(small(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.concatenate([feed["x"] for feed in feeds(SMALL, count=6)]))
    words = ["quantize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), "--data"]
    words += [str(tmp_path / "x.npy"), "--max-memory", "8G", "--effort", "none"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "forecast: about 1 s for 6 samples" in done.stderr
    record = json.loads((tmp_path / "q.json").read_text())
    assert record["data"]["samples_seen"] == 6


@pytest.mark.parametrize(
    ("text", "size"),
    [("2G", 2 * 10**9), ("512M", 512 * 10**6), ("1.5GiB", 3 * 2**29), (7, 7), ("1 kB", 1000)],
)
def test_sizes_in_words(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "two", "2X", "-1G", "ib", "1iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="size of memory"):
        parse_size(text)


@pytest.mark.parametrize("size", [1, 999_999, 12_345_678, 1_999_999_999, 2**40])
def test_a_shown_size_is_enough(size: int) -> None:
    assert size <= parse_size(show_size(size)) <= size * 1.11 + 1000
