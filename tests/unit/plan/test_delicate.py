"""Variances written out, and what stands around Log, Exp and one number, stay in float; nothing else does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from helpers import Feed, build, node, normal, rng
from roundel.plan import build_plan
from roundel.plan.delicate import EXPONENTIAL, LOGARITHM, ONE_NUMBER, VARIANCE, find_delicate
from roundel.recipe.load import load_recipe

_EPSILON = np.float32(1e-3)
_NORM = {"total", "mean", "centre", "square", "variance", "safe", "root", "divide"}


def typed(proto: onnx.ModelProto) -> ir.Model:
    """As a model is planned: with the types and shapes of all tensors."""
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def normalised(form: str = "div", *, rows: int = 6) -> onnx.ModelProto:
    """A matrix, a norm over the first axis as no pass fuses it, and another matrix."""
    ends = {
        "div": [
            node("Sqrt", ["v2"], ["d"], name="root"),
            node("Div", ["c", "d"], ["n"], name="divide"),
        ],
        "reciprocal": [
            node("Sqrt", ["v2"], ["d0"], name="root"),
            node("Reciprocal", ["d0"], ["d1"], name="reciprocal"),
            node("Mul", ["d1", "gain"], ["d"], name="gain"),
            node("Mul", ["c", "d"], ["n"], name="divide"),
        ],
        "pow": [
            node("Pow", ["v2", "half"], ["d"], name="root"),
            node("Mul", ["c", "d"], ["n"], name="divide"),
        ],
    }
    nodes = [
        node("MatMul", ["x", "w0"], ["a"], name="before"),
        node("ReduceSum", ["a", "axis"], ["t"], name="total"),
        node("Mul", ["t", "share"], ["m"], name="mean"),
        node("Sub", ["a", "m"], ["c"], name="centre"),
        node("Mul", ["c", "c"], ["q"], name="square"),
        node("ReduceMean", ["q"], ["v1"], name="variance", axes=[1]),
        node("Add", ["v1", "epsilon"], ["v2"], name="safe"),
        *ends[form],
        node("MatMul", ["n", "w1"], ["y"], name="after"),
    ]
    constants: dict[str, Any] = {
        "w0": normal(4, 4),
        "axis": np.array([1]),
        "share": np.float32(1 / rows),
        "epsilon": _EPSILON,
        "gain": normal(1, 1, 4, seed=2),
        "half": np.float32(-0.5),
        "w1": normal(4, 3, seed=1),
    }
    used = {name for one in nodes for name in one.input}
    return build(nodes, {"x": [1, rows, 4]}, ["y"], {k: v for k, v in constants.items() if k in used})


def _found(proto: onnx.ModelProto) -> dict[str, str]:
    return {str(n.name): why for n, why in find_delicate(typed(proto).graph).items()}


@pytest.mark.parametrize(
    ("form", "further"), [("div", set()), ("reciprocal", {"reciprocal", "gain"}), ("pow", set())]
)
def test_a_variance_with_all_that_belongs_to_its_norm(form: str, further: set[str]) -> None:
    assert _found(normalised(form)) == dict.fromkeys(_NORM | further, VARIANCE)


def test_a_mean_of_squares_less_the_square_of_the_mean() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="layer"),
        node("ReduceMean", ["a"], ["m"], name="mean", axes=[1]),
        node("Mul", ["m", "m"], ["m2"], name="mean_squared"),
        node("Mul", ["a", "a"], ["q"], name="square"),
        node("ReduceMean", ["q"], ["qm"], name="square_mean", axes=[1]),
        node("Sub", ["qm", "m2"], ["v"], name="variance"),
        node("Max", ["v", "epsilon"], ["v2"], name="safe"),
        node("Sqrt", ["v2"], ["s"], name="root"),
        node("Sub", ["a", "m"], ["c"], name="centre"),
        node("Div", ["c", "s"], ["y"], name="divide"),
    ]
    proto = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], {"w": normal(4, 3, 1, 1), "epsilon": _EPSILON})
    assert _found(proto).keys() == {str(one.name) for one in nodes} - {"layer"}


def test_features_that_are_normalised_by_their_length_are_no_statistic_themselves() -> None:
    """The pool in front is the network's own, though it is a mean that a square is taken of."""
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="layer"),
        node("GlobalAveragePool", ["a"], ["p"], name="pool"),
        node("Mul", ["p", "p"], ["q"], name="square"),
        node("ReduceSum", ["q", "axis"], ["t"], name="sum"),
        node("Sqrt", ["t"], ["s"], name="root"),
        node("Div", ["p", "s"], ["y"], name="divide"),
    ]
    constants = {"w": normal(4, 3, 1, 1), "axis": np.array([1])}
    assert _found(build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)).keys() == {
        "square",
        "sum",
        "root",
        "divide",
    }


def test_a_log_with_what_makes_its_operand() -> None:
    """Through a filter bank up to the squares that it sums; a layer that feeds the squares is quantized."""
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="waves"),
        node("Pow", ["a", "two"], ["q"], name="power"),
        node("MatMul", ["q", "bank"], ["f"], name="filters"),
        node("Clip", ["f", "least"], ["c"], name="floor"),
        node("Log", ["c"], ["l"], name="log"),
        node("Mul", ["l", "ten"], ["y"], name="decibel"),
    ]
    constants = {
        "w": normal(4, 1, 16),
        "two": np.float32(2),
        "bank": np.abs(normal(49, 5)),
        "least": np.float32(1e-6),
        "ten": np.float32(4.34),
    }
    proto = build(nodes, {"x": [1, 1, 64]}, ["y"], constants)
    assert _found(proto) == dict.fromkeys(("power", "filters", "floor", "log"), LOGARITHM)


