"""The parts of training: when it stops, what it counts, and which codes win."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from finetune_cases import Case, calibrated, conv_net, pictures

pytest.importorskip("torch")

import torch

from roundel.improve import torch_training
from roundel.improve.constants import LayerWeights
from roundel.improve.finetune_rows import Rows, solved_codes
from roundel.improve.layers import Activation
from roundel.improve.rounding import choose_rounding
from roundel.improve.torch_layer import (
    LayerFeed,
    TorchLayer,
    layer_channel_errors,
    reconstruction,
    refit_bias,
    tensor,
)
from roundel.improve.torch_training import LossWatch, TrainingBench, TrainingTask, train
from roundel.recipe.settings import Finetune


def _rows(inputs: Any, targets: Any, per_sample: int = 10) -> Rows:
    starts = tuple(range(0, len(inputs) + 1, per_sample))
    return Rows(inputs, targets, targets, starts, (len(starts) - 1) * 4 // 5)


def _problem(seed: int = 0) -> tuple[LayerWeights, Rows]:
    """A layer whose inputs are correlated, so that rounding one weight can make up for another."""
    generator = np.random.default_rng(seed)
    mix = generator.normal(0, 1, (6, 6))
    inputs = np.rint(generator.normal(0, 8, (200, 6)) @ mix)[:, None].astype(np.float32)
    real = generator.normal(0, 3, (1, 4, 6))
    targets = np.asarray(inputs @ real[0].T + 5, np.float32)
    one = np.ones((1, 1, 1))
    weights = LayerWeights(real, np.rint(real), one, -127 * one, 127 * one, 1.0, np.zeros((1, 4)), None)
    return weights, _rows(inputs, targets)


def test_the_loss_is_a_mean_over_places_of_a_sum_over_channels() -> None:
    got, wanted = torch.zeros(3, 2, 4), torch.ones(3, 2, 4)
    assert reconstruction(got, wanted).item() == 8


def test_solved_codes_beat_nearest_rounding() -> None:
    weights, rows = _problem()
    solved = solved_codes(weights, rows)
    assert solved is not None
    layer = TorchLayer(weights, None, "cpu")
    look = LayerFeed(rows, "cpu").teaching(4096)
    errors = []
    for codes in (weights.codes, solved.taught, solved.whole):
        bias = refit_bias(layer, look, tensor(codes, "cpu"), torch.zeros(1, 4))
        errors.append(float(layer_channel_errors(layer, look, tensor(codes, "cpu"), bias).sum()))
    assert max(errors[1:]) < errors[0]


@pytest.mark.parametrize("op", ["Relu", "Sigmoid", None])
def test_the_bias_is_the_best_behind_the_activation(op: str | None) -> None:
    weights, rows = _problem()
    activation = None if op is None else Activation(op)
    layer = TorchLayer(weights, activation, "cpu")
    codes = tensor(weights.real, "cpu")
    wanted = layer.outputs(torch.from_numpy(rows.inputs), codes, torch.full((1, 4), 5.0)).numpy()
    look = LayerFeed(_rows(rows.inputs, wanted), "cpu").teaching(4096)
    start = torch.full((1, 4), 4.0)
    before = layer_channel_errors(layer, look, codes, start)
    after = layer_channel_errors(layer, look, codes, refit_bias(layer, look, codes, start))
    assert (after <= before).all()
    assert after.sum() < 0.1 * before.sum()


def _looks(watch: LossWatch, errors: Sequence[float]) -> int:
    """How many looks it takes until learning stops."""
    for number, error in enumerate(errors):
        watch.see(10 * number, error)
        if watch.stalled:
            return number
    return len(errors)


def test_learning_stops_where_it_would_not_get_below_the_best() -> None:
    settings = Finetune(iterations=100)
    falls = [5.0, 4.0, 3.9, 3.8, 3.7, 3.6, 3.5]
    assert _looks(LossWatch(settings, "adaquant"), falls) == len(falls)
    assert _looks(LossWatch(settings, "adaquant"), [5.0, 4.0, 4.0, 4.0, 4.0, 3.0]) == 4
    # Behind the best, but on the way to less.
    comes_back = [5.0, 9.0, 8.0, 7.0, 6.0, 5.5, 4.9]
    assert _looks(LossWatch(settings, "adaquant"), comes_back) == len(comes_back)
    # On the way, but too slowly.
    assert _looks(LossWatch(settings, "adaquant"), [5.0, 9.0, 8.9, 8.8, 8.7, 8.6]) == 3
    assert _looks(LossWatch(Finetune(iterations=100, early_stop=False), "adaquant"), [1.0] * 10) == 10


def test_the_best_look_is_the_one_of_least_error() -> None:
    watch = LossWatch(Finetune(iterations=100), "adaquant")
    assert [watch.see(step, error) for step, error in ((0, 5.0), (10, 4.0), (20, 4.5), (30, 3.9))] == [
        True,
        True,
        False,
        True,
    ]


def test_the_warm_start_does_not_count() -> None:
    watch = LossWatch(Finetune(iterations=100, warm_start=0.5), "adaround")
    assert _looks(watch, [9.0] * 7) == 7
    assert _looks(LossWatch(Finetune(iterations=100, warm_start=0.5), "adaround"), [9.0] * 10) == 8


@pytest.mark.parametrize("held", [1, 2, 3, 5])
def test_who_says_when_to_stop_does_not_judge(held: int) -> None:
    starts = tuple(range(0, 10 * (8 + held) + 1, 10))
    rows = Rows(np.zeros((starts[-1], 1, 1)), np.zeros((starts[-1], 1, 1), np.float32), None, starts, 8)
    assert not set(rows.watching) & set(rows.judging)
    assert min(rows.judging) >= 80
    assert held == 1 or min(rows.watching) >= 80
    assert len(rows.judging) + (len(rows.watching) if held > 1 else 0) == 10 * held


def test_codes_of_the_walk_are_solved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    case = calibrated(conv_net(), pictures(), "xint8")
    calls: list[bool] = []

    def spy(weights: LayerWeights, rows: Rows) -> Any:
        calls.append(rows.linear is not None)
        return solved_codes(weights, rows)

    monkeypatch.setattr(torch_training, "solved_codes", spy)
    case.tune()
    assert calls == [False] * 4
    calls.clear()
    walked, reports = choose_rounding(case.model, case.state, case.samples, case.recipe)
    Case(case.model, walked, case.recipe, case.samples).tune()
    assert sum(calls) == sum(r.kept for r in reports)


@pytest.mark.parametrize("shape", [(1, 16, 12), (8, 1, 9)], ids=["outputs", "groups"])
def test_halves_learn_what_the_whole_does(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(2)
    groups, outputs, size = shape
    inputs = generator.integers(-20, 20, (400, groups, size)).astype(np.int8)
    real, scale = generator.normal(0, 3, shape), np.full((groups, outputs, 1), 0.5)
    targets = np.asarray(np.einsum("ngk,gok->ngo", inputs, real * 0.5), np.float32)
    low, high = np.full((1, 1, 1), -127.0), np.full((1, 1, 1), 127.0)
    bias = generator.normal(0, 1, (groups, outputs))
    weights = LayerWeights(real * 0.5, np.rint(real), scale, low, high, 1.0, bias, None)
    layer = SimpleNamespace(layer=SimpleNamespace(name="n"), activation=Activation("Relu"))
    settings = Finetune(iterations=60, early_stop=False)
    task = TrainingTask(
        cast(Any, layer), weights, _rows(inputs, targets), cast(Any, _Biases()), "adaround", settings, "cpu"
    )
    found = []
    for least in (0, 10**12):
        monkeypatch.setattr(torch_training, "_WORTH_HALVING", least)
        bench = TrainingBench(task)
        found.append(train(task, bench, bench.candidate(bench.state_codes), lambda share, loss: None))
    # Each half keeps its own best look, so that a few codes may differ.
    assert (found[0][0] == found[1][0]).float().mean() > 0.95
    assert not torch.equal(found[0][0], tensor(weights.codes, "cpu"))


class _Biases:
    """Leaves them as they are."""

    def rounded_bias(self, layer: Any, weights: LayerWeights, bias: Any) -> tuple[Any, None]:
        return bias, None


def test_recorded_steps_are_those_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for a recording: each step sees its own draw and exponent, in order."""
    made: list[Any] = []

    class Graph:
        work: Any = None

        def replay(self) -> None:
            self.work()

    def counted(self: Any, exponent: int | None) -> Any:
        graph = Graph()
        graph.work = lambda: self._counted(exponent)
        made.append(exponent)
        return graph

    class Stream:
        def __init__(self, device: str) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(""))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch_training.Recording, "_recorded", counted)
    seen: list[tuple[list[int], int | None]] = []
    draws = torch.arange(20).reshape(10, 2)
    steps = torch_training.Recording(lambda drawn, power: seen.append((drawn.tolist(), power)), draws, "cpu")
    exponents = [None] * 5 + [4, 4, 4, 2, 2]
    for exponent in exponents:
        steps.step(exponent)
    assert seen == list(zip(draws.tolist(), exponents, strict=True))
    assert made == [None, 4, 2]
