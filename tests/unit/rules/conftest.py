"""A builder of small networks, and the architectures whose placement AMD has published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

WIDTH = 8


class Net:
    """Builds a network layer by layer; `x` is the tensor last made."""

    def __init__(self, shape: tuple[int | str, ...] = (1, WIDTH, 16, 16), opset: int = 17) -> None:
        self.opset = opset
        self.rng = np.random.default_rng(3)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)]
        self.outputs: list[str] = []
        self.x = "image"

    def const(self, array: Any, name: str = "") -> str:
        name = name or f"c{len(self.weights)}"
        self.weights[name] = numpy_helper.from_array(np.asarray(array), name)
        return name

    def weight(self, *shape: int) -> str:
        return self.const(self.rng.standard_normal(shape).astype(np.float32), f"w{len(self.weights)}")

    def add(self, op: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        label = f"{op}_{len(self.nodes)}" if name is None else name
        out = f"t{len(self.nodes)}"
        node = helper.make_node(op, list(inputs) or [self.x], [out], name=label, **attributes)
        self.nodes.append(node)
        self.x = out
        return out

    def conv(self, source: str = "", *, group: int = 1, kernel: int = 1, stride: int = 1, **more: Any) -> str:
        pad = kernel // 2
        full = {
            "group": group,
            "kernel_shape": [kernel] * 2,
            "strides": [stride] * 2,
            "pads": [pad] * 4,
            "dilations": [1, 1],
        }
        weight = self.weight(WIDTH, WIDTH // group, kernel, kernel)
        return self.add("Conv", source or self.x, weight, self.weight(WIDTH), **{**full, **more})

    def depthwise(self, **more: Any) -> str:
        return self.conv(group=WIDTH, kernel=3, **more)

    def relu(self) -> str:
        return self.add("Relu")

    def clip(self, high: float = 6.0) -> str:
        return self.add("Clip", self.x, self.const(np.float32(0)), self.const(np.float32(high)))

    def norm(self) -> str:
        rest = [self.weight(WIDTH) for _ in range(3)]
        variance = self.const(np.ones(WIDTH, np.float32))
        return self.add("BatchNormalization", self.x, *rest, variance)

    def silu(self) -> str:
        source = self.x
        return self.add("Mul", source, self.add("Sigmoid"))

    def reshape(self, *shape: int) -> str:
        return self.add("Reshape", self.x, self.const(np.asarray(shape, np.int64)))

    def classifier(self) -> Net:
        self.add("GlobalAveragePool")
        self.add("Flatten")
        self.add("Gemm", self.x, self.weight(4, WIDTH), self.weight(4), transB=1)
        return self

    def array(self, name: str) -> np.ndarray[Any, Any]:
        return numpy_helper.to_array(self.weights[name])

    def proto(self, *outputs: str) -> onnx.ModelProto:
        infos = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs or (self.x,)]
        graph = helper.make_graph(self.nodes, "net", self.inputs, infos, list(self.weights.values()))
        imports = [helper.make_opsetid("", self.opset)]
        return onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=imports, ir_version=8)
        )


def plain() -> Net:
    """Two Conv with Relu and a classifier: nothing to find."""
    net = Net()
    net.conv(kernel=3)
    net.relu()
    net.conv()
    net.relu()
    return net.classifier()


def resnet18() -> onnx.ModelProto:
    net = Net()
    net.conv(kernel=3, stride=2)
    net.relu()
    net.add("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for block in range(8):
        before = net.x
        net.conv(kernel=3)
        net.relu()
        after = net.conv(kernel=3)
        skip = net.conv(before) if block in (2, 4, 6) else before
        net.add("Add", after, skip)
        net.relu()
    return net.classifier().proto()


def squeezenet() -> onnx.ModelProto:
    net = Net((1, WIDTH, 31, 31))
    net.conv(kernel=3)
    net.relu()
    for _ in range(8):
        net.conv()
        squeezed = net.relu()
        net.conv(squeezed)
        left = net.relu()
        net.conv(squeezed, kernel=3)
        net.add("Concat", left, net.relu(), axis=1)
        weight = net.weight(WIDTH, 2 * WIDTH, 1, 1)
        net.add("Conv", net.x, weight, net.weight(WIDTH))
    net.relu()
    net.add("GlobalAveragePool")
    net.add("Flatten")
    return net.proto()


def _inverted(net: Net, activate: Callable[[], str], *, expand: bool, residual: bool) -> None:
    before = net.x
    if expand:
        net.conv()
        activate()
    net.depthwise()
    activate()
    net.conv()
    if residual:
        net.add("Add", before, net.x)


def mobilenet_v2() -> onnx.ModelProto:
    net = Net()
    net.conv(kernel=3, stride=2)
    net.clip()
    for block in range(17):
        _inverted(net, net.clip, expand=block > 0, residual=block in (2, 4, 5, 7, 8, 9, 11, 12, 14, 15))
    net.conv()
    net.clip()
    return net.classifier().proto()


def _squeeze_excite(net: Net, gate: str, inner: Callable[[], str], **attributes: float) -> None:
    source = net.x
    net.add("GlobalAveragePool")
    net.conv()
    inner()
    net.conv()
    net.add("Mul", net.add(gate, **attributes), source)


def efficientnet_b0() -> onnx.ModelProto:
    net = Net()
    net.conv(kernel=3)
    net.silu()
    for block in range(16):
        before = net.x
        if block:
            net.conv()
            net.silu()
        net.depthwise()
        net.silu()
        _squeeze_excite(net, "Sigmoid", net.silu)
        net.conv()
        if block in (2, 4, 6, 7, 9, 10, 12, 13, 14):
            net.add("Add", net.x, before)
    net.conv()
    net.silu()
    return net.classifier().proto()


def shufflenet_v2() -> onnx.ModelProto:
    net = Net()
    net.conv(kernel=3)
    net.relu()
    for unit in range(16):
        source = net.x
        if unit in (0, 4, 12):
            net.depthwise()
            net.conv()
            left = net.relu()
            right = source
        else:
            halves = [net.const(np.asarray(v, np.int64)) for v in ([0], [4], [8], [1])]
            left = net.add("Slice", source, halves[0], halves[1], halves[3])
            right = net.add("Slice", source, halves[1], halves[2], halves[3])
        if unit in (0, 4, 12):
            net.conv(right)
            net.relu()
            net.depthwise()
            net.conv()
            net.add("Concat", left, net.relu(), axis=1)
            weight = net.weight(WIDTH, 2 * WIDTH, 1, 1)
            net.add("Conv", net.x, weight, net.weight(WIDTH))
        else:
            net.add("Conv", right, net.weight(4, 4, 1, 1), net.weight(4))
            net.relu()
            net.add("Conv", net.x, net.weight(4, 1, 3, 3), net.weight(4), group=4, pads=[1] * 4)
            net.add("Conv", net.x, net.weight(4, 4, 1, 1), net.weight(4))
            net.add("Concat", left, net.relu(), axis=1)
        net.reshape(1, 2, 4, 16, 16)
        net.add("Transpose", perm=[0, 2, 1, 3, 4])
        net.reshape(1, WIDTH, 16, 16)
    net.conv()
    net.relu()
    net.add("ReduceMean", axes=[2, 3], keepdims=0)
    net.add("Gemm", net.x, net.weight(4, WIDTH), net.weight(4), transB=1)
    return net.proto()


def densenet121() -> onnx.ModelProto:
    net = Net((1, WIDTH, 32, 32))
    net.conv(kernel=3)
    net.relu()
    net.add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    for stage, layers in enumerate((6, 12, 24, 16)):
        channels = WIDTH
        for _ in range(layers):
            source = net.x
            _norm_of(net, channels)
            net.relu()
            net.add("Conv", net.x, net.weight(4, channels, 1, 1), net.weight(4))
            net.relu()
            made = net.add("Conv", net.x, net.weight(2, 4, 3, 3), net.weight(2), pads=[1] * 4)
            net.add("Concat", source, made, axis=1)
            channels += 2
        _norm_of(net, channels)
        net.relu()
        if stage < 3:
            net.add("Conv", net.x, net.weight(WIDTH, channels, 1, 1), net.weight(WIDTH))
            net.add("AveragePool", kernel_shape=[2, 2], strides=[2, 2])
    net.add("GlobalAveragePool")
    net.add("Flatten")
    net.add("Gemm", net.x, net.weight(4, channels), net.weight(4), transB=1)
    return net.proto()


def _norm_of(net: Net, channels: int) -> None:
    rest = [net.weight(channels) for _ in range(3)]
    net.add("BatchNormalization", net.x, *rest, net.const(np.ones(channels, np.float32)))


_ARCHITECTURES = {
    build.__name__: build
    for build in (resnet18, squeezenet, mobilenet_v2, efficientnet_b0, shufflenet_v2, densenet121)
}


@pytest.fixture
def make() -> type[Net]:
    """The builder."""
    return Net


@pytest.fixture
def clean() -> Net:
    """A network without findings."""
    return plain()


@pytest.fixture
def architecture() -> Callable[[str], onnx.ModelProto]:
    """A published network's structure, with few channels and random weights."""
    return lambda name: _ARCHITECTURES[name]()
