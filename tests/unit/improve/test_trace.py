"""Factors find their way up to constants, and the tensor is then divided by them: run, not argued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from helpers import build, feeds, node, normal, run
from roundel.improve.trace import trace
from roundel.model.edit import Editor
from roundel.model.graph import values_by_name
from roundel.passes.shapes import refresh_shapes

WIDTH = 12
X = {"x": (1, 5, 8)}
WEIGHT, BIAS = normal(8, WIDTH), normal(WIDTH, seed=1)
LINEAR = [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["a"])]
Case = tuple[list[onnx.NodeProto], Mapping[str, Any]]


def heads(source: str, name: str, order: Sequence[int]) -> list[onnx.NodeProto]:
    """(1, 5, 12) as three heads of four."""
    return [
        node("Reshape", [source, "split"], [f"{name}s"]),
        node("Transpose", [f"{name}s"], [name], perm=order),
    ]


SHAPES = {"split": np.int64([1, 5, 3, 4]), "join": np.int64([1, 5, WIDTH])}
FUSED = [node("MatMul", ["x", "wide"], ["m"]), node("Add", ["m", "wide_b"], ["a"])]
FUSED_CONSTANTS = {"wide": normal(8, 3 * WIDTH), "wide_b": normal(3 * WIDTH, seed=1)}

PASSED: dict[str, Case] = {
    "layer norm": (
        [*LINEAR, node("LayerNormalization", ["a", "g", "h"], ["t"], axis=-1)],
        {"g": normal(WIDTH, seed=3), "h": normal(WIDTH, seed=4)},
    ),
    "layer norm without shift": ([*LINEAR, node("LayerNormalization", ["a", "g"], ["t"])], {"g": normal(12)}),
    "constant gain": ([*LINEAR, node("Mul", ["a", "g"], ["t"])], {"g": normal(WIDTH, seed=3)}),
    "gain from the left": ([*LINEAR, node("Mul", ["g", "a"], ["t"])], {"g": normal(1, 1, WIDTH, seed=3)}),
    "gain of a sigmoid": (
        [*LINEAR, node("Sigmoid", ["a"], ["s"]), node("Mul", ["s", "g"], ["t"])],
        {"g": normal(WIDTH, seed=3)},
    ),
    "layer": ([node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["t"])], {}),
    "scalar shift": ([node("MatMul", ["x", "w"], ["m"]), node("Sub", ["one", "m"], ["t"])], {"one": [1.5]}),
    "gemm": (
        [node("Reshape", ["x", "flat"], ["f"]), node("Gemm", ["f", "v", "b"], ["t"], transB=1)],
        {"flat": np.int64([5, 8]), "v": WEIGHT.T.copy()},
    ),
    "relu": ([*LINEAR, node("Relu", ["a"], ["t"])], {}),
    "leaky": ([*LINEAR, node("LeakyRelu", ["a"], ["t"], alpha=0.3)], {}),
    "one factor for all": ([*LINEAR, node("Mul", ["a", "k"], ["t"])], {"k": np.float32(3)}),
    "quotient": ([*LINEAR, node("Div", ["a", "k"], ["t"])], {"k": normal(WIDTH, seed=6)}),
    "gate": (
        [
            *LINEAR,
            node("MatMul", ["x", "u"], ["c"]),
            node("Sigmoid", ["c"], ["s"]),
            node("Mul", ["s", "a"], ["t"]),
        ],
        {"u": normal(8, WIDTH, seed=9)},
    ),
    "attention": (
        [
            *LINEAR,
            *heads("a", "v", [0, 2, 1, 3]),
            node("MatMul", ["p", "v"], ["mixed"]),
            node("Transpose", ["mixed"], ["back"], perm=[0, 2, 1, 3]),
            node("Reshape", ["back", "join"], ["t"]),
        ],
        {**SHAPES, "p": normal(1, 3, 5, 5, seed=8)},
    ),
    "split": (
        [
            *FUSED,
            node("Split", ["a", "sizes"], ["q", "k", "t"], axis=-1),
            node("Add", ["q", "k"], ["y2"]),
        ],
        {**FUSED_CONSTANTS, "sizes": np.int64([WIDTH] * 3)},
    ),
    "slices": (
        [
            *FUSED,
            node("Slice", ["a", "b0", "e0", "last"], ["q"]),
            node("Slice", ["a", "b1", "e1", "last"], ["t"]),
            node("Sigmoid", ["q"], ["y2"]),
        ],
        {
            **FUSED_CONSTANTS,
            **{"b0": np.int64([0]), "e0": np.int64([24]), "b1": np.int64([-12]), "e1": np.int64([2**40])},
            "last": np.int64([-1]),
        },
    ),
    "gathers": (
        [
            *FUSED,
            node("Reshape", ["a", "thirds"], ["r"]),
            node("Gather", ["r", "zero"], ["q"], axis=2),
            node("Gather", ["r", "two"], ["t"], axis=-2),
            node("Sigmoid", ["q"], ["y2"]),
        ],
        {
            **FUSED_CONSTANTS,
            **{"thirds": np.int64([1, 5, 3, WIDTH]), "zero": np.int64(0), "two": np.int64(2)},
        },
    ),
}


def prepared(nodes: Sequence[onnx.NodeProto], constants: Mapping[str, Any]) -> ir.Model:
    tensors = {"w": WEIGHT, "b": BIAS, **{k: np.asarray(v) for k, v in constants.items()}}
    tensors = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in tensors.items()}
    read = {name for n in nodes for name in n.input}
    made = {name for n in nodes for name in n.output}
    kept = {k: v for k, v in tensors.items() if k in read}
    model = ir.from_proto(build(nodes, X, [n for n in ("t", "y2", "seen") if n in made], kept))
    refresh_shapes(model)
    return model


@pytest.mark.parametrize("case", PASSED)
def test_the_tensor_is_divided(case: str) -> None:
    nodes, constants = PASSED[case]
    model = prepared(nodes, constants)
    value = values_by_name(model.graph)["t"]
    feed = feeds(X, 1)[0]
    before = run(model, feed)
    edits = trace(value)
    assert edits
    factors = np.exp2(np.random.default_rng(3).uniform(-4, 4, WIDTH))
    for edit in edits:
        edit.apply(Editor(model), factors)
    after = run(model, feed)
    np.testing.assert_allclose(after[0] * factors, before[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(one, other)


BLOCKED: dict[str, Case] = {
    "sigmoid": ([*LINEAR, node("Sigmoid", ["a"], ["t"])], {}),
    "softmax": ([*LINEAR, node("Softmax", ["a"], ["t"])], {}),
    "graph input": ([node("Relu", ["x"], ["t"])], {}),
    "two computed terms": (
        [*LINEAR, node("MatMul", ["x", "u"], ["c"]), node("Add", ["a", "c"], ["t"])],
        {"u": normal(8, WIDTH, seed=9)},
    ),
    "square": ([*LINEAR, node("Mul", ["a", "a"], ["t"])], {}),
    "another reader above": ([*LINEAR, node("Relu", ["a"], ["t"]), node("Sigmoid", ["a"], ["y2"])], {}),
    "an output above": (
        [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["seen"]), node("Relu", ["seen"], ["t"])],
        {},
    ),
    "places mixed": (
        [*LINEAR, node("Reshape", ["a", "odd"], ["r"]), node("Relu", ["r"], ["t"])],
        {"odd": np.int64([1, 6, 10])},
    ),
    "slices that overlap": (
        [
            *FUSED,
            node("Slice", ["a", "b0", "e0", "last"], ["q"]),
            node("Slice", ["a", "b1", "e1", "last"], ["t"]),
            node("Sigmoid", ["q"], ["y2"]),
        ],
        {
            **FUSED_CONSTANTS,
            **{"b0": np.int64([0]), "e0": np.int64([25]), "b1": np.int64([24]), "e1": np.int64([36])},
            "last": np.int64([-1]),
        },
    ),
    "norm with computed scale": (
        [*LINEAR, node("Sigmoid", ["b"], ["g"]), node("LayerNormalization", ["a", "g"], ["t"])],
        {},
    ),
}


@pytest.mark.parametrize("case", BLOCKED)
def test_there_is_no_way(case: str) -> None:
    model = prepared(*BLOCKED[case])
    assert trace(values_by_name(model.graph)["t"]) is None


def test_a_shared_constant_is_copied() -> None:
    nodes = [
        *LINEAR,
        node("Mul", ["a", "g"], ["t"]),
        node("MatMul", ["x", "u"], ["c"]),
        node("Mul", ["c", "g"], ["y2"]),
    ]
    model = prepared(nodes, {"g": normal(WIDTH, seed=3), "u": normal(8, WIDTH, seed=9)})
    feed = feeds(X, 1)[0]
    before = run(model, feed)
    for edit in trace(values_by_name(model.graph)["t"]) or ():
        edit.apply(Editor(model), np.full(WIDTH, 2.0))
    after = run(model, feed)
    np.testing.assert_allclose(after[0] * 2, before[0], rtol=1e-6)
    np.testing.assert_array_equal(after[1], before[1])
