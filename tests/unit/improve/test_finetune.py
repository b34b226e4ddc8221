"""Fine-tuning as a whole: it helps, it repeats, it resumes, and it keeps to the formats."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune_cases import Case, calibrated, conv_net, pictures, same

pytest.importorskip("torch")

from roundel.errors import DataError, DependencyError, RecipeError
from roundel.example import load_example
from roundel.improve import finetune_data, finetune_rows, torch_device
from roundel.improve.reports import Moment
from roundel.improve.rounding import walk
from roundel.numerics.affine import code_limits
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
    walked, _ = walk(case.model, case.state, case.samples, case.recipe)
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


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("extra", [{}, {"drop_ratio": 0.5}, {"parallel": True}])
def test_memory_level_does_not_change_the_result(case: Case, level: int, extra: dict[str, Any]) -> None:
    assert same(case.tune(mem_opt_level=1, **extra)[0], case.tune(mem_opt_level=level, **extra)[0])


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


def test_progress_is_told(case: Case) -> None:
    told: list[Moment] = []
    case.tune(progress=told.append)
    assert told[0] == Moment(0, 4, None)
    assert {now.total for now in told} == {4}
    done = [now.done for now in told]
    assert done == sorted(done)
    assert {1, 2, 3, 4} <= set(done)
    assert any(0 < share < 1 for share in done), "a layer that learns says how far it is"
    assert all(now.loss is not None and 0 <= now.loss < 1 for now in told[1:])


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("extra", [{}, {"parallel": True}, {"selective_update": True}, {"mem_opt_level": 2}])
@pytest.mark.parametrize("survived", [1, 3])
def test_resume_gives_the_same_state(
    case: Case, tmp_path: Path, extra: dict[str, Any], survived: int
) -> None:
    def kill(now: Moment) -> None:
        if now.done == survived:
            raise _KilledError

    with pytest.raises(_KilledError):
        case.tune(store=Store(tmp_path), progress=kill, **extra)
    told: list[Moment] = []
    state, reports = case.tune(store=Store(tmp_path, resume=True), progress=told.append, **extra)
    whole, expected = case.tune(**extra)
    assert told[0] == Moment(survived, 4, None)
    assert told[-1].done == 4
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


@pytest.mark.parametrize("parallel", [False, True])
def test_selective_update_reverts_a_harmful_layer(
    case: Case, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    errors = iter([1.0, 0.5, 0.7, 0.4, 0.6])  # before, then after each layer

    def error(self: object, model: object) -> float:
        return next(errors)

    monkeypatch.setattr(finetune_data.Judge, "error", error)
    settings = {"parallel": parallel, "target_op_types": ("Conv", "Gemm"), "learning_rate": 0.05}
    state, reports = case.tune(selective_update=True, **settings)
    free = case.tune(**settings)[1]
    if not all(r.kept for r in free):
        pytest.skip("a layer is already refused on its own error")
    assert [r.kept for r in reports] == [True, False, True, False]
    assert "w1" in state.codes
    assert "w2" not in state.codes


def test_selective_update_measures_the_outputs(case: Case, fresh: Sequence[Any]) -> None:
    state, reports = case.tune(selective_update=True, iterations=150)
    held = case.samples[-4:]
    assert case.sqnr(state, held) > case.sqnr(case.state, held)
    assert any(r.kept for r in reports)


def test_missing_torch_says_what_to_install(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DependencyError, match="PyTorch") as raised:
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

    monkeypatch.setattr(torch_device.ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(finetune_rows, "on_cuda", move)
    monkeypatch.setattr(finetune_data, "on_cuda", move)
    state, _ = case.tune(infer_device="cuda:1", selective_update=True)
    assert set(moved) == {1}
    assert same(state, case.tune(selective_update=True)[0])
