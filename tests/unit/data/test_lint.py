"""Calibration lint: each fault is found, and sound data raises no alarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import roundel
from helpers import build, node, normal, rng
from roundel.data.lint import SampleWatch, coverage, range_findings
from roundel.example import load_example
from roundel.recipe.settings import Data

SHARED = Path(__file__).resolve().parents[4] / "shared"


def pictures(count: int, seed: int = 0, size: int = 32) -> NDArray[np.float32]:
    """Smooth random pictures in 0..1."""
    coarse = rng(seed).uniform(0, 1, (count, 3, 6, 6))
    fine = coarse.repeat(size // 6 + 1, axis=2).repeat(size // 6 + 1, axis=3)[:, :, :size, :size]
    return np.asarray(0.25 + 0.5 * fine + rng(seed + 1).normal(0, 0.02, fine.shape), np.float32).clip(0, 1)


def rules(model: Any, data: Any, **options: Any) -> set[str]:
    """The warnings."""
    findings = roundel.lint_data(model, data, **options).findings
    return {finding.rule for finding in findings if finding.level == "warning"}


def singles(stack: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return [stack[i : i + 1] for i in range(len(stack))]


def plain_net(*first: Any, constants: dict[str, Any] | None = None) -> Any:
    """Something at the entrance, then a Conv."""
    start = first[-1].output[0] if first else "x"
    return build(
        [*first, node("Conv", [start, "w"], ["y"], "conv")],
        {"x": ["N", 3, 32, 32]},
        {"y": ["N", 4, 30, 30]},
        {"w": normal(4, 3, 3, 3, scale=0.3), **(constants or {})},
    )


def test_sound_pictures_raise_no_alarm() -> None:
    assert rules(plain_net(), singles(pictures(40))) == set()


def test_the_embedded_example_raises_no_alarm() -> None:
    example = load_example()
    assert rules(example.model_path, example.calibration, against=singles(example.eval_x[:64])) == set()


def test_constant_and_duplicated_samples() -> None:
    stack = pictures(40)
    stack[3:5] = 0.5
    report = roundel.lint_data(plain_net(), singles(stack))
    assert "2 of 40 samples of input 'x' hold one value only (samples 3, 4)" in report.findings[0].message
    assert not report.clean
    assert rules(plain_net(), singles(pictures(10)) * 4) >= {"duplicate-samples"}


def test_noise_is_not_taken_for_pictures() -> None:
    noise = rng(1).normal(0, 1, (40, 3, 32, 32)).astype(np.float32)
    assert "random-samples" in rules(plain_net(), singles(noise))


def test_noise_that_was_asked_for_is_not_reported_again() -> None:
    result = roundel.quantize(plain_net(), recipe="a8w8", data=roundel.RandomData(count=4), effort="none")
    assert [note for note in result.record.notes if "random" in note] == [
        "calibrated on random data: ranges and accuracy mean nothing for real inputs"
    ]


@pytest.mark.parametrize(
    ("scale", "rule"), [(255.0, None), (1.0, "scaled-twice")], ids=["pixels", "scaled already"]
)
def test_a_model_that_takes_pixels(scale: float, rule: str | None) -> None:
    model = plain_net(node("Div", ["x", "c"], ["d"], "div"), constants={"c": np.float32(255)})
    assert (rule in rules(model, singles(pictures(40) * np.float32(scale)))) == (rule is not None)


@pytest.mark.parametrize(
    ("form", "rule"), [("unit", None), ("signed", "scaled-twice"), ("raw", "not-scaled")]
)
def test_a_model_that_normalises_unit_pixels(form: str, rule: str | None) -> None:
    mean, std = (
        np.array(v, np.float32).reshape(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.23, 0.22, 0.22))
    )
    model = plain_net(
        node("Sub", ["x", "m"], ["s"], "sub"),
        node("Div", ["s", "d"], ["n"], "div"),
        constants={"m": mean, "d": std},
    )
    unit = pictures(40)
    data = {"unit": unit, "signed": unit * 2 - 1, "raw": unit * 255}[form]
    found = rules(model, singles(data.astype(np.float32)))
    assert found == ({rule} if rule else set())


@pytest.mark.parametrize("form", ["as in training", "0..1 for -1..1", "0..255"])
def test_the_first_batch_norm_remembers_training(form: str) -> None:
    example = load_example()
    data = np.concatenate([sample["image"] for sample in example.calibration[:32]])
    changed = {"as in training": data, "0..1 for -1..1": (data + 1) / 2, "0..255": (data + 1) * 127.5}[form]
    found = rules(example.model_path, singles(changed.astype(np.float32)))
    assert ("not-as-in-training" in found) == (form != "as in training")


def classifier() -> Any:
    """Tells red from green pictures, is sure only of values in -1..1, and does not look at blue."""
    return build(
        [
            node("GlobalAveragePool", ["x"], ["p"], "pool"),
            node("Flatten", ["p"], ["f"], "flat"),
            node("Mul", ["f", "steep"], ["m"], "mul"),
            node("Tanh", ["m"], ["t"], "tanh"),
            node("Gemm", ["t", "w"], ["y"], "head"),
        ],
        {"x": [1, 3, 16, 16]},
        {"y": [1, 2]},
        {"w": np.array([[3, 0], [0, 3], [0, 0]], np.float32), "steep": np.float32(10)},
    )


def coloured(count: int) -> NDArray[np.float32]:
    """Pictures in -1..1 in which red or green dominates, and blue never does."""
    stack = pictures(count, size=16) * 0.1
    for index in range(count):
        stack[index, index % 2] += 0.8
    return stack * 2 - 1


def test_swapped_colours_are_suspected() -> None:
    data = coloured(32)
    assert rules(classifier(), singles(data)) == set()
    report = roundel.lint_data(classifier(), singles(np.ascontiguousarray(data[:, ::-1])))
    (finding,) = [found for found in report.findings if found.level == "warning"]
    assert finding.rule == "another-reading"
    assert "red and blue swapped" in finding.message


def test_the_wrong_scale_is_suspected_and_the_record_says_so(tmp_path: Path) -> None:
    for index, image in enumerate(coloured(24)):
        pixels = np.rint((image.transpose(1, 2, 0) + 1) * 127.5).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index:02}.png")
    report = roundel.lint_data(classifier(), tmp_path)
    assert [f.rule for f in report.findings if f.level == "warning"] == ["another-reading"]
    right = Data(mean=(0.5,), std=(0.5,))
    assert roundel.lint_data(classifier(), tmp_path, options=right).clean
    # Nobody said how to scale: the run itself asks the model.
    result = roundel.quantize(classifier(), recipe="a8w8", data=tmp_path, effort="none")
    assert any("surer of its answers" in note for note in result.record.notes)
    told = {"data": {"mean": [0.5], "std": [0.5]}}
    sure = roundel.quantize(classifier(), recipe="a8w8", data=tmp_path, effort="none", changes=told)
    assert not any("surer" in note for note in sure.record.notes)
    assert sure.record.data["inputs"]["x"]["samples"] == 24


def test_other_data_made_otherwise(tmp_path: Path) -> None:
    stack = pictures(40)
    assert rules(plain_net(), singles(stack), against=singles(pictures(30, seed=9))) == set()
    found = rules(plain_net(), singles(stack), against=singles(pictures(30, seed=9) * 2 - 1))
    assert found == {"different-preprocessing"}
    for index in range(8):
        Image.fromarray((stack[index].transpose(1, 2, 0) * 255).astype(np.uint8)).save(
            tmp_path / f"{index}.png"
        )
    report = roundel.lint_data(
        plain_net(),
        tmp_path,
        options=Data(),
        against=tmp_path,
        against_options=Data(interpolation="nearest", bgr=True),
    )
    assert "different-preprocessing" in {f.rule for f in report.findings}


def test_judging_on_data_unlike_the_calibration_is_noted(tmp_path: Path) -> None:
    model, quantized = plain_net(), tmp_path / "q.onnx"
    roundel.quantize(model, quantized, recipe="a8w8", data=singles(pictures(24)), effort="none")
    alike, unlike = singles(pictures(12, seed=5)), singles(pictures(12, seed=5) * 255)
    assert roundel.compare(model, quantized, alike).notes == ()
    assert "Preprocess both alike" in roundel.compare(model, quantized, unlike).notes[0]
    first, second = roundel.evaluate_models([model, quantized], unlike)
    assert (len(first.notes), len(second.notes)) == (0, 1)


def test_how_many_samples_are_enough() -> None:
    spread = rng(3).uniform(0.9, 1.0, (5, 200))
    stable = {str(i): ((-row).tolist(), row.tolist()) for i, row in enumerate(spread)}
    (finding,) = range_findings(stable)
    assert (finding.rule, finding.level) == ("more-than-needed", "note")
    assert "8 of the 200 samples would have done" in finding.message
    few = {name: (lows[:4], highs[:4]) for name, (lows, highs) in stable.items()}
    assert next(range_findings(few)).rule == "few-samples"
    heavy = {"t": ([0.0] * 40, (1 / rng(4).uniform(0.01, 1, 40)).tolist())}
    assert next(range_findings(heavy)).level == "warning"
    assert not list(range_findings({}))


def test_coverage_is_the_mean_over_all_choices() -> None:
    from itertools import combinations

    values = [1.0, 5.0, 2.0, 4.0, 3.0]
    by_hand = np.mean([max(choice) / 5 for choice in combinations(values, 2)])
    assert coverage({"t": ([0.0] * 5, values)}, 2) == pytest.approx(by_hand)


def test_inputs_that_are_no_pictures_are_left_alone() -> None:
    watch = SampleWatch()
    for index in range(8):
        watch.look(
            {"ids": np.arange(index, index + 4), "x": normal(1, 16, seed=index), "flag": np.array(True)}
        )
    assert not list(watch.findings())
    assert set(watch.profiles) == {"x"}
    json.dumps(watch.profiles["x"].to_dict())


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="the shared models and images are not on this machine")
@pytest.mark.parametrize(
    ("model", "mean", "std"),
    [
        ("cifar10_resnet20", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("mobilenet_v3_small", (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262)),
    ],
)
def test_no_alarm_on_the_shared_data(model: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    path = SHARED / "models" / f"{model}.onnx"
    with (
        np.load(SHARED / "data" / "cifar10" / "calib.npz") as file,
        np.load(SHARED / "data" / "cifar10" / "eval.npz") as other,
    ):
        calibration, evaluation = file["x"], other["x"][:64]
    options = Data(mean=mean, std=std)
    report = roundel.lint_data(path, calibration, options=options, against=evaluation)
    assert [f for f in report.findings if f.level == "warning"] == []
    wrong = roundel.lint_data(path, calibration[:32], options=Data(scale="unit"))
    assert "another-reading" in {f.rule for f in wrong.findings}
