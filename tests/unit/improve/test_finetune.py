"""Fine-tuning as a whole: it helps, it repeats, it resumes, and it keeps to the formats."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune_cases import Case, calibrated, conv_net, pictures, same

pytest.importorskip("torch")

from roundel.errors import DataError, DependencyError, RecipeError
from roundel.example import load_example
from roundel.improve import finetune, stepwise
from roundel.improve.rounding import choose_rounding
from roundel.model.memory import budget, within
from roundel.numerics.affine import code_limits
from roundel.types import Silent
from roundel.work.checkpoints import Store


@pytest.fixture(scope="module")
def case() -> Case:
    return calibrated(conv_net(), pictures(), "xint8")


@pytest.fixture(scope="module")
def fresh() -> Sequence[Any]:
    return pictures(40, seed=77)


@pytest.mark.parametrize("preset", ["xint8", "a8w8"])
def test_adaround_beats_nearest_rounding(preset: str, fresh: Sequence[Any]) -> None:
    case = calibrated(conv_net(), pictures(40), preset)
    state, reports = case.tune(iterations=200)
    assert case.sqnr(state, fresh) > case.sqnr(case.state, fresh)
    assert [r.layer for r in reports] == ["conv1", "conv2", "conv3", "fc"]
    assert any(r.kept for r in reports)
    assert all(r.after_db > r.before_db for r in reports if r.kept)
    assert all(r.after_db == r.before_db for r in reports if not r.kept)


def test_adaround_helps_the_example() -> None:
    example = load_example()
    case = calibrated(example.model_path, example.calibration[:60], "xint8")
    state, _ = case.tune(iterations=150)
    images = [{"image": x[None]} for x in example.eval_x[:100]]
    assert case.sqnr(state, images) > case.sqnr(case.state, images) + 0.5


def test_adaround_starts_from_the_walk(case: Case, fresh: Sequence[Any]) -> None:
    walked, _ = choose_rounding(case.model, case.state, case.samples, case.recipe)
    start = Case(case.model, walked, case.recipe, case.samples)
    state, reports = start.tune(iterations=200)
    assert start.sqnr(state, fresh) > case.sqnr(case.state, fresh)
    untouched = [r for r in reports if not r.kept]
    for report in untouched:
        name = {"conv1": "w1", "conv2": "w2", "conv3": "w3", "fc": "w4"}[report.layer]
        np.testing.assert_array_equal(state.codes[name], walked.codes[name])


def test_adaquant_lowers_the_error(fresh: Sequence[Any]) -> None:
    case = calibrated(conv_net(), pictures(40), "xint8")
    state, reports = case.tune(algorithm="adaquant", iterations=200, learning_rate=1e-3)
    assert case.sqnr(state, fresh) > case.sqnr(case.state, fresh)
    assert any(r.kept for r in reports)


def test_none_leaves_everything(case: Case) -> None:
    assert case.tune(algorithm="none") == (case.state, ())


def test_high_effort_means_adaround(case: Case) -> None:
    high = Case(case.model, case.state, case.recipe.merged({"effort": "high"}), case.samples)
    assert same(high.tune(algorithm="none")[0], case.tune()[0])


def test_same_seed_same_result(case: Case) -> None:
    assert same(case.tune()[0], case.tune()[0])


def test_rows_in_files_give_the_same_result(case: Case) -> None:
    with within(replace(budget(), held=1)):
        state, _ = case.tune()
    assert same(state, case.tune()[0])


@pytest.mark.parametrize("algorithm", ["adaround", "adaquant"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights": {"per_channel": True}},
        {"weights": {"symmetric": False, "type": "uint8"}},
        {"weights": {"type": "uint8"}},
        {"weights": {"reduce_range": True}},
        {"weights": {"symmetric": False, "per_channel": True}},
        {"activations": {"type": "uint8", "symmetric": False}},
        {"activations": {"type": "int16"}},
        {"activations": {"type": "uint16", "symmetric": False}},
        {"bias": {"type": "float"}},
        {"bias": {"type": "int8"}},
        {"placement": {"fuse_activations": False}},
        {"placement": {"fold_relu": True}, "activations": {"type": "uint8", "symmetric": False}},
    ],
)
def test_codes_stay_legal(algorithm: str, changes: dict[str, Any], fresh: Sequence[Any]) -> None:
    case = calibrated(conv_net(), pictures(), "a8w8", changes)
    rate = 0.1 if algorithm == "adaround" else 3e-4
    state, reports = case.tune(algorithm=algorithm, learning_rate=rate)
    assert len(reports) == 4
    assert case.sqnr(state, fresh) > case.sqnr(case.state, fresh) - 0.5
    for name, codes in state.codes.items():
        params = state.params[name]
        assert codes.dtype == params.qtype.dtype
        if name.startswith("w"):
            low, high = code_limits(state.plan.tensors[name].scheme)
            assert low <= codes.min() <= codes.max() <= high
            assert params.same_as(case.state.params[name])
    for name, tensor in case.state.params.items():
        assert name.startswith("b") or state.params[name].same_as(tensor)


def test_early_stop_stops(case: Case) -> None:
    stopped = case.tune(iterations=400, early_stop=True)[1]
    whole = case.tune(iterations=400, early_stop=False)[1]
    assert all(r.iterations == 400 for r in whole)
    assert min(r.iterations for r in stopped) < 400


class _Heard(Silent):
    """Notes what is told, and dies once so many layers are done."""

    def __init__(self, survives: float = math.inf) -> None:
        self.survives = survives
        self.steps: list[tuple[str, int | None]] = []
        self.done: list[float] = []
        self.said: list[str] = []

    def step(self, name: str, total: int | None = None) -> None:
        self.steps.append((name, total))

    def advance(self, done: float) -> None:
        self.done.append(done)
        if done == self.survives:
            raise _KilledError

    def say(self, text: str) -> None:
        self.said.append(text)


def test_progress_is_told(case: Case) -> None:
    heard = _Heard()
    case.tune(progress=heard)
    assert heard.steps == [("fine-tune by AdaRound", 4)]
    assert heard.done == sorted(heard.done)
    assert {0, 1, 2, 3, 4} <= set(heard.done)
    assert any(0 < share < 1 for share in heard.done), "a layer that learns says how far it is"
    assert all(0 <= float(text.removeprefix("loss ")) < 1 for text in heard.said)


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("survived", [1, 3])
def test_resume_gives_the_same_state(case: Case, tmp_path: Path, survived: int) -> None:
    with pytest.raises(_KilledError):
        case.tune(store=Store(tmp_path), progress=_Heard(survived))
    heard = _Heard()
    state, reports = case.tune(store=Store(tmp_path, resume=True), progress=heard)
    whole, expected = case.tune()
    assert (heard.done[0], heard.done[-1]) == (survived, 4)
    assert same(state, whole)
    assert [(r.layer, r.after_db, r.kept) for r in reports] == [
        (r.layer, r.after_db, r.kept) for r in expected
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"finetune-00000{n}.ckpt" for n in range(4)]


def test_resume_without_a_checkpoint_starts_at_the_beginning(case: Case, tmp_path: Path) -> None:
    state, _ = case.tune(store=Store(tmp_path, resume=True))
    assert same(state, case.tune()[0])


def test_a_checkpoint_of_another_run_is_refused(case: Case, tmp_path: Path) -> None:
    case.tune(store=Store(tmp_path))
    with pytest.raises(DataError, match="another run"):
        case.tune(store=Store(tmp_path, resume=True), seed=1)
    path = tmp_path / "finetune-000000.ckpt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        case.tune(store=Store(tmp_path, resume=True))


def test_missing_torch_says_what_to_install(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DependencyError, match="Fine-tuning with PyTorch needs packages") as raised:
        case.tune()
    assert raised.value.hint == "pip install 'roundel[torch]'"


@pytest.mark.parametrize(
    ("option", "device", "words"),
    [
        ("optim_device", "cuda:99", "not there"),
        ("infer_device", "cuda", "not there"),
        ("optim_device", "tpu", "Unknown device"),
        ("infer_device", "cuda:x", "Unknown device"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(case: Case, option: str, device: str, words: str) -> None:
    import onnxruntime

    if option == "infer_device" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        device = "cuda:x"
        words = "Unknown device"
    with pytest.raises(RecipeError, match=words) as raised:
        case.tune(**{option: device})
    assert option in str(raised.value.where)


def test_torch_is_left_as_it_was(case: Case) -> None:
    import torch

    before = torch.get_num_threads(), torch.random.get_rng_state()
    case.tune()
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])


def test_models_run_on_the_device_that_was_asked_for(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []

    def move(session: Any, device: int) -> None:
        moved.append(device)
        session.set_providers(["CPUExecutionProvider"])  # the session must survive being built again

    monkeypatch.setattr(finetune, "runtime_has_cuda", lambda: True)
    monkeypatch.setattr(stepwise, "move_to_cuda", move)
    state, _ = case.tune(infer_device="cuda:1")
    assert set(moved) == {1}
    assert same(state, case.tune()[0])
