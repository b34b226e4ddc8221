"""The shift limits, each alone, with positions small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from helpers import activations, build, feeds, node, normal, quantize, sqnr, weights
from roundel.calibrate import positions
from roundel.calibrate.positions import breaches, position, refine
from roundel.errors import RecipeError, VerifyError
from roundel.plan import build_plan
from roundel.recipe.load import load_recipe
from roundel.stages import prepare
from roundel.state import State
from roundel.targets.shifts import ShiftLimits
from roundel.types import QParams, QType

IMAGE = [1, 2, 4, 4]
GATE = {"alpha": 1 / 6, "beta": 0.5}


def two_inputs(op: str) -> onnx.ModelProto:
    return build([node(op, ["a", "b"], ["y"], "n")], {"a": IMAGE, "b": IMAGE}, ["y"])


def layer(*, leaky: bool = False, bias: bool = True) -> onnx.ModelProto:
    made = ["c"] if leaky else ["y"]
    nodes = [node("Conv", ["x", "w", "b"] if bias else ["x", "w"], made, "n")]
    if leaky:
        nodes.append(node("LeakyRelu", ["c"], ["y"], "l", alpha=0.125))
    constants = {"w": normal(3, 2, 1, 1), "b": normal(3, seed=1)}
    return build(nodes, {"x": IMAGE}, ["y"], constants if bias else {"w": constants["w"]})


def sigmoid(op: str = "HardSigmoid") -> onnx.ModelProto:
    options = GATE if op == "HardSigmoid" else {}
    return build([node(op, ["x"], ["y"], "n", **options)], {"x": IMAGE}, ["y"])


def swish() -> onnx.ModelProto:
    nodes = [node("HardSigmoid", ["x"], ["g"], "s", **GATE), node("Mul", ["g", "x"], ["y"], "n")]
    return build(nodes, {"x": IMAGE}, ["y"])


def state_of(model: onnx.ModelProto, given: dict[str, int], **npu: bool) -> tuple[Any, State, Any]:
    """A plan whose tensors have the given positions."""
    settings = load_recipe("xint8_signed", {"npu": npu})
    ready = prepare(model, settings)
    plan = build_plan(ready.model, settings)
    zero = np.zeros((), np.int8)
    params = {n: QParams(np.asarray(2.0 ** -given[n], np.float32), zero, QType.INT8) for n in plan.tensors}
    return ready.model, replace(ready, plan=plan, params=params), settings.npu


def refined(model: onnx.ModelProto, given: dict[str, int], **npu: bool) -> dict[str, int]:
    """Positions that moved, after refinement."""
    graph, state, options = state_of(model, given, **npu)
    after = refine(graph, state, options)
    assert not breaches(graph.graph, after, options)
    found = {name: position(float(p.scale)) for name, p in after.params.items()}
    return {name: p for name, p in found.items() if p != given[name]}


CASES = [
    # rule, model, positions, what moves where
    ("adjust_shift_read", two_inputs("Add"), {"a": 12, "b": 3, "y": 3}, {"a": 10}),
    ("adjust_shift_read", two_inputs("Sub"), {"a": -4, "b": 9, "y": 3}, {"b": 3}),
    ("adjust_shift_read", two_inputs("Add"), {"a": 10, "b": 3, "y": 3}, {}),
    ("adjust_shift_write", two_inputs("Add"), {"a": 0, "b": 2, "y": 9}, {"y": 7}),
    ("adjust_shift_write", two_inputs("Sub"), {"a": 0, "b": 2, "y": 9}, {"y": 7}),
    ("adjust_shift_write", two_inputs("Add"), {"a": 30, "b": 31, "y": 2}, {"a": 27}),
    ("adjust_shift_write", two_inputs("Add"), {"a": 27, "b": 28, "y": 2}, {}),
    ("adjust_shift_write", two_inputs("Mul"), {"a": 3, "b": 4, "y": 9}, {"y": 7}),
    ("adjust_shift_write", two_inputs("Mul"), {"a": 30, "b": 20, "y": 2}, {"a": 14}),
    ("adjust_shift_write", two_inputs("Mul"), {"a": 14, "b": 20, "y": 2}, {}),
    ("adjust_shift_cut", layer(bias=False), {"x": 10, "w": 20, "y": 3}, {"w": 9}),
    ("adjust_shift_cut", layer(bias=False), {"x": 10, "w": 9, "y": 3}, {}),
    ("adjust_shift_cut", layer(bias=False), {"x": 2, "w": -3, "y": 2}, {"y": -1}),
    # The output yields four bits, the weights saturate for the rest.
    ("adjust_shift_cut", layer(bias=False), {"x": 2, "w": -10, "y": 2}, {"y": -2, "w": -4}),
    # 12 - b is to lie in 8 - 16 .. 15.
    ("adjust_shift_bias", layer(), {"x": 5, "w": 7, "b": 25, "y": 4}, {"b": 20}),
    ("adjust_shift_bias", layer(), {"x": 5, "w": 7, "b": 20, "y": 4}, {}),
    ("adjust_shift_bias", layer(), {"x": 5, "w": 7, "b": -9, "y": 4}, {"w": 1}),
    ("adjust_shift_bias", layer(), {"x": 5, "w": 7, "b": 13, "y": 4}, {}),
    ("adjust_shift_bias", layer(leaky=True), {"x": 5, "w": 7, "b": 13, "y": 4}, {"b": 12}),
    ("adjust_hard_sigmoid", sigmoid(), {"x": -3, "y": 7}, {"x": 0}),
    ("adjust_hard_sigmoid", sigmoid(), {"x": 17, "y": 7}, {"x": 15}),
    ("adjust_hard_sigmoid", sigmoid(), {"x": 3, "y": 5}, {"y": 7}),
    ("adjust_hard_sigmoid", sigmoid(), {"x": 1, "y": 18}, {"y": 15}),
    ("adjust_hard_sigmoid", sigmoid("Sigmoid"), {"x": -3, "y": 5}, {"x": 0, "y": 7}),
    ("adjust_shift_swish", swish(), {"x": 9, "g": 14, "y": 2}, {"g": 8}),
    ("adjust_shift_swish", swish(), {"x": 2, "g": 7, "y": 12}, {"y": 9}),
    ("adjust_shift_swish", two_inputs("Mul"), {"a": 9, "b": 14, "y": 2}, {}),
]


@pytest.mark.parametrize(("rule", "model", "given", "expected"), CASES)
def test_one_rule(rule: str, model: onnx.ModelProto, given: dict[str, int], expected: dict[str, int]) -> None:
    rules = [name for name in type(load_recipe("xint8").npu).model_fields if name.startswith("adjust_")]
    assert refined(model, given, **{name: name == rule for name in rules}) == expected
    assert refined(model, given, **dict.fromkeys(rules, False)) == {}


def test_square_counts_its_input_twice() -> None:
    model = build([node("Mul", ["x", "x"], ["y"], "n")], {"x": IMAGE}, ["y"])
    assert refined(model, {"x": 1, "y": 5}) == {"y": 2}
    assert refined(model, {"x": 30, "y": 2}) == {"x": 17}


def test_aligned_output_leaves_the_other_factor_to_move() -> None:
    """x * c shares its scale with x: moving the output would change nothing."""
    nodes = [node("Mul", ["x", "c"], ["m"], "n"), node("Concat", ["m", "x"], ["y"], "k", axis=1)]
    model = build(nodes, {"x": IMAGE}, ["y"], {"c": normal(1, 2, 1, 1)})
    assert refined(model, {"x": 3, "m": 3, "y": 3, "c": -2}) == {"c": 0}
    assert refined(model, {"x": 3, "m": 3, "y": 3, "c": 40}) == {"c": 32}


def test_aligned_group_moves_as_one() -> None:
    """HardSigmoid's output needs position 7, and the Concat behind it makes all its inputs follow."""
    nodes = [node("HardSigmoid", ["x"], ["g"], "s", **GATE), node("Concat", ["g", "z"], ["y"], "k", axis=1)]
    model = build(nodes, {"x": IMAGE, "z": IMAGE}, ["y"])
    assert refined(model, {"x": 3, "g": 4, "z": 4, "y": 4}) == {"g": 7, "z": 7, "y": 7}


