"""Tensors that one reader needs in another scale than the rest: it reads them through a pair of its own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from helpers import activations, assert_sound, build, feeds, node, normal, quantize, sqnr
from roundel.rules import check

IMAGE = {"x": [1, 3, 8, 8]}


def _joined(small: float, *, pool: bool = False) -> onnx.ModelProto:
    """A small branch that a Concat with a large one reads, and a layer of its own."""
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Conv", ["x", "ws"], ["s"]),
        *([node("MaxPool", ["s"], ["p"], kernel_shape=[1, 1])] if pool else []),
        node("Concat", ["c", "p" if pool else "s"], ["j"], axis=1, name="join"),
        node("Conv", ["j", "w2"], ["y"]),
        node("Conv", ["s", "w3"], ["z"]),
    ]
    constants = {
        "w": normal(4, 3, 1, 1),
        "ws": normal(4, 3, 1, 1, seed=8, scale=small),
        "w2": normal(4, 8, 1, 1, seed=2),
        "w3": normal(4, 4, 1, 1, seed=4),
    }
    return build(nodes, IMAGE, ["y", "z"], constants)


@pytest.mark.parametrize("effort", ["none", "fast"])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("preset", ["xint8", "a8w8"])
@pytest.mark.parametrize("small", [0.1, 0.01, 1e-4])
def test_a_small_branch_keeps_its_bits(small: float, preset: str, pool: bool, effort: str) -> None:
    model, data = _joined(small, pool=pool), feeds(IMAGE)
    result = quantize(model, preset, data, effort=effort)
    assert_sound(model, result.model)
    assert sqnr(model, result, data) > 29


@pytest.mark.parametrize("preset", ["xint8", "a8w8"])
def test_the_concat_still_works_in_one_scale(preset: str) -> None:
    result = quantize(_joined(0.01), preset, feeds(IMAGE))
    stored = activations(result.model)
    assert stored["s"].scale < stored["j"].scale / 4
    assert stored["s_DequantizeLinear_Output"].scale == stored["j"].scale == stored["c"].scale
    assert "through a pair of its own" in result.plan.tensors["s"].reason
    assert not [finding for finding in check(result.model).findings if finding.rule.startswith("Q0")]


@pytest.mark.parametrize("preset", ["xint8", "a8w8"])
def test_branches_of_like_size_stay_aligned(preset: str) -> None:
    result = quantize(_joined(1.0), preset, feeds(IMAGE))
    assert len({float(activations(result.model)[name].scale) for name in ("c", "s", "j")}) == 1
    assert "s_DequantizeLinear_Output" not in activations(result.model)


def test_a_small_branch_that_only_the_concat_reads_stays_aligned() -> None:
    model = _joined(0.01)
    del model.graph.node[-1], model.graph.output[1]
    result = quantize(model, "xint8", feeds(IMAGE))
    assert len({float(activations(result.model)[name].scale) for name in ("c", "s", "j")}) == 1


def _silu(scale: float) -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Sigmoid", ["c"], ["g"]),
        node("Mul", ["c", "g"], ["m"]),
        node("Conv", ["m", "w2"], ["y"]),
    ]
    constants = {"w": normal(4, 3, 1, 1, scale=scale), "w2": normal(4, 4, 1, 1, seed=2)}
    return build(nodes, IMAGE, ["y"], constants)


@pytest.mark.parametrize("effort", ["none", "fast"])
@pytest.mark.parametrize("scale", [30.0, 120.0, 1000.0])
def test_a_gate_does_not_cut_off_what_it_gates(scale: float, effort: str) -> None:
    model, data = _silu(scale), feeds(IMAGE)
    result = quantize(model, "xint8", data, effort=effort)
    assert_sound(model, result.model)
    assert sqnr(model, result, data) > 29
    stored = activations(result.model)
    assert float(stored["c"].scale) > 1
    assert float(stored["c_DequantizeLinear_Output"].scale) == 2.0**-5
    assert not [found for found in check(result.model).findings if found.rule.startswith("Q0")]


def test_a_gate_that_its_limit_suits_has_no_pair_of_its_own() -> None:
    result = quantize(_silu(10.0), "xint8", feeds(IMAGE))
    assert Counter(n.op_type for n in result.model.graph.node)["QuantizeLinear"] == 5
    assert np.isclose(float(activations(result.model)["c"].scale), 0.5)
