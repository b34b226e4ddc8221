"""What a channel counts for at the outputs, against the errors that real runs show."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from helpers import build, node, normal, rng
from roundel.improve.moments import HeldRows, Moments
from roundel.improve.rounding import Problem, solve
from roundel.improve.targets import importance


def chain() -> onnx.ModelProto:
    """Conv, depthwise Conv, Conv, all linear."""
    spread = np.exp2(rng(3).uniform(-3, 3, (8, 1, 1, 1))).astype(np.float32)
    return build(
        [
            node("Conv", ["x", "a"], ["p"], name="one"),
            node("Conv", ["p", "b"], ["q"], name="two", group=8, pads=[1, 1, 1, 1]),
            node("Conv", ["q", "c"], ["y"], name="three"),
        ],
        {"x": [1, 4, 16, 16]},
        ["y"],
        {"a": normal(8, 4, 1, 1), "b": normal(8, 1, 3, 3, seed=1) * spread, "c": normal(6, 8, 1, 1, seed=2)},
    )


def test_it_foretells_what_noise_on_a_channel_does() -> None:
    model = onnx.shape_inference.infer_shapes(chain())
    known = importance(ir.from_proto(model).graph)["p"]
    tail = onnx.utils.Extractor(model).extract_model(["p"], ["y"])
    session = ort.InferenceSession(tail.SerializeToString())
    seen = []
    for channel in range(8):
        noise = np.zeros((1, 8, 16, 16), np.float32)
        noise[0, channel] = normal(16, 16, seed=channel)
        seen.append(float(np.square(session.run(None, {"p": noise})[0]).sum()))
    measured = np.array(seen) / np.mean(seen)
    assert known.mean() == pytest.approx(1)
    assert np.corrcoef(np.log(known), np.log(measured))[0, 1] > 0.99


@pytest.mark.parametrize("operator", ["Softmax", "Transpose"])
def test_behind_an_unknown_operator_nothing_is_known(operator: str) -> None:
    model = build(
        [node("Conv", ["x", "a"], ["p"], name="one"), node(operator, ["p"], ["y"], name="other")],
        {"x": [1, 4, 6, 6]},
        ["y"],
        {"a": normal(8, 4, 1, 1)},
    )
    assert "p" not in importance(ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph)


def test_weighted_rows_are_repeated_rows() -> None:
    x, y = normal(2, 6, 3), normal(2, 6, 1, seed=1)
    times = np.array([[1, 2, 1, 4, 1, 3], [3, 1, 1, 2, 5, 1]])
    counts = times[:, :, None].astype(np.float32)
    weighted, repeated = Moments(), [Moments(), Moments()]
    weighted.add(x, y, counts)
    judging = HeldRows(x, y, counts)
    weight = normal(2, 3, 1, seed=2)
    for group in range(2):
        alone = slice(group, group + 1)
        rows = np.repeat(np.arange(6), times[group])
        repeated[group].add(x[alone, rows], y[alone, rows])
        mine, theirs = weighted.around(weight), repeated[group].around(weight[alone])
        for name in ("moment", "cross", "mean", "offset"):
            assert np.allclose(getattr(mine, name)[group], getattr(theirs, name)[0], atol=1e-5)
        bias = np.full((2, 1), 0.3)
        one = HeldRows(x[alone, rows], y[alone, rows]).error(weight[alone], bias[alone])
        assert np.allclose(judging.error(weight, bias)[group], one[0], rtol=1e-5)


def test_an_output_that_counts_gets_the_finer_scale() -> None:
    """A small row beside a large one: which scale is chosen depends on which of them counts."""
    weight = np.stack([normal(16, seed=1), 0.02 * normal(16, seed=2)])[None].astype(np.float64)
    chosen = []
    for counts in ([[1.0, 0.0]], [[0.0, 1.0]]):
        train = Moments()
        x = normal(1, 400, 16, seed=4)
        y = x @ weight.transpose(0, 2, 1).astype(np.float32)
        train.add(x[:, :300], y[:, :300])
        held = HeldRows(x[:, 300:], y[:, 300:])
        scale = np.abs(weight).max().reshape(1, 1, 1) / 7
        problem = Problem(
            weight,
            np.zeros((1, 2)),
            False,
            1.0,
            scale,
            (-7, 7),
            (1.0, 0.5, 0.25, 0.1),
            train,
            held,
            np.array(counts),
        )
        chosen.append(float(solve(problem).scale.item()))
    assert chosen[1] < 0.5 * chosen[0]
