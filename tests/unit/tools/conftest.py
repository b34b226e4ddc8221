"""A small network in several quantized forms, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import pytest

from helpers import Feed, build, feeds, node, normal, quantize

SHAPE = [1, 3, 8, 8]


def network(*, opset: int = 17) -> onnx.ModelProto:
    """Conv, Relu, a product and a sum, a pool and a Gemm, with biases."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Sigmoid", ["r"], ["s"], name="sigmoid"),
        node("Mul", ["r", "s"], ["m"], name="mul"),
        node("Add", ["m", "r"], ["a"], name="add"),
        node("GlobalAveragePool", ["a"], ["p"], name="pool"),
        node("Flatten", ["p"], ["f"], name="flatten"),
        node("Gemm", ["f", "k", "d"], ["y"], name="gemm", transB=1),
    ]
    constants = {
        "w": normal(4, 3, 3, 3),
        "b": normal(4, seed=2),
        "k": normal(5, 4, seed=3),
        "d": normal(5, seed=4),
    }
    return build(nodes, {"x": SHAPE}, ["y"], constants, opset=opset)


@cache
def quantized(recipe: str) -> onnx.ModelProto:
    return quantize(network(), recipe, data()).model


@cache
def data() -> list[Feed]:
    return feeds({"x": SHAPE}, count=8)


@pytest.fixture
def float_model() -> onnx.ModelProto:
    return network()


@pytest.fixture
def model_of() -> Callable[[str], onnx.ModelProto]:
    """The network quantized with a preset, calibration only."""

    def made(recipe: str) -> onnx.ModelProto:
        copy = onnx.ModelProto()
        copy.CopyFrom(quantized(recipe))
        return copy

    return made


@pytest.fixture
def sample() -> Feed:
    return {"x": np.asarray(normal(*SHAPE, seed=9), np.float32)}
