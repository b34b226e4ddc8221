"""Bias correction of layers whose weights have no codes: bfloat16, float16 and block formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from finetune_cases import Case, calibrated, conv_net, pictures
from helpers import build, node, normal
from roundel.improve.biases import correct_biases, find_shifts
from roundel.numerics.floats import round_bfloat16
from roundel.numerics.metrics import Closeness
from roundel.types import Sample


@pytest.fixture(scope="module")
def fresh() -> Sequence[Sample]:
    return pictures(24, seed=77)


def corrected(case: Case) -> Any:
    return correct_biases(case.model, case.state, case.samples, case.recipe)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("bf16", {}),
        ("bf16", {"floats": {"form": "cast"}, "output": {"half_weights": True}}),
        ("bf16", {"weights": {"scaled": True}}),
        ("bf16_bfp16", {}),
        ("bfp16", {}),
        ("mxint8", {}),
    ],
)
def test_the_error_falls(preset: str, changes: dict[str, Any], fresh: Sequence[Sample]) -> None:
    case = calibrated(conv_net(), pictures(24), preset, changes)
    state, reports = corrected(case)
    assert [r.layer for r in reports] == ["conv1", "conv2", "conv3", "fc"]
    assert all(r.after_db >= r.before_db for r in reports)
    assert case.sqnr(state, fresh) > case.sqnr(case.state, fresh)


def test_only_biases_change_and_they_fit_their_type() -> None:
    case = calibrated(conv_net(), pictures(24), "bf16")
    state, _ = corrected(case)
    assert state.values
    assert set(state.values) <= {"b1", "b2", "b3", "b4"}
    for content in state.values.values():
        np.testing.assert_array_equal(round_bfloat16(content), content)


def test_the_reported_error_is_that_of_the_written_model() -> None:
    """Later layers see the corrected ones: the last layer's error is the model's own."""
    case = calibrated(conv_net(), pictures(24), "bf16")
    state, reports = corrected(case)
    before = case.sqnr(case.state, case.samples[-5:])
    after = case.sqnr(state, case.samples[-5:])
    assert after > before
    assert reports[-1].after_db > reports[-1].before_db


def test_an_addition_behind_a_product_is_a_bias_too() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["p"], name="product"),
        node("Add", ["p", "b"], ["y"], name="bias"),
        node("Relu", ["y"], ["r"], name="relu"),
        node("MatMul", ["r", "v"], ["q"], name="again"),
        node("Add", ["c", "q"], ["z"], name="other"),
    ]
    constants = {"w": normal(16, 8), "b": normal(8), "v": normal(8, 8, seed=1), "c": normal(8, seed=2)}
    model = build(nodes, {"x": [1, 4, 16]}, ["z"], constants)
    samples = [{"x": 1 + normal(1, 4, 16, seed=seed)} for seed in range(20)]
    case = calibrated(model, samples, "bf16")
    assert [s.node for s in find_shifts(case.model.graph, case.state.plan)] == ["bias", "other"]
    state, _ = corrected(case)
    assert case.sqnr(state, samples) > case.sqnr(case.state, samples)


def test_the_factor_of_a_gemm_counts(fresh: Sequence[Sample]) -> None:
    nodes = [
        node("Flatten", ["x"], ["f"], name="flat"),
        node("Gemm", ["f", "w", "b"], ["y"], name="fc", beta=0.25),
    ]
    constants = {"w": normal(192, 5), "b": normal(5, scale=8)}
    case = calibrated(build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants), pictures(24), "bf16")
    state, _ = corrected(case)
    assert case.sqnr(state, fresh) >= case.sqnr(case.state, fresh) - 0.5


def test_a_shared_bias_and_integers_are_left_alone() -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="one"),
        node("Conv", ["c", "k", "b"], ["y"], name="two"),
    ]
    constants = {"w": normal(4, 3, 1, 1), "k": normal(4, 4, 1, 1, seed=1), "b": normal(4, seed=2)}
    model = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)
    shared = calibrated(model, pictures(8), "bf16", {"prepare": {"unshare_biases": False}})
    assert not list(find_shifts(shared.model.graph, shared.state.plan))
    integers = calibrated(model, pictures(8), "a8w8_minmax")
    assert not list(find_shifts(integers.model.graph, integers.state.plan))


def test_effort_fast_through_the_front_door(fresh: Sequence[Sample]) -> None:
    plain = roundel.quantize(conv_net(), recipe="bf16")
    better = roundel.quantize(conv_net(), recipe="bf16", effort="fast", data=pictures(24))
    (step,) = better.record.improvements
    assert step.step == "bias correction"
    assert step.kept
    assert _sqnr(better.model, fresh) > _sqnr(plain.model, fresh) + 1


def _sqnr(model: onnx.ModelProto, samples: Sequence[Sample]) -> float:
    from helpers import run

    total = Closeness()
    for sample in samples:
        total = total.merge(Closeness.of(run(conv_net(), sample)[0], run(model, sample)[0]))
    return total.sqnr_db
