"""Outputs are judged apart, and layers by what their error does to the outputs, not by how large it is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import roundel
from helpers import build, node, normal
from roundel.example import load_example
from roundel.measure.types import Comparison


def spared_net() -> onnx.ModelProto:
    """Two branches into one output; the second branch is weighed with a thousandth."""
    nodes = [
        node("Conv", ["x", "w0"], ["a"], name="loud"),
        node("Conv", ["x", "w1"], ["b"], name="quiet"),
        node("Sigmoid", ["b"], ["p"], name="bend"),
        node("Mul", ["p", "little"], ["c"], name="weigh"),
        node("Add", ["a", "c"], ["y"], name="join"),
    ]
    weights = {"w0": normal(4, 3, 3, 3), "w1": normal(4, 3, 3, 3), "little": np.float32(0.001)}
    weights["w1"][:, :, 0, 0] *= 60  # one large value: its weights and results are stored coarsely
    return build(nodes, {"x": [1, 3, 12, 12]}, ["y"], weights)


@pytest.fixture(scope="module")
def spared() -> Comparison:
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((1, 3, 12, 12)).astype(np.float32) for _ in range(6)]
    made = roundel.quantize(spared_net(), preset="a8w8_minmax", data=data)
    return roundel.compare(spared_net(), made.model, data)


def test_a_layer_that_nothing_depends_on_costs_little(spared: Comparison) -> None:
    loud, quiet = spared.tensor("a"), spared.tensor("b")
    assert loud.effect is not None
    assert quiet.effect is not None
    assert quiet.introduced is not None
    assert quiet.effect > quiet.introduced.sqnr_db + 20
    assert spared.by_effect().index(loud) < spared.by_effect().index(quiet)


def test_an_effect_is_the_error_at_the_output_with_that_layer_alone(spared: Comparison) -> None:
    """Of the last layer, that is the error which it introduces."""
    last = spared.tensor("y")
    assert last.introduced is not None
    assert last.effect == pytest.approx(last.introduced.sqnr_db, abs=1.0)


def joined_net() -> onnx.ModelProto:
    """Boxes in pixels and probabilities in one output, as detectors have them."""
    nodes = [
        node("Conv", ["x", "w"], ["f"], name="trunk"),
        node("Conv", ["f", "wb"], ["b"], name="boxes"),
        node("Conv", ["f", "ws"], ["s0"], name="scores"),
        node("Sigmoid", ["s0"], ["s"], name="sure"),
        node("Concat", ["b", "s"], ["y"], name="join", axis=1),
    ]
    weights = {"w": normal(8, 3, 3, 3), "wb": 200 * normal(4, 8, 1, 1), "ws": normal(5, 8, 1, 1)}
    return build(nodes, {"x": [1, 3, 8, 8]}, ["y"], weights)


def test_boxes_and_scores_are_judged_apart_everywhere() -> None:
    rng = np.random.default_rng(1)
    data = [rng.standard_normal((1, 3, 8, 8)).astype(np.float32) for _ in range(6)]
    made = roundel.quantize(joined_net(), preset="a8w8_minmax", data=data)
    told = {out.name: out.sqnr_db for out in made.record.outputs}
    found = {
        out.name: out.difference.sqnr_db for out in roundel.compare(joined_net(), made.model, data).outputs
    }
    assert list(told) == list(found) == ["y[:, 0:4]", "y[:, 4:9]"]
    assert found == pytest.approx(told, abs=0.01)
    assert made.record.verdict.accurate.count("the worst output y[:, ") == 1


def test_effects_do_not_depend_on_where_the_work_is_done() -> None:
    example = load_example()
    made = roundel.quantize(example.model_path, preset="a8w8_minmax", data=example.calibration[:4])
    local = roundel.compare(example.model_path, made.model, example.calibration[:6])
    workers = roundel.executor("processes", workers=2)
    spread = roundel.compare(example.model_path, made.model, example.calibration[:6], executor=workers)
    assert [t.effect for t in local.tensors] == [t.effect for t in spread.tensors]
    assert sum(t.effect is not None for t in local.tensors) > 5
