"""Slopes for HardSigmoid: the reference computes what the model did, the written one comes nearer to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from equalize_cases import check_equalized
from helpers import build, feeds, node, normal, sqnr
from roundel.improve import activations, steps
from roundel.improve.activations import Surroundings, bend, find_choices, find_gates
from roundel.model.session import open_session
from roundel.numerics.gates import SLOPES, fit_gate, hard_sigmoid, sigmoid, swish_errors
from roundel.plan import build_plan
from roundel.recipe.load import load_recipe
from roundel.stages import prepare

X = {"x": (1, 3, 10, 10)}
KEPT = {"verify": {"samples": 16}}


def silu(source: str, out: str) -> list[onnx.NodeProto]:
    return [
        node("Sigmoid", [source], [f"{out}_gate"], name=f"{out}_sigmoid"),
        node("Mul", [source, f"{out}_gate"], [out], name=f"{out}_mul"),
    ]


def conv(source: str, weight: str, out: str, pad: int = 0) -> onnx.NodeProto:
    return node("Conv", [source, weight, f"{weight}_b"], [out], name=out, pads=[pad] * 4)


def network(last: list[onnx.NodeProto] | None = None, outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    """A detector's block (split, sum, joined again), pooling, and a squeeze-excite gate behind it."""
    nodes = [
        conv("x", "w1", "c1", pad=1),
        *silu("c1", "s1"),
        node("Slice", ["s1", "zero", "four", "one"], ["left"]),
        node("Slice", ["s1", "four", "eight", "one"], ["right"]),
        conv("right", "w2", "c2", pad=1),
        *silu("c2", "s2"),
        node("Add", ["s2", "right"], ["sum"]),
        node("Concat", ["left", "right", "sum"], ["joined"], axis=1),
        conv("joined", "w3", "c3"),
        *silu("c3", "s3"),
        node("MaxPool", ["s3"], ["pooled"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["pooled"], ["mean"]),
        conv("mean", "w4", "c4"),
        node("Sigmoid", ["c4"], ["gate"], name="gate"),
        node("Mul", ["pooled", "gate"], ["gated"]),
        conv("gated", "w5", "y", pad=1),
        *(last or []),
    ]
    shapes = {
        "w1": (8, 3, 3, 3),
        "w2": (4, 4, 3, 3),
        "w3": (8, 12, 1, 1),
        "w4": (8, 8, 1, 1),
        "w5": (5, 8, 3, 3),
    }
    constants: dict[str, Any] = {"zero": [0], "four": [4], "eight": [8], "one": [1]}
    constants = {name: np.asarray(value, np.int64) for name, value in constants.items()}
    for seed, (name, shape) in enumerate(shapes.items()):
        constants[name] = normal(*shape, seed=seed, scale=float(np.prod(shape[1:])) ** -0.5)
        constants[f"{name}_b"] = normal(shape[0], seed=seed + 50, scale=0.5)
    return build(nodes, X, list(outputs), constants)


def found(proto: onnx.ModelProto) -> tuple[ir.Model, tuple[activations.Gate, ...]]:
    recipe = load_recipe("xint8", {})
    model = prepare(proto, recipe).model
    return model, find_gates(model.graph, build_plan(model, recipe), recipe.npu)


def test_the_reference_computes_what_the_model_did() -> None:
    model, gates = found(network())
    samples = feeds(X, 6)
    choices = find_choices(model, gates, samples)
    assert len(choices.ways) == 2
    for way in choices.ways:
        assert len(way) == 4
        assert any(bent.slope.ndim == 0 and bent.slope > 1 for bent in way.values())
        straight, reference = bend(model, gates, way)
        assert check_equalized(model, reference, samples) < 1e-5
        assert [n.op_type for n in straight.graph].count("HardSigmoid") == 4
        assert check_equalized(model, straight, samples) > 1e-4, "HardSigmoid is another function"


def test_tensors_of_the_reference_are_in_the_model_s_units() -> None:
    model, gates = found(network())
    way = find_choices(model, gates, feeds(X, 6)).ways[-1]
    made = [*bend(model, gates, way), model]
    shared = {str(v.name) for n in made[0].graph for v in n.outputs} - {"y"}
    for each in made:
        values = {str(v.name): v for n in each.graph for v in n.outputs}
        each.graph.outputs.extend(values[name] for name in sorted(shared))
    given = [open_session(each).run(sorted(shared), feeds(X, 1)[0]) for each in made]
    for name, straight, wanted, plain in zip(sorted(shared), *given, strict=True):
        error = np.abs(straight - wanted).mean() / np.abs(wanted).mean()
        assert error < 0.2, f"{name} differs by more than what HardSigmoid costs"
        if name == "s1":
            np.testing.assert_allclose(wanted, plain * way["s1_sigmoid"].slope, rtol=1e-4, atol=1e-5)


def test_what_meets_in_a_sum_gets_one_slope() -> None:
    model, gates = found(network())
    groups = Surroundings(model.graph, gates).groups()
    names = [sorted(str(gate.node.name) for gate in group) for group in groups]
    assert sorted(names) == [["s1_sigmoid", "s2_sigmoid"], ["s3_sigmoid"]]


def test_what_cannot_be_rescaled_keeps_slope_1() -> None:
    """Behind Tanh or an output nobody divides."""
    shown = [node("Tanh", ["s3"], ["shown"])]
    for more, outputs in ((shown, ("y", "shown")), (None, ("y", "s3"))):
        model, gates = found(network(more, outputs))
        way = find_choices(model, gates, feeds(X, 6)).ways[0]
        assert "s3_sigmoid" not in way
        assert "s1_sigmoid" in way


@pytest.mark.parametrize("effort", ["fast", "none"])
def test_the_quantized_model_comes_nearer(effort: str) -> None:
    data, unseen = feeds(X, 24), feeds(X, 40)[24:]
    errors = []
    for wanted in (False, True):
        changes = {
            **KEPT,
            "effort": effort,
            "improve": {"activations": wanted, "rounding": False, "ranges": False},
        }
        result = roundel.quantize(network(), recipe="xint8", data=data, changes=changes)
        errors.append(sqnr(network(), result, unseen))
        kept = [step.step for step in result.record.improvements if step.kept]
        assert ("activations" in kept) is (wanted and effort == "fast")
    assert errors[1] - errors[0] > 3 if effort == "fast" else errors[1] == errors[0]


def test_the_record_compares_with_the_model_as_given() -> None:
    data = feeds(X, 16)
    result = roundel.quantize(network(), recipe="xint8", data=data, changes=KEPT)
    assert result.record.outputs[0].sqnr_db == pytest.approx(sqnr(network(), result, data), abs=0.05)
    (said,) = [note for note in result.record.notes if note.startswith("activations: ")]
    assert "for 3 SiLU" in said
    assert "1 gate" in said


def test_nothing_is_looked_for_where_no_sigmoid_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("looked for gates")

    monkeypatch.setattr(steps, "find_gates", never)
    plain = build(
        [node("Relu", ["x"], ["r"]), node("Conv", ["r", "w"], ["y"])], X, ["y"], {"w": normal(4, 3, 3, 3)}
    )
    roundel.quantize(plain, recipe="xint8", data=feeds(X, 8))
    roundel.quantize(network(), recipe="a8w8", data=feeds(X, 8))
    roundel.quantize(network(), recipe="xint8", data=feeds(X, 8), device="stx")


def test_the_slope_follows_what_arrives() -> None:
    near, far = (np.linspace(-size, size, 99)[None] for size in (0.2, 40))
    assert SLOPES[np.argmin(swish_errors(near))] == pytest.approx(1.5, abs=0.05)
    assert SLOPES[np.argmin(swish_errors(far))] == pytest.approx(1, abs=0.1)


def test_a_gate_alone_is_shifted_too() -> None:
    points = np.stack([np.linspace(-1, 1, 50), np.linspace(2, 4, 50)])
    slope, shift = fit_gate(points)
    error = np.abs(hard_sigmoid(slope[:, None] * points + shift[:, None]) - sigmoid(points)).max(1)
    assert (error < 0.03).all()
    assert (error < np.abs(hard_sigmoid(points) - sigmoid(points)).max(1)).all()
