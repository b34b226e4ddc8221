"""Every option of improve.finetune does something."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_cases import Case, calibrated, conv_net, pictures, same

pytest.importorskip("torch")

from roundel.recipe.settings import Finetune

# (what both runs share, what the second changes)
_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "algorithm": ({}, {"algorithm": "adaquant", "learning_rate": 1e-3}),
    "iterations": ({"early_stop": False}, {"iterations": 20}),
    "learning_rate": ({}, {"learning_rate": 0.01}),
    "batch_size": ({}, {"batch_size": 8}),
    "data_size": ({}, {"data_size": 10}),
    "seed": ({}, {"seed": 3}),
    "early_stop": ({"iterations": 400, "early_stop": False}, {"early_stop": True}),
    "target_op_types": ({}, {"target_op_types": ("Gemm",)}),
    "update_bias": ({"algorithm": "adaquant", "learning_rate": 1e-3}, {"update_bias": False}),
    "reg_param": ({}, {"reg_param": 10.0}),
    "beta_range": ({"reg_param": 1.0}, {"beta_range": (4.0, 1.5)}),
    "warm_start": ({"reg_param": 1.0}, {"warm_start": 0.8}),
}
_ELSEWHERE = {"optim_device", "infer_device"}  # in test_finetune.py


@pytest.fixture(scope="module")
def case() -> Case:
    return calibrated(conv_net(residual=True), pictures(), "xint8")


@pytest.mark.parametrize("option", _CHANGES)
def test_an_option_changes_the_result(case: Case, option: str) -> None:
    shared, changed = _CHANGES[option]
    one, one_reports = case.tune(**shared)
    other, other_reports = case.tune(**{**shared, **changed})
    steps = [r.iterations for r in one_reports] != [r.iterations for r in other_reports]
    assert not same(one, other) or (option == "early_stop" and steps)


def test_no_option_is_left_out() -> None:
    assert set(_CHANGES) | _ELSEWHERE == set(Finetune.model_fields)


def test_only_the_named_operators_are_tuned(case: Case) -> None:
    assert [r.op for r in case.tune(target_op_types=("Gemm",))[1]] == ["Gemm"]
    assert case.tune(target_op_types=("MatMul",)) == (case.state, ())


def test_biases_stay_when_they_are_not_to_be_tuned(case: Case) -> None:
    state, _ = case.tune(algorithm="adaquant", learning_rate=1e-3, update_bias=False)
    moved = {name for name in state.codes if name.startswith("b")}
    for name in moved:
        assert state.params[name].same_as(case.state.params[name])