def test_an_exp_with_the_arithmetic_around_it() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="layer"),
        node("Flatten", ["a"], ["f"], name="flat"),
        node("Mul", ["f", "fifth"], ["m"], name="variance"),
        node("Exp", ["m"], ["e"], name="exp"),
        node("Mul", ["e", "sizes"], ["s"], name="size"),
        node("Mul", ["s", "f"], ["y"], name="other"),
    ]
    constants = {"w": normal(4, 3, 1, 1), "fifth": np.float32(0.2), "sizes": normal(1, 256)}
    found = _found(build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants))
    assert found == dict.fromkeys(("variance", "exp", "size", "other"), EXPONENTIAL)


def _softmax() -> list[onnx.NodeProto]:
    return [
        node("MatMul", ["x", "w"], ["a"], name="layer"),
        node("Exp", ["a"], ["e"], name="exp"),
        node("ReduceSum", ["e", "axis"], ["s"], name="sum"),
        node("Div", ["e", "s"], ["y"], name="divide"),
    ]


def _silu() -> list[onnx.NodeProto]:
    return [
        node("MatMul", ["x", "w"], ["a"], name="layer"),
        node("Neg", ["a"], ["n"], name="neg"),
        node("Exp", ["n"], ["e"], name="exp"),
        node("Add", ["e", "one"], ["s"], name="add"),
        node("Reciprocal", ["s"], ["r"], name="reciprocal"),
        node("Mul", ["a", "r"], ["y"], name="times"),
    ]


@pytest.mark.parametrize("activation", [_softmax, _silu])
def test_activations_that_are_written_out_are_not(activation: Any) -> None:
    nodes = activation()
    constants = {"w": normal(4, 4), "axis": np.array([-1]), "one": np.float32(1)}
    used = {name for one in nodes for name in one.input}
    kept = {name: value for name, value in constants.items() if name in used}
    assert _found(build(nodes, {"x": [1, 6, 4]}, ["y"], kept)) == {}


def test_one_number_that_moves_a_tensor() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="layer"),
        node("ReduceMax", ["a"], ["m"], name="largest", keepdims=0),
        node("Mul", ["m", "share"], ["k"], name="share"),
        node("Sub", ["a", "k"], ["y"], name="shift"),
    ]
    constants = {"w": normal(4, 4), "share": np.float32(0.5)}
    found = _found(build(nodes, {"x": [1, 6, 4]}, ["y"], constants))
    assert found == dict.fromkeys(("largest", "share", "shift"), ONE_NUMBER)


def test_a_score_is_a_result_like_any_other() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="layer"),
        node("GlobalAveragePool", ["a"], ["p"], name="pool"),
        node("Sigmoid", ["p"], ["y"], name="score"),
    ]
    assert _found(build(nodes, {"x": [1, 3, 8, 8]}, ["y"], {"w": normal(1, 3, 1, 1)})) == {}


@pytest.mark.parametrize(
    ("recipe", "changes", "spared"),
    [
        ("a8w8", {}, True),
        ("xint8", {}, True),
        ("a8w8", {"effort": "none"}, False),
        ("a8w8", {"improve": {"delicate": False}}, False),
        ("a8w8", {"selection": {"include": ["square", "safe"]}}, False),
        ("bf16", {}, False),
    ],
)
def test_where_effort_is_asked_for(recipe: str, changes: dict[str, Any], spared: bool) -> None:
    plan = build_plan(typed(normalised()), load_recipe(recipe, changes))
    assert [plan.nodes[name].reason == VARIANCE for name in ("square", "safe")] == [spared] * 2
    if not changes and spared:
        # What is not in the operator table keeps that reason, and is not counted as spared.
        assert plan.nodes["root"].reason == "Sqrt is not in the operator table"
        assert plan.nodes["before"].quantized
        assert plan.nodes["after"].quantized


def quiet(count: int = 12) -> list[Feed]:
    """Rows of which some vary a hundred times less than others."""
    made = []
    for seed in range(count):
        loud = 10.0 ** rng(seed).uniform(-2, 0, (1, 1, 4))
        made.append({"x": (loud * rng(seed + 50).standard_normal((1, 6, 4))).astype(np.float32)})
    return made


def test_it_is_worth_it_and_said() -> None:
    kept, whole = (
        roundel.quantize(normalised(), recipe="a8w8", data=quiet(), changes={"improve.delicate": wanted})
        for wanted in (True, False)
    )
    assert kept.record.outputs[0].sqnr_db > whole.record.outputs[0].sqnr_db + 6
    notes = [note for note in kept.record.notes if "delicate" in note]
    assert len(notes) == 1
    assert notes[0].startswith(
        "nodes of delicate arithmetic stay in float: 6 of variances and norms ('mean', "
    )
    assert "improve.delicate=false" in notes[0]
    assert not any("delicate" in note for note in whole.record.notes)
