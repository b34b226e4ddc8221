"""Work in other processes and on a Ray cluster: the same bits, whoever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from PIL import Image
from typer.testing import CliRunner

import roundel
from executor_tasks import Killer, Number, Squares, children
from finetune_cases import conv_net, pictures
from helpers import normal
from roundel.calibrate.collect import Collected, collect
from roundel.calibrate.observers import StatKind
from roundel.cli.app import app
from roundel.data import shards as shard_sizes
from roundel.errors import DataError, DependencyError, ExecutorError, RecipeError
from roundel.model import load_model
from roundel.model.graph import is_constant, is_float32, iter_values
from roundel.types import Sample
from roundel.work.executors import Executor, Work, executor, mapped

_SAMPLES = 43  # five shards and a part of one


@pytest.fixture(scope="module")
def net() -> ir.Model:
    return load_model(conv_net()).model


@pytest.fixture(scope="module")
def requests(net: ir.Model) -> dict[str, StatKind]:
    """Every kind of statistic, in turn."""
    names = [str(v.name) for v in iter_values(net.graph) if is_float32(v) and not is_constant(v)]
    kinds = list(StatKind)
    return {name: kinds[place % len(kinds)] for place, name in enumerate(names)}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Ranges grow on the way, so that histograms must widen while they are merged."""
    return [{"x": sample["x"] * (1 + place / 7)} for place, sample in enumerate(pictures(_SAMPLES))]


@pytest.fixture(scope="module")
def alone(net: ir.Model, requests: dict[str, StatKind], samples: list[Sample]) -> Collected:
    return collect(net, requests, samples, keep=11)


@pytest.fixture(scope="module")
def ray() -> Iterator[Executor]:
    module = pytest.importorskip("ray")
    yield executor("ray", workers=2)
    module.shutdown()


