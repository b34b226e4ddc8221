"""The embedded example from data to file, by every road: the same bytes at the end."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader

import roundel
from helpers import assert_sound
from roundel.errors import DataError
from roundel.example import Example, load_example
from roundel.model.session import open_session
from roundel.recipe.load import preset_names

COUNT = 12


@pytest.fixture(scope="module")
def example() -> Example:
    return load_example()


@pytest.fixture(scope="module")
def expected(example: Example) -> bytes:
    """What a list of dicts gives."""
    return bytes(quantized(example, example.calibration[:COUNT]).model.SerializeToString())


def quantized(example: Example, data: Any, **options: Any) -> Any:
    return roundel.quantize(example.model_path, data=data, **options)


class Reader(CalibrationDataReader):
    """As users of ONNX Runtime and Quark write them."""

    def __init__(self, samples: list[dict[str, np.ndarray]]) -> None:
        self.left = iter(samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)


def test_a_calibration_data_reader(example: Example, expected: bytes) -> None:
    result = quantized(example, Reader(example.calibration[:COUNT]))
    assert result.model.SerializeToString() == expected
    assert result.record.data["kind"] == "reader Reader"


def test_a_generator(example: Example, expected: bytes) -> None:
    def samples() -> Iterator[Any]:
        for sample in example.calibration[:COUNT]:
            yield {"image": sample["image"].copy()}

    assert quantized(example, samples()).model.SerializeToString() == expected


def test_a_generator_that_reuses_its_array(example: Example, expected: bytes) -> None:
    def samples() -> Iterator[Any]:
        buffer = np.empty((1, 1, 16, 16), np.float32)
        for sample in example.calibration[:COUNT]:
            buffer[:] = sample["image"]
            yield {"image": buffer}

    assert quantized(example, samples()).model.SerializeToString() == expected


def test_one_array(example: Example, expected: bytes) -> None:
    stacked = np.concatenate([sample["image"] for sample in example.calibration[:COUNT]])
    assert quantized(example, stacked).model.SerializeToString() == expected
    assert quantized(example, {"image": stacked}).model.SerializeToString() == expected


def test_more_data_than_samples(example: Example, expected: bytes) -> None:
    assert quantized(example, example.calibration, samples=COUNT).model.SerializeToString() == expected


def test_a_data_loader(example: Example, expected: bytes) -> None:
    torch = pytest.importorskip("torch")
    images = torch.from_numpy(np.concatenate([s["image"] for s in example.calibration[:COUNT]]))
    labels = torch.zeros(COUNT)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=1)
    result = quantized(example, loader)
    assert result.model.SerializeToString() == expected
    assert any("label" in note for note in result.record.data["notes"])


@pytest.mark.parametrize("preset", ["a8w8", "u8s8_aaws"])
def test_python_and_the_command_write_the_same_bytes(example: Example, tmp_path: Path, preset: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for index, sample in enumerate(example.calibration[:COUNT]):
        np.save(folder / f"{index:03}.npy", sample["image"])
    python, command = tmp_path / "python.onnx", tmp_path / "command.onnx"
    roundel.quantize(example.model_path, python, recipe=preset, data=folder, exclude=["classifier"])
    arguments = ["-o", str(command), "-p", preset.upper(), "--data", str(folder), "-x", "classifier"]
    subprocess.run(
        [sys.executable, "-m", "roundel", "quantize", str(example.model_path), *arguments, "--quiet"],
        check=True,
    )
    assert python.read_bytes() == command.read_bytes()
    one, other = (json.loads(p.with_suffix(".json").read_text()) for p in (python, command))
    for record in (one, other):
        del record["seconds"], record["data"]["forward_seconds"], record["file"]
        assert record["verdict"].pop("next")  # names the file
        for step in record["improvements"]:
            for timed in (step, *step["layers"]):
                del timed["seconds"]
    assert one == other


# One of the block formats stands for all where tuning takes its time.
REPEATED = [n for n in preset_names() if n == "mx9_adaquant" or not re.match("(mx|bfp).*_adaquant", n)]


@pytest.mark.parametrize("preset", REPEATED)
def test_every_preset_repeats_itself_and_stays_accurate(
    example: Example, tmp_path: Path, preset: str
) -> None:
    recipe, data = roundel.load_recipe(preset), example.calibration
    if recipe.finetuning != "none":
        pytest.importorskip("torch")
        # Enough to tell whether it repeats itself.
        recipe, data = recipe.merged({"improve": {"finetune": {"iterations": 10}}}), data[:16]
    one, other = tmp_path / "one.onnx", tmp_path / "other.onnx"
    result = roundel.quantize(example.model_path, one, recipe=recipe, data=data)
    roundel.quantize(example.model_path, other, recipe=recipe, data=data)
    assert one.read_bytes() == other.read_bytes()
    assert_sound(onnx.load(example.model_path), onnx.load(one))
    logits = open_session(one, simulate=True).run(None, {"image": example.eval_x})[0]
    accuracy = float((logits.argmax(1) == example.eval_y).mean())
    # The float model has 99.3 %. Its depthwise weights are made to be hard for one scale per tensor.
    # Four bits without any tuning are too few for it; guessing would give a tenth.
    assert accuracy > (0.15 if preset in ("mx4", "mxfp4e2m1") else 0.94)
    assert result.record.quantized
    if recipe.weights.type in ("int8", "uint8"):  # others keep float32 in the file
        assert one.stat().st_size < example.model_path.stat().st_size


def test_sixteen_bit_activations_are_closer_than_eight(example: Example) -> None:
    data = example.calibration[:COUNT]
    eight = quantized(example, data, recipe="a8w8").record.outputs[0].sqnr_db
    sixteen = quantized(example, data, recipe="a16w8").record.outputs[0].sqnr_db
    per_channel = quantized(example, data, recipe="a16w8", changes={"weights": {"per_channel": True}})
    assert sixteen >= eight
    assert per_channel.record.outputs[0].sqnr_db > sixteen + 6


def test_the_record_is_complete(example: Example, tmp_path: Path) -> None:
    path = tmp_path / "q.onnx"
    result = roundel.quantize(example.model_path, path, data=example.calibration[:COUNT], exclude=["pool"])
    record = json.loads(path.with_suffix(".json").read_text())
    assert record == result.record.to_dict()
    assert set(record["versions"]) == {"roundel", "python", "numpy", "onnx", "onnx-ir", "onnxruntime"}
    assert record["versions"]["onnxruntime"][0].isdigit()
    assert record["model"]["name"] == "digits.onnx"
    assert record["model"]["bytes"] == example.model_path.stat().st_size
    assert record["model"]["opset"] == 17
    assert len(record["model"]["fingerprint"]) == 32
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert record["file"] == {"name": "q.onnx", "bytes": path.stat().st_size, "sha256": digest}
    assert record["recipe"] == roundel.load_recipe("a8w8", {"selection": {"exclude": ["pool"]}}).model_dump(
        mode="json"
    )
    data = record["data"]
    assert data["samples_seen"] == COUNT
    assert data["samples_verified"] == COUNT
    assert len(data["digest"]) >= 32
    assert data["random"] is False
    assert record["float_nodes"]["pool"] == "excluded by 'pool'"
    assert record["counts"]["quantized_nodes"]["Conv"] == 13
    assert record["counts"]["tensors"]["weight"] == 14
    assert record["prepare"]
    output = record["outputs"][0]
    assert output["name"] == "logits"
    assert set(output) == {"name", "sqnr_db", "cosine", "worst", "same_top"}
    assert {"prepare", "plan", "collect", "resolve", "write", "gate"} <= set(record["seconds"])
    assert all(seconds >= 0 for seconds in record["seconds"].values())


def test_a_recorded_recipe_repeats_the_run(example: Example, expected: bytes, tmp_path: Path) -> None:
    path = tmp_path / "q.onnx"
    roundel.quantize(example.model_path, path, data=example.calibration[:COUNT])
    recipe = json.loads(path.with_suffix(".json").read_text())["recipe"]
    assert (
        quantized(example, example.calibration[:COUNT], recipe=recipe).model.SerializeToString() == expected
    )


def test_a_result_in_memory_can_be_saved_later(example: Example, expected: bytes, tmp_path: Path) -> None:
    result = quantized(example, example.calibration[:COUNT])
    assert result.path is None
    path = result.save(tmp_path / "later.onnx")
    assert onnx.load(path).SerializeToString() == expected
    assert json.loads(path.with_suffix(".json").read_text())["counts"]["quantized_nodes"]["Conv"] == 13


def test_a_dynamic_preset_needs_no_data(example: Example) -> None:
    result = quantized(example, None, recipe="uint8_dynamic_quant")
    assert result.record.data == {"kind": "none needed"}
    assert result.record.outputs == ()
    assert any(n.op_type == "DynamicQuantizeLinear" for n in result.model.graph.node)


def test_a_model_with_nothing_to_quantize_is_passed_through(example: Example) -> None:
    result = quantized(example, None, exclude=["re:.*"])
    assert not result.record.quantized
    assert any("passed through" in note for note in result.record.notes)
    onnx.checker.check_model(result.model)


def test_progress_is_told_and_closed(example: Example) -> None:
    class Told:
        def __init__(self) -> None:
            self.steps: list[str] = []
            self.done = 0.0
            self.closed = 0

        def step(self, name: str, total: int | None = None) -> None:
            self.steps.append(name)

        def advance(self, done: float) -> None:
            self.done = done

        def say(self, text: str) -> None:
            raise AssertionError("nothing is fine-tuned here")

        def close(self) -> None:
            self.closed += 1

    told = Told()
    quantized(example, example.calibration[:3], listener=told)
    assert told.steps == ["load and prepare", "plan", "calibrate", "write", "verify"]
    assert told.done == 3
    assert told.closed == 1
    with pytest.raises(roundel.RecipeError):
        quantized(example, [], recipe="none", listener=told)
    assert told.closed == 2, "an error before the first step closes the listener, too"


# Statistics that a later run reuses.


@pytest.fixture
def forward_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each pass over the data with statistics."""
    from roundel import stages

    seen: list[int] = []
    true = stages.observe

    def spy(model: Any, requests: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(len(requests))
        return true(model, requests, *arguments, **options)

    monkeypatch.setattr(stages, "observe", spy)
    return seen


def test_a_second_run_needs_no_forward_pass(
    example: Example, tmp_path: Path, forward_passes: list[int]
) -> None:
    stats, data = tmp_path / "stats.npz", example.calibration[:COUNT]
    # Calibration only: equalization would make the models differ, and with them their statistics.
    plain = "a8w8_minmax"
    first = quantized(example, data, stats=stats, recipe=plain)
    assert len(forward_passes) == 1
    assert any("did not exist" in note for note in first.record.notes)
    content = stats.read_bytes()
    second = quantized(example, data, stats=stats, recipe=plain, exclude=["classifier", "stem_conv"])
    third = quantized(example, data, stats=stats, recipe="s8s8_aaws")
    assert len(forward_passes) == 1
    assert stats.read_bytes() == content
    assert "reused the statistics in stats.npz" in second.record.notes
    assert second.record.data["samples_seen"] == COUNT
    # What a run that collects for itself would have given.
    fresh = quantized(example, data, stats=tmp_path / "2", recipe=plain, exclude=["classifier", "stem_conv"])
    assert second.model.SerializeToString() == fresh.model.SerializeToString()
    assert second.record.outputs[0].sqnr_db == pytest.approx(fresh.record.outputs[0].sqnr_db, abs=0.01)
    fresh = quantized(example, data, stats=tmp_path / "3", recipe="s8s8_aaws")
    assert third.model.SerializeToString() == fresh.model.SerializeToString()


def test_statistics_of_other_data_are_collected_anew(
    example: Example, tmp_path: Path, forward_passes: list[int]
) -> None:
    stats = tmp_path / "stats.npz"
    plain = "a8w8_minmax"  # trials of steps would run the model over the first samples, too
    quantized(example, example.calibration[:4], stats=stats, recipe=plain)
    result = quantized(example, example.calibration[4:8], stats=stats, recipe=plain)
    assert len(forward_passes) == 2
    assert any("other data" in note for note in result.record.notes)
    fresh = quantized(example, example.calibration[4:8], stats=tmp_path / "fresh.npz", recipe=plain)
    assert result.model.SerializeToString() == fresh.model.SerializeToString()


def test_statistics_of_another_model_are_collected_anew(
    example: Example, tmp_path: Path, forward_passes: list[int]
) -> None:
    stats, data = tmp_path / "stats.npz", example.calibration[:4]
    other = onnx.load(example.model_path)
    weight = next(t for t in other.graph.initializer if t.name == "classifier.weight")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 2, weight.name))
    plain = "a8w8_minmax"
    roundel.quantize(other, data=data, stats=stats, recipe=plain)
    result = quantized(example, data, stats=stats, recipe=plain)
    assert len(forward_passes) == 2
    fresh = quantized(example, data, stats=tmp_path / "fresh.npz", recipe=plain)
    assert result.model.SerializeToString() == fresh.model.SerializeToString()


def test_data_that_can_be_read_once_and_other_statistics(example: Example, tmp_path: Path) -> None:
    stats = tmp_path / "stats.npz"
    quantized(example, example.calibration[:4], stats=stats)
    content = stats.read_bytes()
    with pytest.raises(DataError) as caught:
        quantized(example, iter(example.calibration[4:8]), stats=stats)
    assert "only once" in caught.value.what
    assert stats.read_bytes() == content
    assert quantized(example, iter(example.calibration[:4]), stats=stats).record.quantized


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"PK" + b[2:900]])
def test_damaged_statistics_are_an_error(example: Example, tmp_path: Path, damage: Any) -> None:
    stats = tmp_path / "stats.npz"
    quantized(example, example.calibration[:2], stats=stats)
    stats.write_bytes(damage(stats.read_bytes()))
    with pytest.raises(DataError) as caught:
        quantized(example, example.calibration[:2], stats=stats)
    assert caught.value.where == str(stats)
    assert "another file name" in (caught.value.hint or "")


def test_two_threads_give_what_one_gives(example: Example, expected: bytes) -> None:
    results: list[bytes] = []

    def work() -> None:
        results.append(quantized(example, example.calibration[:COUNT]).model.SerializeToString())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected, expected]
