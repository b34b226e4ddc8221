"""Rounding of weights whose zero point is not zero: asymmetric ones, and symmetric ones without a sign."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import build, node, normal, rng
from roundel import quantize


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_codes_count_from_the_zero_point(kind: str, symmetric: bool) -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="one", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "k"], ["y"], name="two", pads=[1, 1, 1, 1]),
    ]
    constants = {
        "w": normal(8, 3, 3, 3) + np.float32(0.8),
        "b": normal(8, seed=1),
        "k": normal(4, 8, 3, 3, seed=2) - np.float32(0.5),
    }
    model = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)
    generator = rng(3)
    data = [{"x": generator.normal(0, 1, (1, 3, 8, 8)).astype(np.float32)} for _ in range(20)]
    recipe = {
        "activations": {"type": "int16"},
        "weights": {"type": kind, "symmetric": symmetric, "per_channel": False},
        "improve": {"equalize": {"enabled": False}},
    }
    result = quantize(model, preset="a16w8", data=data, effort="fast", changes=recipe)
    step = next(report for report in result.record.improvements if report.step == "rounding")
    assert step.kept
    assert all(layer.after_db > 20 for layer in step.layers)
    if not symmetric or kind == "uint8":
        zeros = [t for t in result.model.graph.initializer if t.name.endswith("_zero_point")]
        assert any(np.any(np.frombuffer(t.raw_data, np.uint8)) for t in zeros if t.raw_data)