def same(found: Collected, expected: Collected) -> None:
    """To the bit, all of it."""
    assert list(found.stats) == list(expected.stats)
    for name, observer in expected.stats.items():
        state = found.stats[name].state()
        for key, array in observer.state().items():
            assert array.dtype == state[key].dtype
            np.testing.assert_array_equal(array, state[key], err_msg=f"{name} {key}")
    assert (found.samples_seen, found.data_digest) == (expected.samples_seen, expected.data_digest)
    for ours, theirs in ((found.inputs, expected.inputs), (found.outputs, expected.outputs)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_processes_merge_to_the_same_bits(
    net: ir.Model, requests: dict[str, StatKind], samples: list[Sample], alone: Collected, workers: int
) -> None:
    told: list[int] = []
    work = Work(executor("processes", workers=workers))
    same(collect(net, requests, samples, keep=11, progress=told.append, work=work), alone)
    assert told == [8, 16, 24, 32, 40, 43]
    assert not children(os.getpid(), "roundel.work.worker"), "no worker is left behind"


def test_a_process_that_dies_changes_nothing(
    net: ir.Model, requests: dict[str, StatKind], samples: list[Sample]
) -> None:
    killed: list[int] = []

    def kill_one(done: int) -> None:
        if not killed:
            victim = children(os.getpid(), "roundel.work.worker")[0]
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    many, work = samples * 6, Work(executor("processes", workers=2))
    same(
        collect(net, requests, many, keep=11, progress=kill_one, work=work),
        collect(net, requests, many, keep=11),
    )
    assert killed, "a worker was killed in the middle of the run"


def test_ray_merges_to_the_same_bits_also_when_a_worker_is_killed(
    net: ir.Model, requests: dict[str, StatKind], samples: list[Sample], alone: Collected, ray: Executor
) -> None:
    same(collect(net, requests, samples, keep=11, work=Work(ray)), alone)
    from ray._private import worker

    # Only this cluster's own workers, and only while they work.
    raylet = worker._global_node.all_processes["raylet"][0].process.pid
    killer = Killer(lambda: children(raylet, "ray::_work"))
    killer.start()
    many = samples * 6
    killer.begin(0)
    same(
        collect(net, requests, many, keep=11, work=Work(ray)),
        collect(net, requests, many, keep=11),
    )
    killer.join()
    assert killer.killed is not None, "a worker was killed in the middle of its work"


def test_whole_files_are_the_same(tmp_path: Path, ray: Executor) -> None:
    model, data = tmp_path / "net.onnx", pictures(20)
    onnx.save(conv_net(), model)
    made = {}
    for name, where in (("alone", None), ("processes", executor("processes", workers=2)), ("ray", ray)):
        out = tmp_path / f"{name}.onnx"
        roundel.quantize(model, out, recipe="xint8", data=data, executor=where)
        made[name] = out.read_bytes()
    assert made["processes"] == made["alone"]
    assert made["ray"] == made["alone"]


def test_all_commands_share_their_work(tmp_path: Path, ray: Executor) -> None:
    model, quantized, data = tmp_path / "net.onnx", tmp_path / "q.onnx", pictures(20)
    onnx.save(conv_net(), model)
    roundel.quantize(model, quantized, recipe="xint8_plain", data=data)

    def figures(where: Executor | None) -> list[object]:
        compared = roundel.compare(model, quantized, data, executor=where).to_dict()
        scores = [s.to_dict() for s in roundel.evaluate_models([model, quantized], data, executor=where)]
        ranked = roundel.sensitivity(model, recipe="xint8_plain", data=data, executor=where).to_dict()
        return [{k: v for k, v in tree.items() if k != "seconds"} for tree in (compared, *scores, ranked)]

    expected = figures(None)
    assert figures(ray) == expected
    assert figures(executor("local", workers=1)) == expected


def test_parts_come_in_order_and_errors_as_they_were() -> None:
    for name in ("local", "processes"):
        work = Work(executor(name, workers=2))
        found = list(mapped(work, Squares(), map(Number, range(9))))
        assert [(part.number, int(arrays["square"])) for part, arrays in found] == [
            (number, number**2) for number in range(9)
        ]
        with pytest.raises(DataError, match="refused") as raised:
            list(mapped(work, Squares(refused=4), map(Number, range(9))))
        assert raised.value.where == "part 4"


@pytest.mark.parametrize(("deaths", "survives"), [(1, True), (3, True), (4, False)])
def test_a_part_runs_again_but_not_for_ever(tmp_path: Path, deaths: int, survives: bool) -> None:
    for token in range(deaths):
        (tmp_path / str(token)).touch()
    work = Work(executor("processes", workers=2))
    parts = map(Number, range(6))
    if survives:
        found = [int(a["square"]) for _, a in mapped(work, Squares(tmp_path, deadly=3), parts)]
        assert found == [0, 1, 4, 9, 16, 25]
    else:
        with pytest.raises(ExecutorError, match="again and again") as raised:
            list(mapped(work, Squares(tmp_path, deadly=3), parts))
        assert raised.value.where == "part 3"


def test_a_bad_sample_is_named_as_in_one_process(
    net: ir.Model, requests: dict[str, StatKind], samples: list[Sample]
) -> None:
    spoiled = [dict(sample) for sample in samples]
    spoiled[19] = {"x": np.full_like(spoiled[19]["x"], 3e38)}
    seen = []
    for work in (None, Work(executor("processes", workers=2))):
        with pytest.raises(DataError, match="during calibration") as raised:
            collect(net, requests, spoiled, work=work)
        seen.append(str(raised.value))
    assert "sample 19" in seen[0]
    assert seen[0] == seen[1]


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", x=normal(12, *pictures(1)[0]["x"].shape[1:]))
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent(
            """
            import roundel
            where = roundel.executor("processes", workers=2)
            done = roundel.quantize("net.onnx", "q.onnx", data="x.npz", executor=where)
            print(done.record.data["samples_seen"])
            """
        )
    )
    # A file of a library's name in the current folder is not what workers import.
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong one')")
    command = [sys.executable, "-P", str(script)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["12"], run.stderr
    assert (tmp_path / "q.onnx").exists()


def test_wrong_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="no executor 'rey'") as raised:
        executor("rey")
    assert "ray" in str(raised.value.hint)
    with pytest.raises(RecipeError, match="address is for Ray"):
        executor("processes", address="auto")
    with pytest.raises(RecipeError, match="too few workers"):
        executor("processes", workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match="Ray is not installed") as missing:
        executor("ray").start(Squares())
    assert "roundel[ray]" in str(missing.value.hint)


