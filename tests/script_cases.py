"""A small network and a reader as scripts write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization.calibrate import CalibrationDataReader

from helpers import build, node, normal, rng

SHAPE = (1, 3, 8, 8)


class Reader(CalibrationDataReader):
    """Hands out random images, then None."""

    def __init__(self, count: int = 6, name: str = "x") -> None:
        generator = rng(1)
        samples = [{name: generator.normal(0, 1, SHAPE).astype(np.float32)} for _ in range(count)]
        self._left: Iterator[dict[str, Any]] = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)


def network() -> onnx.ModelProto:
    """A stem, a block with a sum, a head; the batch norm is folded away by preparation."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="stem", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "g", "h", "m", "v"], ["n"], name="norm"),
        node("Relu", ["n"], ["r"], name="relu"),
        node("Conv", ["r", "k"], ["d"], name="block", pads=[1, 1, 1, 1]),
        node("Add", ["d", "r"], ["a"], name="sum"),
        node("GlobalAveragePool", ["a"], ["p"], name="pool"),
        node("Flatten", ["p"], ["f"], name="flatten"),
        node("Gemm", ["f", "l"], ["y"], name="head", transB=1),
    ]
    constants = {
        "w": normal(4, 3, 3, 3),
        "b": normal(4, seed=1),
        "g": np.float32([1, 2, 1, 1]),
        "h": normal(4, seed=2),
        "m": normal(4, seed=3),
        "v": np.float32([1, 1, 2, 1]),
        "k": normal(4, 4, 3, 3, seed=4, scale=0.3),
        "l": normal(5, 4, seed=5),
    }
    return build(nodes, {"x": list(SHAPE)}, ["y"], constants)
