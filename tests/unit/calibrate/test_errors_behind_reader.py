"""Ranges by what the function behind a tensor lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

import roundel
from helpers import build, node, normal, rng
from roundel.calibrate.resolve import reader_functions
from roundel.numerics.affine import dequantize, params_from_range, quantize
from roundel.numerics.histogram import bins_of
from roundel.numerics.scales import least_squares_range, power_of_two_least_squares
from roundel.types import QParams, QType, ScaleKind, Scheme

Array = NDArray[np.float64]
INT8 = Scheme(QType.INT8)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _model(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",)) -> ir.Graph:
    first = node("Conv", ["x", "w"], ["c"], name="conv")
    last = node("Conv", ["a", "k"], ["y"], name="conv2")
    constants = {"w": normal(4, 3, 3, 3), "k": normal(4, 4, 1, 1, seed=1)}
    proto = build([first, *nodes, last], {"x": [1, 3, 8, 8]}, list(outputs), constants)
    return ir.from_proto(proto).graph


_GATE = node("Sigmoid", ["c"], ["s"], name="sigmoid")
_SILU = (_GATE, node("Mul", ["c", "s"], ["a"], name="mul"))


@pytest.mark.parametrize(
    ("nodes", "function"),
    [
        (_SILU, silu),
        ((node("Sigmoid", ["c"], ["a"], name="s"),), sigmoid),
        ((node("Tanh", ["c"], ["a"], name="t"),), np.tanh),
        ((node("HardSigmoid", ["c"], ["a"], name="h"),), lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
        ((node("Elu", ["c"], ["a"], name="e", alpha=0.5),), lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
    ],
)
def test_the_function_is_found(nodes: tuple[onnx.NodeProto, ...], function: Callable[[Array], Array]) -> None:
    x = np.linspace(-9, 9, 61)
    found = reader_functions(_model(*nodes))
    assert set(found) == {"c"}
    np.testing.assert_allclose(found["c"](x), function(x), atol=1e-9)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (_SILU, ("y", "c")),  # the tensor is seen from outside
        (_SILU, ("y", "s")),  # its gate is
        ((_GATE, node("Add", ["c", "s"], ["a"], name="add")), ("y",)),
        ((node("Relu", ["c"], ["a"], name="relu"),), ("y",)),
    ],
)
def test_where_more_is_seen_there_is_none(
    nodes: tuple[onnx.NodeProto, ...], outputs: tuple[str, ...]
) -> None:
    assert reader_functions(_model(*nodes, outputs=outputs)) == {}


def _loss(x: Array, params: QParams, function: Callable[[Array], Array]) -> float:
    read = dequantize(quantize(x.astype(np.float32), params), params).astype(np.float64)
    return float(np.square(function(read) - function(x)).sum())


def _values(name: str) -> Array:
    draw = rng(7)
    small = draw.normal(0, 2, 20_000)
    if name == "negative":  # as in front of a SiLU: far below zero, where nothing is seen of it
        return np.concatenate([small, draw.uniform(-140, -20, 2_000)])
    if name == "both":
        return np.concatenate([small, draw.uniform(-60, 60, 2_000)])
    return small


@pytest.mark.parametrize("function", [silu, sigmoid, np.tanh])
@pytest.mark.parametrize("name", ["negative", "both", "plain"])
def test_the_error_behind_the_function_is_not_larger(function: Callable[[Array], Array], name: str) -> None:
    x = _values(name)
    bins = bins_of(x.astype(np.float32))
    power = Scheme(QType.INT8, scale=ScaleKind.POWER_OF_TWO)
    for reader, plain in (
        (
            params_from_range(*_ends(least_squares_range(bins, INT8, function)), INT8),
            params_from_range(*_ends(least_squares_range(bins, INT8)), INT8),
        ),
        (power_of_two_least_squares(bins, power, reader=function), power_of_two_least_squares(bins, power)),
    ):
        assert _loss(x, reader, function) <= 1.02 * _loss(x, plain, function)
    if name == "negative" and function is silu:
        narrow = least_squares_range(bins, INT8, silu).absmax
        assert narrow < 0.2 * least_squares_range(bins, INT8).absmax


def _ends(chosen: Any) -> tuple[float, float]:
    return chosen.low, chosen.high


def test_saturated_values_still_hold_the_range_open() -> None:
    """All at 8, where a Sigmoid is flat: cut to 1 they would be another value, though the slope is none."""
    x = np.concatenate([np.full(1000, 8.0), rng(1).normal(0, 0.5, 1000)])
    assert least_squares_range(bins_of(x.astype(np.float32)), INT8, sigmoid).absmax > 4


def test_with_effort_a_silu_gets_the_narrower_range() -> None:
    constants = {
        "w": np.float32([[[[1.0]]]]),
        "b": np.float32([0.0]),
        "k": normal(4, 1, 1, 1, seed=1),
    }
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        *_SILU,
        node("Conv", ["a", "k"], ["y"], name="conv2"),
    ]
    proto = build(nodes, {"x": [1, 1, 40, 40]}, ["y"], constants)
    draw = rng(3)
    data = [
        {"x": np.concatenate([draw.normal(0, 2, 1500), draw.uniform(-140, -20, 100)])
         .astype(np.float32).reshape(1, 1, 40, 40)}
        for _ in range(10)
    ]  # fmt: skip
    changes = {"calibration.method": "mse", "improve.equalize.enabled": False, "improve.rounding": False}
    scales = {}
    for effort in ("none", "fast"):
        done = roundel.quantize(proto, recipe="a8w8", effort=effort, data=data, changes=changes)
        codes = next(n for n in done.ir.graph if n.op_type == "QuantizeLinear" and n.inputs[0].name == "c")
        scales[effort] = float(codes.inputs[1].const_value.numpy())  # type: ignore[union-attr]
    assert scales["fast"] < 0.5 * scales["none"]
