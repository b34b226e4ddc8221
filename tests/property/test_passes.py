"""Random small networks come out of `prepare` with the same outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from roundel.passes import prepare
from roundel.recipe.settings import Prepare

EVERYTHING = Prepare(
    split_to_slice=True,
    batch_norm_to_conv=True,
    reduce_mean_to_global_average_pool=True,
    split_large_pools=True,
)

SIZE = 24  # large enough for a global pool to be split


@dataclass
class Sketch:
    """A network under construction; every value is [1, channels, size, size]."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    channels: dict[str, int] = field(default_factory=lambda: {"x": 4})

    def weight(self, *shape: int, low: float = -1, high: float = 1) -> str:
        name = f"w{len(self.weights)}"
        array = self.rng.uniform(low, high, shape).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, inputs: list[str], channels: list[int], **attributes: Any) -> list[str]:
        names = [f"v{len(self.channels) + index}" for index in range(len(channels))]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        self.channels.update(zip(names, channels, strict=True))
        return names

    def norm(self, source: str) -> list[str]:
        size = self.channels[source]
        vectors = [self.weight(size) for _ in range(3)]
        return self.add("BatchNormalization", [source, *vectors, self.weight(size, low=0.5, high=2)], [size])


def conv(draw: Any, sketch: Sketch, source: str) -> None:
    size = sketch.channels[source]
    outputs = draw(st.sampled_from([2, 4]))
    groups = draw(st.sampled_from([g for g in (1, 2) if size % g == 0]))
    kernel = draw(st.sampled_from([1, 3]))
    inputs = [source, sketch.weight(outputs, size // groups, kernel, kernel)]
    if draw(st.booleans()):
        inputs.append(sketch.weight(outputs))
    padding = draw(st.sampled_from(["auto_pad", "pads"]))
    attributes = {"auto_pad": "SAME_UPPER"} if padding == "auto_pad" else {"pads": [kernel // 2] * 4}
    (made,) = sketch.add("Conv", inputs, [outputs], group=groups, **attributes)
    if draw(st.booleans()):
        sketch.norm(made)


def transposed(draw: Any, sketch: Sketch, source: str) -> None:
    size = sketch.channels[source]
    (made,) = sketch.add("ConvTranspose", [source, sketch.weight(size, 2, 1, 1)], [2])
    if draw(st.booleans()):
        sketch.norm(made)


def norm(draw: Any, sketch: Sketch, source: str) -> None:
    sketch.norm(source)


def relu(draw: Any, sketch: Sketch, source: str) -> None:
    sketch.add("Relu", [source], [sketch.channels[source]])


def identity(draw: Any, sketch: Sketch, source: str) -> None:
    sketch.add(draw(st.sampled_from(["Identity", "Dropout"])), [source], [sketch.channels[source]])


def pool(draw: Any, sketch: Sketch, source: str) -> None:
    op = draw(st.sampled_from(["MaxPool", "AveragePool"]))
    size = [sketch.channels[source]]
    if not size[0]:
        return  # ONNX Runtime refuses to pool an empty tensor
    sketch.add(op, [source], size, kernel_shape=[3, 3], auto_pad="SAME_LOWER", strides=[1, 1])


def split(draw: Any, sketch: Sketch, source: str) -> None:
    size = sketch.channels[source]
    parts = [size // 2, size - size // 2]
    sketch.weights.append(numpy_helper.from_array(np.array(parts), f"w{len(sketch.weights)}"))
    sketch.add("Split", [source, sketch.weights[-1].name], parts, axis=1)


def concat(draw: Any, sketch: Sketch, source: str) -> None:
    other = draw(st.sampled_from(sorted(sketch.channels)))
    size = sketch.channels[source] + sketch.channels[other]
    if size > 16:
        return
    (made,) = sketch.add("Concat", [source, other], [size], axis=draw(st.sampled_from([1, -3])))
    if draw(st.booleans()):
        sketch.norm(made)


def bias(draw: Any, sketch: Sketch, source: str) -> None:
    size = sketch.channels[source]
    shape = draw(st.sampled_from([(1, size, 1, 1), (size, 1, 1), (1,)]))
    op = draw(st.sampled_from(["Add", "Mul"]))
    sketch.add(op, [source, sketch.weight(*shape)], [size])


BLOCKS = (conv, transposed, norm, relu, identity, pool, split, concat, bias)


@st.composite
def networks(draw: Any) -> onnx.ModelProto:
    sketch = Sketch(np.random.default_rng(draw(st.integers(0, 2**16))))
    for _ in range(draw(st.integers(1, 8))):
        source = draw(st.sampled_from(sorted(sketch.channels)[-4:]))
        draw(st.sampled_from(BLOCKS))(draw, sketch, source)
    values = sorted(set(sketch.channels) - {"x"}) or sketch.add("Relu", ["x"], [4])
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
    keepdims = draw(st.integers(0, 1))
    outputs += sketch.add("ReduceMean", [values[-1]], [1], axes=[-1, 2], keepdims=keepdims)
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    source = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 4, SIZE, SIZE])
    graph = helper.make_graph(sketch.nodes, "net", [source], infos, sketch.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(model: onnx.ModelProto, feed: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": feed}), strict=True))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.sampled_from([EVERYTHING, Prepare()]))
def test_prepare_preserves_every_output(proto: onnx.ModelProto, options: Prepare) -> None:
    feed = np.random.default_rng(0).standard_normal((2, 4, SIZE, SIZE)).astype(np.float32)
    model = ir.from_proto(proto)
    prepare(model, options)
    after = ir.to_proto(model)
    expected, found = run(proto, feed), run(after, feed)
    assert list(found) == list(expected)
    for name, array in expected.items():
        scale = float(np.abs(array).max(initial=0))  # a part of a split may be empty
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4 * scale, err_msg=name)
    onnx.checker.check_model(after)
    # Once prepared, there is nothing left to do, unless a lone normalization just became a convolution:
    # that can take up a constant factor behind it.
    if not options.batch_norm_to_conv:
        assert not any(report.rewrites for report in prepare(model, options))
