"""A detector in the manner of YOLO, operator by operator, with seeded weights: its shape is what matters.

Boxes in pixels (0 to 320) and scores (0 to 1) leave it in one tensor. One 8-bit scale for both has steps of
2.5, so that every score becomes zero: the reason why detectors' heads stay in float.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, CLASSES, CELL = 320, 4, 32
GRID = SIDE // CELL
WIDTHS = (3, 8, 16, 24, 32, 48)


def build() -> onnx.ModelProto:
    """Five strided convolutions, and a head that turns each cell into a box and its scores."""
    generator = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, Any] = {}

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def constant(name: str, array: Any) -> str:
        constants[name] = np.asarray(array)
        return name

    def conv(x: str, name: str, wide: int, out: int, size: int, stride: int) -> str:
        spread = (2 / (wide * size * size)) ** 0.5
        weight = constant(
            f"{name}.w", generator.normal(0, spread, (out, wide, size, size)).astype(np.float32)
        )
        bias = constant(f"{name}.b", generator.normal(0, 0.1, out).astype(np.float32))
        pads = [size // 2] * 4
        return node("Conv", [x, weight, bias], name, strides=[stride] * 2, pads=pads, kernel_shape=[size] * 2)

    x = "images"
    for index, (wide, out) in enumerate(pairwise(WIDTHS)):
        x = node(
            "LeakyRelu",
            [conv(x, f"backbone/conv{index}", wide, out, 3, 2)],
            f"backbone/act{index}",
            alpha=0.1,
        )
    x = conv(x, "head/conv", WIDTHS[-1], 4 + CLASSES, 1, 1)
    x = node("Reshape", [x, constant("cells", np.int64([0, 4 + CLASSES, GRID * GRID]))], "head/cells")
    x = node("Transpose", [x], "head/rows", perm=[0, 2, 1])
    x = node("Sigmoid", [x], "head/sigmoid")
    parts = [constant(f"part{index}", np.int64([at])) for index, at in enumerate((0, 2, 4, 4 + CLASSES, 2))]
    middle = node("Slice", [x, parts[0], parts[1], parts[4]], "head/middle")
    size = node("Slice", [x, parts[1], parts[2], parts[4]], "head/size")
    scores = node("Slice", [x, parts[2], parts[3], parts[4]], "head/scores")
    rows, columns = np.divmod(np.arange(GRID * GRID), GRID)
    corner = constant("corner", np.stack([columns, rows], 1)[None].astype(np.float32))
    moved = node("Add", [middle, corner], "head/move")
    places = node("Mul", [moved, constant("cell", np.float32(CELL))], "head/place")
    wide_ = node("Mul", [size, constant("anchor", np.float32([[[96, 64]]]))], "head/scale")
    nodes.append(
        helper.make_node("Concat", [places, wide_, scores], ["detections"], name="head/join", axis=2)
    )
    inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 3, SIDE, SIDE])]
    shape = ["N", GRID * GRID, 4 + CLASSES]
    outputs = [helper.make_tensor_value_info("detections", TensorProto.FLOAT, shape)]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "detector", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def images(count: int, seed: int) -> list[dict[str, Any]]:
    """Coloured rectangles on noise."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        image = generator.normal(0, 0.1, (1, 3, SIDE, SIDE)).astype(np.float32)
        for _ in range(4):
            left, top = generator.integers(0, SIDE - 64, 2)
            wide, high = generator.integers(16, 64, 2)
            colour = generator.uniform(-1, 1, (3, 1, 1)).astype(np.float32)
            image[0, :, top : top + high, left : left + wide] += colour
        found.append({"images": image})
    return found
