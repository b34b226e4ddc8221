"""Attention masks: recognised in every usual form, and kept out of the ranges of the scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto

import roundel
from helpers import build, node, rng
from roundel.calibrate import runner
from roundel.calibrate.masks import MASK_GAP, SCORE_GAP, Mask, masked_tensors
from roundel.calibrate.runner import Runner

LENGTH, WIDTH = 6, 8
LOWEST = float(np.finfo(np.float32).min)
SMALL, INFINITE, BERT = np.float32(LOWEST), np.float32(-np.inf), np.float32(-1e4)


def attention(form: str, *, also: bool = False) -> onnx.ModelProto:
    """Scores, a mask in one of the usual forms, shares, and the mixed values."""
    nodes = [
        node("Transpose", ["x"], ["turned"], name="turn", perm=[0, 2, 1]),
        node("MatMul", ["x", "turned"], ["scores"], name="scores"),
    ]
    constants: dict[str, Any] = {
        "zero": np.float32(0),
        "one": np.float32(1),
        "v": np.eye(WIDTH, dtype=np.float32),
    }
    outputs = ["y"]
    if form == "causal":
        constants["causal"] = np.triu(np.full((LENGTH, LENGTH), SMALL, np.float32), 1)
        nodes.append(node("Add", ["scores", "causal"], ["masked"], name="add"))
    elif form == "product":
        nodes += [
            node("Cast", ["keep"], ["real"], name="cast", to=TensorProto.FLOAT),
            node("Sub", ["one", "real"], ["missing"], name="missing"),
            node("Mul", ["missing", "far"], ["mask"], name="mask"),
            node("Add", ["scores", "mask"], ["masked"], name="add"),
        ]
        constants["far"] = BERT
    elif form == "fill":
        nodes.append(node("Where", ["keep", "scores", "far"], ["masked"], name="fill"))
        constants["far"] = SMALL
    else:
        nodes += [
            node("Where", ["keep", "zero", "far"], ["mask"], name="mask"),
            node("Add", ["scores", "mask"], ["masked"], name="add"),
        ]
        constants["far"] = INFINITE if form == "infinite" else SMALL
    nodes += [
        node("Softmax", ["masked"], ["shares"], name="softmax", axis=-1),
        node("MatMul", ["shares", "x"], ["mixed"], name="mix"),
        node("MatMul", ["mixed", "v"], ["y"], name="out"),
    ]
    if also:
        nodes.append(node("Relu", ["masked"], ["z"], name="other"))
        outputs.append("z")
    inputs: dict[str, Any] = {"x": [1, LENGTH, WIDTH]}
    if form != "causal":
        inputs["keep"] = [1, 1, LENGTH]
    return build(nodes, inputs, outputs, constants, types={"keep": TensorProto.BOOL})


FORMS = ("added", "infinite", "product", "fill", "causal")


def samples(form: str, count: int = 8) -> list[dict[str, Any]]:
    generator, found = rng(3), []
    for index in range(count):
        sample: dict[str, Any] = {"x": generator.normal(0, 1, (1, LENGTH, WIDTH)).astype(np.float32)}
        if form != "causal":
            sample["keep"] = (np.arange(LENGTH) < LENGTH - index % 3)[None, None]
        found.append(sample)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_scores_keep_their_steps(form: str) -> None:
    model = attention(form)
    found = masked_tensors(ir.from_proto(model).graph)
    assert found["masked"].axis == -1
    assert ("mask" in found) == (form not in ("fill", "causal"))
    data = samples(form)
    result = roundel.quantize(model, recipe="a8w8_minmax", data=data)
    scale = {t.name: onnx.numpy_helper.to_array(t) for t in result.model.graph.initializer}["masked_scale"]
    assert scale < 0.5, "a mask has widened the range of the scores"
    before = ort.InferenceSession(model.SerializeToString())
    after = ort.InferenceSession(result.model.SerializeToString())
    for sample in data:
        expected, got = before.run(None, sample)[0], after.run(None, sample)[0]
        assert np.linalg.norm(got - expected) < 0.12 * np.linalg.norm(expected)


def test_what_others_read_is_observed_as_it_is() -> None:
    assert masked_tensors(ir.from_proto(attention("added", also=True)).graph) == {}


def test_a_hidden_value_lies_below_the_best_of_its_row() -> None:
    mask = Mask(floor=LOWEST / 2, gap=SCORE_GAP, axis=-1)
    rows = np.array([[1, SMALL, 3], [-5, -np.inf, -6], [SMALL, SMALL, SMALL]], np.float32)
    expected = [[1, 3 - SCORE_GAP, 3], [-5, -5 - SCORE_GAP, -6], [3 - SCORE_GAP] * 3]
    np.testing.assert_array_equal(mask.tamed(rows), np.float32(expected))
    alone = Mask(floor=-5e3, gap=MASK_GAP, axis=None)
    np.testing.assert_array_equal(
        alone.tamed(np.float32([[-1e4, -1e4]])), np.float32([[-MASK_GAP, -MASK_GAP]])
    )


def test_sums_that_overflow_open_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large numbers that are no mask: the graph's own check cannot tell them from NaN."""
    model = ir.from_proto(
        build([node("Mul", ["x", "k"], ["y"], name="mul")], {"x": [4, 4]}, ["y"], {"k": SMALL})
    )
    opened: list[object] = []
    real = runner.open_session

    def counted(*args: Any, **kwargs: Any) -> Any:
        opened.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "open_session", counted)
    sample = {"x": np.ones((4, 4), np.float32)}
    working = Runner(model, ["y"], sample, cores=1, samples=1, extremes={"y"})
    before = len(opened)
    for index in range(5):
        (run,) = working.stream(sample, index, finals=False)
        assert run.tensors["y"].min() == SMALL
    assert len(opened) == before + 1


@pytest.mark.parametrize("form", ["added", "product", "fill"])
def test_a_mask_that_never_hides_is_safe_in_padded_batches(form: str) -> None:
    data = samples(form)
    open_ones = [{**sample, "keep": np.ones_like(sample["keep"])} for sample in data]
    model = attention(form)
    result = roundel.quantize(model, recipe="a8w8_minmax", data=open_ones)
    (note,) = [note for note in result.record.notes if "attention mask" in note]
    assert "'keep'" in note
    before = ort.InferenceSession(model.SerializeToString())
    after = ort.InferenceSession(result.model.SerializeToString())
    for sample in data:
        expected, got = before.run(None, sample)[0], after.run(None, sample)[0]
        assert np.linalg.norm(got - expected) < 0.15 * np.linalg.norm(expected)
    findings = roundel.lint_data(model, open_ones).findings
    assert "mask-never-varies" in {finding.rule for finding in findings}
    assert "mask-never-varies" not in {finding.rule for finding in roundel.lint_data(model, data).findings}


def test_a_row_that_hides_nothing_gets_one_hidden_value() -> None:
    rows = np.array([[1, 2, 3], [-5, -7, -6]], np.float32)
    mask = Mask(floor=LOWEST / 2, gap=SCORE_GAP, axis=-1)
    expected = [[1, 2, 3, 3 - SCORE_GAP], [-5, -7, -6, -5 - SCORE_GAP]]
    np.testing.assert_array_equal(mask.tamed(rows), np.float32(expected))
    alone = Mask(floor=-5e3, gap=MASK_GAP, axis=None)
    np.testing.assert_array_equal(alone.tamed(np.zeros((1, 2), np.float32)), np.float32([0, 0, -MASK_GAP]))
