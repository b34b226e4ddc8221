"""The layers that fine-tuning sees: torch computes what ONNX Runtime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from finetune_cases import Case, array, calibrated, pictures
from helpers import build, node

pytest.importorskip("torch")

import torch

from roundel.improve.constants import Constants, LayerWeights, Written
from roundel.improve.finetune_rows import Rows, SeenRows, gather_rows, layer_seed, narrow_type
from roundel.improve.layers import Activation, Unit, find_units
from roundel.improve.stepwise import StepwiseRunner
from roundel.improve.torch_layer import LayerFeed, Part, TorchLayer, reconstruction, tensor
from roundel.improve.torch_learners import (
    AdaRound,
    inverse_rectified,
    odd_power,
    regulariser_exponent,
    rounding_start,
)
from roundel.recipe.settings import Finetune
from roundel.types import QParams, QType

_ACTIVATIONS: dict[str, tuple[dict[str, Any], dict[str, NDArray[Any]]]] = {
    "Relu": ({}, {}),
    "LeakyRelu": ({"alpha": 0.2}, {}),
    "PRelu": ({}, {"slope": array(6, 1, 1, seed=9)}),
    "Tanh": ({}, {}),
    "Sigmoid": ({}, {}),
    "HardSigmoid": ({"alpha": 0.3, "beta": 0.4}, {}),
    "Softmax": ({"axis": 1}, {}),
    "Clip": ({}, {"low": np.float32(-0.2), "high": np.float32(0.9)}),
    "Gelu": ({"approximate": "tanh"}, {}),
}


def _with_activation(op: str) -> onnx.ModelProto:
    attributes, constants = _ACTIVATIONS[op]
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], "conv", group=2, strides=[2, 2], pads=[1, 1, 0, 0]),
        node(op, ["c", *constants], ["a"], "act", **attributes),
        node("Relu", ["a"], ["y"], "last"),
    ]
    weights = {"w": array(6, 2, 3, 3, scale=0.4), "b": array(6, seed=1)}
    return build(nodes, {"x": [1, 4, 8, 8]}, ["y"], {**weights, **constants}, opset=20)


def _rows(case: Case, unit: Unit) -> tuple[Any, LayerWeights]:
    written = Written.of(case.model, case.state, case.recipe)
    codes = StepwiseRunner(written.model, case.samples).run_to(written.codes_of(unit.layer.data))
    outputs = StepwiseRunner(case.model, case.samples).run_to(unit.output)
    seen = SeenRows(codes, None, outputs, case.state.params[unit.layer.data])
    weights = Constants(case.model.graph, case.state, case.recipe).weights(unit)
    return gather_rows(unit, seen, weights.shape, 0), weights


def _units(case: Case, algorithm: str = "adaround") -> tuple[Unit, ...]:
    written = Written.of(case.model, case.state, case.recipe)
    return find_units(case.model.graph, written.model.graph, case.state, Finetune(), algorithm)


def _agrees(case: Case, unit: Unit, tolerance: float = 0.03) -> None:
    """The layer in torch, with the quantized constants, stays near its float target."""
    rows, weights = _rows(case, unit)
    layer = TorchLayer(weights, unit.activation, "cpu")
    got = layer.outputs(
        torch.from_numpy(rows.inputs).float(), tensor(weights.codes, "cpu"), tensor(weights.bias, "cpu")
    ).numpy()
    error = np.square(got - rows.targets).mean() / max(np.square(rows.targets).mean(), 1e-12)
    assert error < tolerance**2


@pytest.mark.parametrize("op", _ACTIVATIONS)
def test_a_fused_activation_is_computed_as_the_model_does(op: str) -> None:
    samples = pictures(6, channels=4)
    case = calibrated(_with_activation(op), samples, "a8w8", {"placement": {"operators": "extended"}})
    (unit,) = _units(case)
    stored = "c" in case.state.params
    assert (unit.activation is None) == stored
    _agrees(case, unit)


_OPERATORS: dict[str, tuple[list[onnx.NodeProto], list[int], dict[str, NDArray[Any]]]] = {
    "Conv1d": (
        [node("Conv", ["x", "w", "b"], ["y"], "n", dilations=[2])],
        [2, 4, 12],
        {"w": array(6, 4, 3), "b": array(6)},
    ),
    "Conv3d": (
        [node("Conv", ["x", "w", "b"], ["y"], "n", pads=[1] * 6)],
        [1, 2, 4, 5, 6],
        {"w": array(6, 2, 3, 3, 3), "b": array(6)},
    ),
    "ConvTranspose": (
        [node("ConvTranspose", ["x", "w", "b"], ["y"], "n", strides=[2, 2], pads=[1, 0, 1, 1], group=2)],
        [1, 4, 5, 6],
        {"w": array(4, 3, 3, 3), "b": array(6)},
    ),
    "Gemm": (
        [node("Gemm", ["x", "w", "b"], ["y"], "n", transB=1)],
        [3, 8],
        {"w": array(6, 8), "b": array(6)},
    ),
    "MatMul": ([node("MatMul", ["x", "w"], ["y"], "n")], [1, 4, 8], {"w": array(8, 6)}),
    "InstanceNormalization": (
        [node("InstanceNormalization", ["x", "w", "b"], ["y"], "n")],
        [2, 6, 5, 5],
        {"w": array(6), "b": array(6, seed=2)},
    ),
    "LayerNormalization": (
        [node("LayerNormalization", ["x", "w", "b"], ["y"], "n", axis=-1)],
        [1, 4, 6],
        {"w": array(6), "b": array(6, seed=2)},
    ),
}


@pytest.mark.parametrize("changes", [{}, {"weights": {"per_channel": True}}], ids=["tensor", "channel"])
@pytest.mark.parametrize("op", _OPERATORS)
def test_every_operator_is_seen_and_tuned(op: str, changes: dict[str, Any]) -> None:
    nodes, shape, constants = _OPERATORS[op]
    model = build(nodes, {"x": shape}, ["y"], constants)
    generator = np.random.default_rng(3)
    samples = [{"x": np.asarray(generator.normal(0, 1, shape), np.float32)} for _ in range(12)]
    case = calibrated(model, samples, "a8w8", changes)
    (unit,) = _units(case, "adaquant")
    _agrees(case, unit)
    state, reports = case.tune(algorithm="adaquant", learning_rate=1e-3, iterations=80)
    assert len(reports) == 1
    assert case.sqnr(state, samples) >= case.sqnr(case.state, samples) - 0.1
    rounds = case.tune(iterations=80)[1]
    assert len(rounds) == (0 if unit.layer.normalizes else 1)


def test_shared_weights_are_left_alone() -> None:
    nodes = [node("MatMul", ["x", "w"], ["m"], "one"), node("MatMul", ["m", "w"], ["y"], "two")]
    samples = [{"x": array(2, 4, seed=i)} for i in range(4)]
    case = calibrated(build(nodes, {"x": [2, 4]}, ["y"], {"w": array(4, 4)}), samples)
    assert case.tune() == (case.state, ())


def test_rounding_starts_at_the_codes_there_are() -> None:
    generator = np.random.default_rng(0)
    real = generator.normal(0, 30, (2, 5, 40))
    codes = np.clip(np.rint(real + generator.normal(0, 0.8, real.shape)), -127, 127)
    one = np.ones((1, 1, 1))
    weights = LayerWeights(real, codes, one, -127 * one, 127 * one, 1.0, np.zeros((2, 5)), None)
    base, share = rounding_start(weights)
    assert ((base >= -127) & (base <= 126)).all()
    learner = AdaRound(weights, Finetune(), "cpu")
    np.testing.assert_array_equal(learner.hard_codes().numpy(), codes)
    near = (codes == np.rint(real)) & (np.abs(share - 0.5) > 0.03) & (np.abs(real) < 126)
    np.testing.assert_allclose(learner.soft_codes().detach().numpy()[near], real[near], atol=1e-4)


def _rectified(alpha: torch.Tensor) -> torch.Tensor:
    return torch.clamp(torch.sigmoid(alpha) * 1.2 - 0.1, 0, 1)


def test_the_rectified_sigmoid_and_its_inverse() -> None:
    share = np.linspace(0, 1, 11)
    alpha = inverse_rectified(share)
    np.testing.assert_allclose(alpha, -np.log(1.2 / (share + 0.1) - 1))
    np.testing.assert_allclose(_rectified(torch.from_numpy(alpha)).numpy(), share, atol=1e-12)


def test_the_exponent_follows_a_cosine_over_even_numbers() -> None:
    settings = Finetune(iterations=1000)
    assert regulariser_exponent(199, settings) is None
    seen = [regulariser_exponent(step, settings) for step in range(200, 1000)]
    assert sorted(set(seen), reverse=True) == list(range(20, 0, -2))
    for step in (200, 500, 999):
        expected = 2 + 9 * (1 + np.cos(np.pi * (step - 200) / 800))
        assert abs(seen[step - 200] - expected) <= 1
    assert regulariser_exponent(99, Finetune(iterations=100, beta_range=(1.0, 0.5))) == 2


@pytest.mark.parametrize("exponent", [1, 3, 5, 7, 13, 19])
def test_an_odd_power(exponent: int) -> None:
    x = torch.linspace(-1, 1, 41)
    torch.testing.assert_close(odd_power(x.clone(), exponent), x**exponent)


_BEHIND: dict[str, Activation | None] = {
    "nothing": None,
    "Relu": Activation("Relu"),
    "Clip": Activation("Clip", bounds=(-1.0, 4.0)),
    "open Clip": Activation("Clip", bounds=(None, 2.0)),
    "Sigmoid": Activation("Sigmoid"),
    "PRelu": Activation("PRelu", slope=np.float32([0.3])),
}


@pytest.mark.parametrize("exponent", [None, 20, 2])
@pytest.mark.parametrize("behind", _BEHIND)
@pytest.mark.parametrize("shape", [(1, 3, 5), (4, 1, 9), (2, 3, 5)], ids=["whole", "depthwise", "groups"])
def test_the_gradient_is_autograds(shape: tuple[int, int, int], behind: str, exponent: int | None) -> None:
    generator = np.random.default_rng(0)
    one, step = np.ones((1, 1, 1)), 2.0 ** generator.integers(-3, 0, (*shape[:2], 1))
    real = generator.normal(0, 3, shape)
    bias = generator.normal(0, 1, shape[:2])
    weights = LayerWeights(real * step, np.rint(real), step, -127 * one, 127 * one, 0.5, bias, None)
    layer = TorchLayer(weights, _BEHIND[behind], "cpu")
    learner = AdaRound(weights, Finetune(reg_param=0.5), "cpu")
    x = tensor(generator.integers(-9, 9, (20, shape[0], shape[2])), "cpu")
    y = tensor(generator.normal(0, 3, (20, *shape[:2])), "cpu")
    learner.learn(layer, x, y, exponent)

    alpha = learner.parameters()[0].clone().requires_grad_(True)
    up = _rectified(alpha)
    base = tensor(rounding_start(weights)[0], "cpu")
    loss = reconstruction(layer.outputs(x, base + up, tensor(bias, "cpu")), y)
    if exponent is not None:
        loss = loss + 0.5 * (1 - (2 * up - 1).abs().pow(exponent)).sum()
    loss.backward()
    torch.testing.assert_close(learner.parameters()[0].grad, alpha.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [3, 1], ids=["groups", "depthwise"])
@pytest.mark.parametrize("counts", [(70, 70, 70, 70, 70), (70, 64, 70, 65, 80), (5, 6, 5, 5, 5)])
def test_a_step_sees_every_other_place_of_its_samples(counts: tuple[int, ...], size: int) -> None:
    starts = tuple(np.cumsum([0, *counts]).tolist())
    inputs = np.arange(starts[-1], dtype=np.int16)[:, None, None] + np.zeros((1, 2, 4), np.int16)
    targets = np.asarray(inputs[:, :, :size], np.float32)
    feed = LayerFeed(Rows(inputs, targets, None, starts, 4), "cpu", Part(groups=slice(1, None)))
    drawn = feed.draws(torch.Generator().manual_seed(0), 50, 2)
    assert drawn.shape == (50, 2)
    stride = 1 if min(counts) < 64 else 2
    for each in drawn:
        x, y = feed.batch(each)
        assert x.shape[1:] == (1, 4)
        assert y.shape[1:] == (1, size)
        rows = x[:, 0, 0].long()
        torch.testing.assert_close(y[:, 0, 0].long(), rows)
        of = np.searchsorted(starts, each.numpy(), side="right") - 1
        assert len(set(of)) == 2
        assert max(of) < 4
        assert all(0 <= at - starts[sample] < stride for at, sample in zip(each.tolist(), of, strict=True))
        whole = [np.arange(at, starts[i + 1], stride) for at, i in zip(each.tolist(), of, strict=True)]
        np.testing.assert_array_equal(rows.numpy(), np.concatenate(whole))


@pytest.mark.parametrize(
    ("qtype", "zero", "expected"),
    [
        ("uint8", 128, "int8"),
        ("uint8", 0, "uint8"),
        ("uint8", 7, "int16"),
        ("int8", 0, "int8"),
        ("uint16", 9, "int32"),
    ],
)
def test_codes_take_the_smallest_type(qtype: str, zero: int, expected: str) -> None:
    kind = QType(qtype)
    params = QParams(np.asarray(1, np.float32), np.asarray(zero, kind.dtype), kind)
    assert narrow_type(params) == np.dtype(expected)


def test_each_layer_has_a_seed_of_its_own() -> None:
    assert len({layer_seed(1, "a"), layer_seed(1, "b"), layer_seed(2, "a")}) == 3
    assert layer_seed(1, "a") == layer_seed(1, "a") < 2**63
