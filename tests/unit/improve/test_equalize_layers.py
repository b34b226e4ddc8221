"""Every kind of layer, before and behind a space: groups, dimensions, transposed and flattened inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from equalize_cases import check_equalized
from helpers import build, feeds, node, normal
from roundel.improve.equalize import EqualizeReport, equalize
from roundel.passes.shapes import refresh_shapes
from roundel.recipe.settings import Equalize

X = {"x": (1, 3, 8, 8)}


def uneven(*shape: int, seed: int = 0) -> Any:
    """Weights whose first axis has ranges that differ by up to 2**8."""
    factors = 2.0 ** np.random.default_rng(seed + 99).uniform(-4, 4, shape[0])
    return (normal(*shape, seed=seed) * factors.reshape(-1, *[1] * (len(shape) - 1))).astype(np.float32)


def run(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Any],
    inputs: Mapping[str, Sequence[int]] = X,
) -> EqualizeReport:
    """Equalize, and prove that nothing changed."""
    before = ir.from_proto(build(nodes, inputs, ["y"], constants))
    refresh_shapes(before)
    after = before.clone()
    report = equalize(after, Equalize(), power_of_two=False)
    for scale in (0.01, 1.0, 100.0):
        assert check_equalized(before, after, feeds(inputs, 2, scale)) < 1e-5
    return report


def all_moved(report: EqualizeReport, count: int) -> bool:
    """Every channel was balanced; the largest on both sides may have been so before."""
    return count - 1 <= report.channels <= count


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_groups(groups: int, multiplier: int) -> None:
    nodes = [
        node("Conv", ["x", "w0", "b0"], ["a"]),
        node("Relu", ["a"], ["r"]),
        node("Conv", ["r", "w1", "b1"], ["b"], group=groups, pads=[1] * 4),
        node("Relu", ["b"], ["q"]),
        node("Conv", ["q", "w2"], ["y"], group=2),
    ]
    constants = {
        "w0": uneven(6, 3, 3, 3),
        "b0": normal(6),
        "w1": uneven(6 * multiplier, 6 // groups, 3, 3, seed=1),
        "b1": normal(6 * multiplier, seed=2),
        "w2": normal(4, 3 * multiplier, 1, 1, seed=3),
    }
    report = run(nodes, constants)
    assert report.spaces == 2
    assert report.channels >= 4 + 6 * multiplier


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_dimensions(op: str, axes: int) -> None:
    nodes = [
        node(op, ["x", "w0", "b0"], ["a"], group=2),
        node("Relu", ["a"], ["r"]),
        node(op, ["r", "w1"], ["y"], strides=[2] * axes),
    ]
    kernel = (3,) * axes
    first = (6, 2) if op == "Conv" else (4, 3)
    second = (5, 6) if op == "Conv" else (6, 5)
    constants = {"w0": uneven(*first, *kernel), "b0": uneven(6), "w1": uneven(*second, *kernel, seed=1)}
    assert all_moved(run(nodes, constants, inputs={"x": (1, 4, *(7,) * axes)}), 6)


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("bias", [(6,), (1, 6), (2, 6), (1,), ()])
def test_gemm(turned: int, bias: tuple[int, ...]) -> None:
    nodes = [
        node("Gemm", ["x", "w0", "b0"], ["a"], transB=turned, alpha=-0.5, beta=2.0),
        node("Relu", ["a"], ["r"]),
        node("Gemm", ["r", "w1"], ["y"], transB=turned, alpha=3.0),
    ]
    first, second = uneven(6, 5), normal(4, 6, seed=1)
    constants = {
        "w0": first if turned else first.T.copy(),
        "w1": second if turned else second.T.copy(),
        "b0": normal(*bias, seed=2),
    }
    report = run(nodes, constants, inputs={"x": (2, 5)})
    assert all_moved(report, 6)


def test_a_transposed_input_is_not_taken_for_channels() -> None:
    nodes = [node("Gemm", ["x", "w0"], ["a"]), node("Gemm", ["a", "w1"], ["y"], transA=1)]
    report = run(nodes, {"w0": normal(5, 6), "w1": normal(6, 3)}, inputs={"x": (6, 5)})
    assert report.channels == 0


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5)])
def test_matmul(shape: tuple[int, ...]) -> None:
    nodes = [
        node("MatMul", ["x", "w0"], ["a"]),
        node("Relu", ["a"], ["r"]),
        node("MatMul", ["r", "w1"], ["y"]),
    ]
    report = run(nodes, {"w0": uneven(7, 5).T.copy(), "w1": normal(7, 3)}, inputs={"x": shape})
    assert all_moved(report, 7)


def test_matmul_of_two_activations_stops_it() -> None:
    nodes = [node("MatMul", ["x", "w0"], ["a"]), node("MatMul", ["q", "a"], ["y"])]
    assert run(nodes, {"w0": normal(5, 7)}, inputs={"x": (4, 5), "q": (3, 4)}).channels == 0


HEADS: dict[str, tuple[list[onnx.NodeProto], int, dict[str, Any]]] = {
    "flatten": ([node("Flatten", ["a"], ["f"])], 36, {}),
    "reshape": ([node("Reshape", ["a", "to"], ["f"])], 36, {"to": np.int64([0, -1])}),
    "pool": ([node("GlobalAveragePool", ["a"], ["p"]), node("Flatten", ["p"], ["f"])], 1, {}),
    "mean": ([node("ReduceMean", ["a"], ["f"], axes=[2, -1], keepdims=0)], 1, {}),
    "squeeze": (
        [node("GlobalMaxPool", ["a"], ["p"]), node("Squeeze", ["p", "to"], ["f"])],
        1,
        {"to": np.int64([2, 3])},
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_from_images_to_vectors(case: str) -> None:
    middle, run_length, extra = HEADS[case]
    nodes = [node("Conv", ["x", "w0", "b0"], ["a"]), *middle, node("Gemm", ["f", "w1"], ["y"], transB=1)]
    constants = {"w0": uneven(6, 3, 3, 3), "b0": normal(6), "w1": normal(4, 6 * run_length, seed=1)}
    assert all_moved(run(nodes, {**constants, **extra}), 6)