def test_what_a_hard_limit_holds_up_is_not_lowered_again() -> None:
    """The sum must reach position 0 for HardSigmoid, so its coarse input has to come within 7 of that."""
    nodes = [node("Add", ["a", "b"], ["s"], "n"), node("HardSigmoid", ["s"], ["y"], "h", **GATE)]
    model = build(nodes, {"a": IMAGE, "b": IMAGE}, ["y"])
    assert refined(model, {"a": -20, "b": -19, "s": -13, "y": 7}) == {"a": -7, "b": -7, "s": 0}


def test_layers_in_a_row() -> None:
    """A repair at the first node reaches the second in the same run."""
    nodes = [node("Add", ["a", "b"], ["s"], "n"), node("Conv", ["s", "w"], ["y"], "c")]
    model = build(nodes, {"a": IMAGE, "b": IMAGE}, ["y"], {"w": normal(3, 2, 1, 1)})
    assert refined(model, {"a": 0, "b": 0, "s": 12, "w": -6, "y": 5}) == {"s": 7, "y": 1}


def test_breaches_are_named() -> None:
    graph, state, npu = state_of(two_inputs("Add"), {"a": 12, "b": 3, "y": 3})
    (found,) = breaches(graph.graph, state, npu)
    assert (found.rule, found.node, found.value, found.low, found.high) == ("shift_read", "n", 9, 0, 7)