def test_the_command_line(tmp_path: Path) -> None:
    model, out = tmp_path / "net.onnx", tmp_path / "q.onnx"
    onnx.save(conv_net(), model)
    words = ["quantize", str(model), "-o", str(out), "--random", "9", "-q", "--workers", "2"]
    done = CliRunner().invoke(app, [*words, "--executor", "processes"])
    assert done.exit_code == 0, done.output
    expected = roundel.quantize(model, data=roundel.RandomData(9))
    assert onnx.load(out) == expected.model
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, RecipeError)
    assert "need an executor" in str(refused.exception)


def test_workers_read_images_themselves(tmp_path: Path, ray: Executor) -> None:
    """All that is known of the data is as if one process had read it: digest, profile, notes, samples."""
    model, folder = tmp_path / "net.onnx", tmp_path / "images"
    onnx.save(conv_net(), model)
    folder.mkdir()
    for place in range(19):
        pixels = np.random.default_rng(place).integers(0, 256, (8, 8, 3)).astype(np.uint8)
        pixels = np.full_like(pixels, 7) if place in (3, 17) else pixels
        Image.fromarray(pixels).save(folder / f"{place}.png")
    (tmp_path / "twice.png").write_bytes((folder / "0.png").read_bytes())
    (tmp_path / "twice.png").rename(folder / "20.png")

    def made(**where: Any) -> list[object]:
        done = roundel.quantize(model, recipe="xint8_plain", data=folder, samples=18, **where)
        facts = {k: v for k, v in done.record.data.items() if k != "forward_seconds"}
        compared = roundel.compare(model, done.model, folder, **where).to_dict()
        return [done.model, facts, done.record.notes, {k: v for k, v in compared.items() if k != "seconds"}]

    expected = made()
    assert any("hold one value only" in note for note in expected[2])
    assert made(executor=executor("processes", workers=2)) == expected
    assert made(executor=ray) == expected
    assert made(checkpoint=tmp_path / "a") == expected
    place: dict[str, Any] = {"checkpoint": tmp_path / "b", "resume": True}
    roundel.quantize(model, recipe="xint8_plain", data=folder, **place)
    os.utime(folder / "5.png")
    with pytest.raises(DataError, match="another run") as raised:
        roundel.quantize(model, recipe="xint8_plain", data=folder, **place)
    assert raised.value.observed == "another set of samples"


def test_many_samples_make_long_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (shard_sizes.long_shard(100), shard_sizes.long_shard(16384)) == (8, 8)
    assert shard_sizes.long_shard(1_000_000) == 496
    folder = tmp_path / "images"
    folder.mkdir()
    for place in range(37):
        pixels = np.random.default_rng(place).integers(0, 256, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{place}.png")
    expected = roundel.quantize(conv_net(), recipe="xint8_plain", data=folder)
    monkeypatch.setattr(shard_sizes, "_MOST", 2)
    where = executor("processes", workers=2)
    memory = tmp_path / "memory"
    made = roundel.quantize(conv_net(), recipe="xint8_plain", data=folder, executor=where, checkpoint=memory)
    assert len(list(memory.iterdir())) == 2
    assert made.model == expected.model
    for name in ("digest", "inputs", "samples_seen"):
        assert made.record.data[name] == expected.record.data[name]
