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
from roundel.improve.finetune_rows import SeenRows, gather_rows, layer_seed, narrow_type
from roundel.improve.layers import Unit, find_units
from roundel.improve.stepwise import StepwiseRunner
from roundel.improve.torch_training import (
    AdaRound,
    TorchLayer,
    beta,
    inverse_rectified,
    rectified,
    rounding_start,
    tensor,
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


def test_the_rectified_sigmoid_and_its_inverse() -> None:
    share = np.linspace(0, 1, 11)
    alpha = inverse_rectified(share)
    np.testing.assert_allclose(alpha, -np.log(1.2 / (share + 0.1) - 1))
    np.testing.assert_allclose(rectified(torch.sigmoid(torch.from_numpy(alpha))).numpy(), share, atol=1e-12)


def test_the_exponent_follows_a_cosine() -> None:
    settings = Finetune(iterations=1000)
    assert beta(199, settings) is None
    for step in (200, 500, 999):
        expected = 2 + 9 * (1 + np.cos(np.pi * (step - 200) / 800))
        assert beta(step, settings) == pytest.approx(expected)


@pytest.mark.parametrize("exponent", [None, 20.0, 2.5])
def test_the_gradient_is_that_of_the_loss_and_the_regulariser(exponent: float | None) -> None:
    one, generator = np.ones((1, 1, 1)), np.random.default_rng(0)
    real = generator.normal(0, 3, (1, 3, 5))
    weights = LayerWeights(real, np.rint(real), one, -127 * one, 127 * one, 1.0, np.zeros((1, 3)), None)
    learner = AdaRound(weights, Finetune(reg_param=0.5), "cpu")
    pull = torch.from_numpy(generator.normal(0, 1, real.shape).astype(np.float32))
    (learner.soft_codes() * pull).sum().backward()
    learner.pass_back(None if exponent is None else torch.tensor(exponent))

    alpha = learner.parameters()[0].detach().clone().requires_grad_(True)
    up = rectified(torch.sigmoid(alpha))
    loss = (up * pull).sum()
    if exponent is not None:
        loss = loss + 0.5 * (1 - (2 * up - 1).abs().pow(exponent)).sum()
    loss.backward()
    assert alpha.grad is not None
    torch.testing.assert_close(learner.parameters()[0].grad, alpha.grad)


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