def test_contradiction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "XINT8_LIMITS", ShiftLimits(hard_sigmoid_output=40))
    with pytest.raises(VerifyError, match="hard_sigmoid"):
        refined(sigmoid(), {"x": 3, "y": 7})


def test_several_scales_for_a_tensor_are_refused() -> None:
    override = [{"tensors": ["w"], "per_channel": True}]
    with pytest.raises(RecipeError, match="'w'"):
        quantize(layer(), "xint8", overrides=override)


def test_notes_tell_what_moved() -> None:
    graph, state, npu = state_of(two_inputs("Add"), {"a": 12, "b": 3, "y": 3})
    assert refine(graph, state, npu).notes == ("position of 'a' moved from 12 to 10",)


@pytest.mark.parametrize("weight", [1e-6, 1e-2, 1.0, 3e2])
@pytest.mark.parametrize("bias", [1e-6, 1.0, 1e3, 3e5])
@pytest.mark.parametrize("recipe", ["xint8", "xint8_signed"])
def test_constants_keep_their_values(weight: float, bias: float, recipe: str) -> None:
    """However far a position moves, a weight or bias is off by no more than half a step."""
    constants = {"w": normal(3, 2, 3, 3, scale=weight), "b": normal(3, seed=1, scale=bias)}
    model = build([node("Conv", ["x", "w", "b"], ["y"], "n")], {"x": IMAGE}, ["y"], constants)
    data = feeds({"x": IMAGE})
    result = quantize(model, recipe, data, weights={"method": "minmax"})
    for name, stored in weights(result.model).items():
        assert np.abs(stored.real - constants[name]).max() <= float(stored.scale) / 2
    # Eight bits for a sum of 18 products and a bias, all with one scale for three channels.
    assert sqnr(model, result, data) > 22


def test_moved_by_many_steps() -> None:
    """The same, with proof that positions did move: Quark multiplies such a bias by a power of two."""
    constants = {"w": normal(3, 2, 3, 3, scale=1e-6), "b": np.array([10, -5, 3], np.float32)}
    model = build([node("Conv", ["x", "w", "b"], ["y"], "n")], {"x": IMAGE}, ["y"], constants)
    data = feeds({"x": IMAGE})
    result = quantize(model, "xint8", data)
    (told,) = (line for line in result.record.notes if line.startswith("position of 'w'"))
    before, after = (int(word) for word in told.split(" from ")[1].split(" to "))
    assert before - after > 8
    assert np.abs(weights(result.model)["b"].real - constants["b"]).max() <= 2.0**-4
    assert sqnr(model, result, data) > 35


def test_shared_bias_scale_follows_its_weight() -> None:
    """A 32-bit bias has the scale of the accumulator, also after the weight moved."""
    constants = {"w": normal(3, 2, 3, 3, scale=1e-6), "b": np.array([10, -5, 3], np.float32)}
    model = build([node("Conv", ["x", "w", "b"], ["y"], "n")], {"x": IMAGE}, ["y"], constants)
    result = quantize(model, "xint8", bias={"type": "int32"})
    assert any(line.startswith("position of 'w'") for line in result.record.notes)
    stored = weights(result.model)
    assert stored["b"].dtype == "int32"
    assert stored["b"].scale == stored["w"].scale * activations(result.model)["x"].scale
    np.testing.assert_allclose(stored["b"].real, constants["b"], atol=1e-3)
