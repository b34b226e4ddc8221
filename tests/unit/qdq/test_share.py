"""One weight that several layers read is stored once, where their scales agree."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import roundel
from helpers import build, feeds, initializers, node, normal


def shared(count: int) -> onnx.ModelProto:
    weight = normal(16, 16, 3, 3, scale=0.1)
    nodes = []
    for index in range(count):
        nodes += [
            node("Conv", [f"x{index}", "w"], [f"c{index}"], name=f"conv{index}", pads=[1, 1, 1, 1]),
            node("Relu", [f"c{index}"], [f"x{index + 1}"], name=f"relu{index}"),
        ]
    return build(nodes, {"x0": [1, 16, 8, 8]}, [f"x{count}"], {"w": weight})


@pytest.mark.parametrize("preset", ["xint8", "a8w8"])
def test_equal_codes_are_stored_once(preset: str) -> None:
    model = shared(4)
    result = roundel.quantize(model, recipe=preset, data=feeds({"x0": (1, 16, 8, 8)}), effort="none")
    codes = [a for a in initializers(result.model).values() if a.shape == (16, 16, 3, 3)]
    assert len(codes) == 1
    readers = [n for n in result.model.graph.node if n.op_type == "Conv"]
    assert len(readers) == 4
    assert result.record.outputs[0].sqnr_db > 10


def test_weights_with_scales_of_their_own_stay_apart() -> None:
    weight = normal(4, 4, 1, 1)
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="one"),
        node("Conv", ["c", "v"], ["y"], name="two"),
    ]
    constants = {"w": weight, "v": np.asarray(weight * 3, np.float32)}
    model = build(nodes, {"x": [1, 4, 4, 4]}, ["y"], constants)
    result = roundel.quantize(model, recipe="a8w8", data=feeds({"x": (1, 4, 4, 4)}), effort="none")
    assert len([a for a in initializers(result.model).values() if a.shape == (4, 4, 1, 1)]) == 2
