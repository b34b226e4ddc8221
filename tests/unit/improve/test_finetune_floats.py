"""AdaQuant where weights or activations have no codes: bfloat16, float16, and mixtures with integers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import roundel
from finetune_cases import calibrated, conv_net, pictures
from helpers import build, node, normal

pytest.importorskip("torch")

from roundel.numerics.floats import round_bfloat16, to_float16
from roundel.types import Sample
from roundel.work.checkpoints import Store

FEW: dict[str, Any] = {"iterations": 60, "learning_rate": 1e-4}


@pytest.fixture(scope="module")
def fresh() -> Sequence[Sample]:
    return pictures(24, seed=77)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("bf16", {}),
        ("bf16", {"floats": {"form": "cast"}, "output": {"half_weights": True}}),
        ("bf16", {"activations": {"scaled": True}, "weights": {"scaled": True}}),
        ("fp16", {}),
        ("bfp16", {}),
        ("mx9", {}),
        ("mxint8", {}),
        ("bf16_bfp16", {}),
    ],
)
def test_the_error_falls(preset: str, changes: dict[str, Any], fresh: Sequence[Sample]) -> None:
    case = calibrated(conv_net(), pictures(24), preset, changes)
    state, reports = case.tune(algorithm="adaquant", **FEW)
    assert [r.layer for r in reports] == ["conv1", "conv2", "conv3", "fc"]
    assert any(r.kept for r in reports)
    assert case.sqnr(state, fresh) > case.sqnr(case.state, fresh)


@pytest.mark.parametrize(("preset", "held"), [("bf16", round_bfloat16), ("fp16", to_float16)])
def test_what_is_learned_is_what_the_type_holds(preset: str, held: Any) -> None:
    case = calibrated(conv_net(), pictures(24), preset)
    state, reports = case.tune(algorithm="adaquant", **FEW)
    assert state.values
    assert not state.codes
    for name, content in state.values.items():
        assert content.dtype == np.float32
        assert content.shape == case.model.graph.initializers[name].const_value.shape.numpy()  # type: ignore[union-attr]
        np.testing.assert_array_equal(held(content), content)
    changed = {"conv1": "w1", "conv2": "w2", "conv3": "w3", "fc": "w4"}
    assert {changed[r.layer] for r in reports if r.kept} <= set(state.values)


def test_bfloat16_inputs_of_integer_weights(fresh: Sequence[Sample]) -> None:
    """Rounding can be learned whatever the input is."""
    changes = {"activations": {"type": "bfloat16"}, "bias": {"type": "float"}}
    base = {"improve": {"rounding": False, "ranges": False, "equalize": {"enabled": False}}}
    recipe = {"weights": {"type": "int8"}, **base}
    case = calibrated(conv_net(), pictures(24), "bf16", {**recipe, **changes})
    for algorithm in ("adaround", "adaquant"):
        state, reports = case.tune(algorithm=algorithm, iterations=100)
        assert len(reports) == 4
        assert set(state.codes) <= {"w1", "w2", "w3", "w4"}
        assert case.sqnr(state, fresh) > case.sqnr(case.state, fresh)


def test_a_normalization() -> None:
    nodes = [node("LayerNormalization", ["x", "g", "h"], ["y"], name="norm", axis=-1)]
    gain, shift = np.abs(normal(16)) + 1, normal(16, seed=1)
    model = build(nodes, {"x": [1, 4, 16]}, ["y"], {"g": gain, "h": shift})
    samples = [{"x": normal(1, 4, 16, seed=seed)} for seed in range(24)]
    case = calibrated(model, samples, "bf16")
    _, reports = case.tune(algorithm="adaquant", **FEW)
    assert [r.layer for r in reports] == ["norm"]


def test_a_checkpoint_holds_real_numbers(tmp_path: Path) -> None:
    case = calibrated(conv_net(), pictures(24), "bf16")
    whole, _ = case.tune(algorithm="adaquant", store=Store(tmp_path), **FEW)
    again, reports = case.tune(algorithm="adaquant", store=Store(tmp_path, resume=True), **FEW)
    assert len(reports) == 4
    assert whole.values.keys() == again.values.keys()
    for name, content in whole.values.items():
        np.testing.assert_array_equal(content, again.values[name])


def test_the_preset_runs_as_a_user_calls_it(tmp_path: Path) -> None:
    changes = {"improve": {"finetune": FEW}, "output": {"half_weights": True}}
    path = tmp_path / "out.onnx"
    result = roundel.quantize(conv_net(), path, recipe="bf16_adaquant", data=pictures(24), changes=changes)
    steps = result.record.improvements
    assert [step.step for step in steps] == ["bias correction", "fine-tuning"]
    assert all(step.kept for step in steps)
    assert steps[1].after_db > steps[1].before_db
    kinds = {i.data_type for i in result.model.graph.initializer if i.dims}
    assert TensorProto.BFLOAT16 in kinds


def test_adaround_is_refused() -> None:
    changes = {"improve": {"finetune": {"algorithm": "adaround"}}}
    with pytest.raises(roundel.RecipeError, match="AdaRound"):
        roundel.quantize(conv_net(), recipe="bf16_adaquant", data=pictures(8), changes=changes)
