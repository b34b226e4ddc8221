"""Outputs count alike, whatever their power."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from helpers import build, node, normal
from roundel import quantize
from roundel.improve.probe import OutputErrors, together


def _graph(*, turned: bool = False) -> ir.Graph:
    nodes = [
        node("Conv", ["x", "w"], ["boxes"], name="box_layer"),
        node("Conv", ["x", "k"], ["s"], name="score_layer"),
        node("Sigmoid", ["s"], ["scores"], name="scores"),
        node("Concat", ["boxes", "scores"], ["j"], name="join", axis=1),
        node("Transpose", ["j"], ["y"], name="turn", perm=[0, 2, 3, 1] if turned else [0, 1, 2, 3]),
    ]
    constants = {"w": normal(4, 3, 1, 1), "k": normal(2, 3, 1, 1)}
    shape = [1, 8, 8, 6] if turned else [1, 6, 8, 8]
    proto = build(nodes, {"x": [1, 3, 8, 8]}, {"y": shape}, constants)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto)).graph


@pytest.mark.parametrize("turned", [False, True])
def test_parts_that_a_head_has_joined_count_alike(turned: bool) -> None:
    """Pixels lose a hundredth, scores all: half of the whole is lost, though hardly any of its power."""
    errors = OutputErrors(_graph(turned=turned))
    whole = np.concatenate([np.full((1, 4, 8, 8), 300.0), np.full((1, 2, 8, 8), 0.5)], axis=1)
    other = whole * np.reshape([0.99] * 4 + [0.0] * 2, (1, 6, 1, 1))
    if turned:
        whole, other = (np.moveaxis(array, 1, -1) for array in (whole, other))
    found = together([errors.of({"y": whole}, [other])])
    assert found.noise / found.signal == pytest.approx((1e-4 + 1) / 2)


def test_outputs_count_alike() -> None:
    nodes = [node("Relu", ["x"], ["a"], name="a"), node("Tanh", ["x"], ["b"], name="b")]
    errors = OutputErrors(ir.from_proto(build(nodes, {"x": [4]}, ["a", "b"], {})).graph)
    wanted = {"a": np.full(4, 1000.0), "b": np.ones(4)}
    given = [wanted["a"] * 0.9, wanted["b"] * 0.5]
    found = together([errors.of(wanted, given)] * 3)
    assert found.noise / found.signal == pytest.approx((0.01 + 0.25) / 2)


def test_one_output_is_what_it_is() -> None:
    nodes = [node("Relu", ["x"], ["a"], name="a")]
    errors = OutputErrors(ir.from_proto(build(nodes, {"x": [4]}, ["a"], {})).graph)
    found = together([errors.of({"a": np.full(4, 2.0)}, [np.full(4, 1.0)])])
    assert (found.signal, found.noise, found.count) == (16.0, 4.0, 4)


@pytest.mark.parametrize(
    "other", [np.ones(3), np.array([1, 2, 3, 4]), np.full(4, np.inf)], ids=["shape", "integers", "infinite"]
)
def test_what_cannot_be_compared_is_left_out(other: np.ndarray) -> None:
    nodes = [node("Relu", ["x"], ["a"], name="a"), node("Tanh", ["x"], ["b"], name="b")]
    errors = OutputErrors(ir.from_proto(build(nodes, {"x": [4]}, ["a", "b"], {})).graph)
    found = together([errors.of({"a": other, "b": np.ones(4)}, [np.ones(4), np.ones(4)])])
    assert (found.noise, found.count) == (0.0, 4)


def _classifier(width: int, classes: int) -> onnx.ModelProto:
    nodes = [
        node("Gemm", ["x", "w", "b"], ["h"], name="hidden"),
        node("Relu", ["h"], ["r"], name="relu"),
        node("Gemm", ["r", "v"], ["z"], name="layer"),
        node("Softmax", ["z"], ["y"], name="answer", axis=-1),
    ]
    constants = {"w": normal(width, width), "b": normal(width), "v": normal(width, classes)}
    return build(nodes, {"x": [1, width]}, {"y": [1, classes]}, constants)


def test_nearly_certain_answers_count_by_what_their_softmax_reads() -> None:
    """Behind the Softmax both errors are invisible; in front of it one is ten times as large."""
    errors = OutputErrors(ir.from_proto(_classifier(4, 3)).graph)
    assert (errors.outputs, errors.names) == (["y"], ["y_logits"])
    logits = np.array([[30.0, 0.0, -30.0]], np.float32)
    wanted = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    near, far = (errors.of({"y": wanted}, [logits + np.float32([[0, 0, e]])])["y"] for e in (0.1, 1.0))
    assert far.noise == pytest.approx(100 * near.noise, rel=1e-3)
    # A Softmax does not see what is added to all.
    assert errors.of({"y": wanted}, [logits + 7])["y"].noise < 1e-6


@pytest.mark.parametrize("preset", ["xint8", "a8w8"])
def test_the_logits_of_the_quantized_model_come_from_where_it_computes_them(preset: str) -> None:
    """All who judge ask for the same outputs, also where the last tensor is quantized, and switched."""
    samples = [{"x": normal(1, 32, seed=seed)} for seed in range(40)]
    result = quantize(_classifier(32, 8), preset=preset, data=samples)
    assert "rounding" in {step.step for step in result.record.improvements}
    assert all(5 < step.before_db < 60 for step in result.record.improvements)
    assert [value.name for value in result.model.graph.output] == ["y"]  # asked for in copies only


@pytest.mark.parametrize("how", [{"rotate": {"enabled": True}}, {"smooth": {"enabled": True}}])
def test_the_logits_are_there_where_the_npu_computes_the_softmax_by_other_nodes(
    how: dict[str, object],
) -> None:
    """It is written without a Softmax then, and those who judge a step before calibration ask as well."""
    samples = [{"x": normal(1, 32, seed=seed)} for seed in range(20)]
    changes = {"npu": {"softmax": True}, "improve": how}
    result = quantize(_classifier(32, 8), preset="xint8", data=samples, changes=changes)
    assert "rounding" in {step.step for step in result.record.improvements}
