"""XINT8 files written by hand, node by node, and the Conv fixtures measured on a Phoenix NPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

PIXELS = 16


class QdqNet:
    """Builds a file with Q/DQ pairs in power-of-two scales; `x` is the float tensor last made."""

    def __init__(self, *shape: int | str, position: int = 0, dtype: Any = np.uint8) -> None:
        self.zero = 128 if dtype == np.uint8 else 0
        self.dtype = dtype
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))]
        self.x = "x"
        self.pair(position)

    def const(self, array: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op}_{len(self.nodes)}"
        outputs = attributes.pop("outputs", 1)
        outs = [name] if outputs == 1 else [f"{name}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), outs, name=name, **attributes))
        self.x = outs[0]
        return self.x

    def pair(self, position: int, source: str | None = None) -> str:
        scale, zero = self.const(2.0**-position), self.const(self.zero, self.dtype)
        codes = self.add("QuantizeLinear", source or self.x, scale, zero)
        return self.add("DequantizeLinear", codes, scale, zero)

    def stored(self, codes: Any, position: int, dtype: Any = np.int8) -> str:
        scale, zero = self.const(2.0**-position), self.const(0, dtype)
        return self.add("DequantizeLinear", self.const(codes, dtype), scale, zero)

    def layer(self, op: str, weight: Any, bias: Any, positions: tuple[int, int], **attributes: Any) -> str:
        source = self.x
        inputs = [source, self.stored(weight, positions[0])]
        if bias is not None:
            inputs.append(self.stored(bias, positions[1]))
        return self.add(op, *inputs, **attributes)

    def model(self, *outputs: str) -> onnx.ModelProto:
        infos = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs or (self.x,)]
        graph = helper.make_graph(self.nodes, "file", self.inputs, infos, self.tensors)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(made)


def fixture_weights(channels: int, *, reverse: bool) -> NDArray[np.int8]:
    weights = np.zeros((32, channels), np.int64)
    parity = np.where(np.arange(channels) % 2 == 0, 3, -3)
    for output in range(32):
        match output % 8:
            case 0 | 1 as kind:
                weights[output, 0] = 1 - 2 * kind
            case 2 | 3 as kind:
                weights[output] = 5 - 2 * kind
            case 4:
                weights[output] = parity
            case 5 | 6 as kind:
                weights[output] = 127 * (11 - 2 * kind)
            case 7:
                weights[output, -1] = 1
    if reverse:
        weights = weights[:, ::-1]
    return weights.reshape(32, channels, 1, 1).astype(np.int8)


def fixture_model(
    channels: int, shift_cut: int, shift_bias: int, *, reverse: bool = False, dtype: Any = np.uint8
) -> onnx.ModelProto:
    """One 1x1 Conv, with all positions 0 but those that the two shifts ask for."""
    net = QdqNet(1, channels, PIXELS, PIXELS, dtype=dtype)
    bias = np.repeat(np.asarray([0, 1, -1, 127], np.int8), 8)
    attributes = {"kernel_shape": [1, 1], "strides": [1, 1], "pads": [0] * 4, "dilations": [1, 1], "group": 1}
    net.layer("Conv", fixture_weights(channels, reverse=reverse), bias, (0, -shift_bias), **attributes)
    net.pair(-shift_cut)
    return net.model()


def fixture_input(kind: str, channels: int, *, reverse: bool = False) -> NDArray[np.float32]:
    pixel = np.arange(PIXELS * PIXELS)
    ramp = (pixel - 128).astype(np.float32)
    ties = ramp + np.float32(0.5)
    rows = {
        "ramp": ramp,
        "zero": 0 * ramp,
        "ties": ties,
        "below": np.nextafter(ties, np.float32(-np.inf)),
        "above": np.nextafter(ties, np.float32(np.inf)),
    }
    if kind == "phase":
        planes = [((pixel + 17 * c) % 256) - 128 for c in range(channels)]
    elif kind == "cancel":
        planes = [ramp if c % 2 == 0 else -ramp - 1 for c in range(channels)]
    else:
        planes = [rows[kind]] * channels
    stacked = np.asarray(planes, np.float32)
    if reverse:
        stacked = stacked[::-1]
    return np.ascontiguousarray(stacked.reshape(1, channels, PIXELS, PIXELS))


def codes(values: NDArray[np.float32], position: int) -> NDArray[np.uint8]:
    """The uint8 codes of dequantized values."""
    return np.asarray(values * 2.0**position + 128, np.uint8)
