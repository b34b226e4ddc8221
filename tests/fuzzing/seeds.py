"""Small valid models of many kinds, which the fuzzer bends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from helpers import build, node, normal
from transformer_models import transformer


def _convolutions() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "g", "h", "m", "v"], ["n"], name="norm"),
        node("Relu", ["n"], ["r"], name="relu"),
        node("Conv", ["r", "d"], ["e"], name="depthwise", group=4, pads=[1, 1, 1, 1]),
        node("Clip", ["e", "low", "high"], ["k"], name="clip"),
        node("Add", ["k", "r"], ["a"], name="add"),
        node("MaxPool", ["a"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["p"], ["o"], name="mean"),
        node("Flatten", ["o"], ["f"], name="flat"),
        node("Gemm", ["f", "fc", "fb"], ["y"], name="fc"),
    ]
    constants = {
        "w": normal(4, 3, 3, 3),
        "b": normal(4, seed=1),
        "g": np.ones(4, np.float32),
        "h": np.zeros(4, np.float32),
        "m": normal(4, seed=2),
        "v": np.ones(4, np.float32),
        "d": normal(4, 1, 3, 3, seed=3),
        "low": np.float32(0),
        "high": np.float32(6),
        "fc": normal(4, 5, seed=4),
        "fb": normal(5, seed=5),
    }
    return build(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]}, constants)


def _shapes() -> onnx.ModelProto:
    nodes = [
        node("Split", ["x", "halves"], ["a", "b"], name="split", axis=1),
        node("Sigmoid", ["a"], ["s"], name="sigmoid"),
        node("Mul", ["s", "b"], ["m"], name="mul"),
        node("Pad", ["m", "pads"], ["p"], name="pad"),
        node("Conv", ["p", "w"], ["c"], name="conv"),
        node("Concat", ["c", "m"], ["k"], name="concat", axis=1),
        node("Transpose", ["k"], ["t"], name="turn", perm=[0, 2, 3, 1]),
        node("Reshape", ["t", "shape"], ["r"], name="reshape"),
        node("Slice", ["r", "starts", "ends", "axes"], ["l"], name="slice"),
        node("ReduceMean", ["l"], ["y"], name="mean", axes=[1], keepdims=0),
        node("Resize", ["k", "", "scales"], ["z"], name="resize", mode="nearest"),
    ]
    constants = {
        "halves": np.array([2, 2]),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "w": normal(3, 2, 3, 3),
        "shape": np.array([1, -1, 5]),
        "starts": np.array([0]),
        "ends": np.array([3]),
        "axes": np.array([2]),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    return build(nodes, {"x": [1, 4, 6, 6]}, ["y", "z"], constants)


def _transformer() -> onnx.ModelProto:
    return transformer(blocks=1)


def _recurrent() -> onnx.ModelProto:
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["o", "h", "c"], name="lstm", hidden_size=4),
        node("GRU", ["x", "gw", "gr"], ["go"], name="gru", hidden_size=4),
        node("Squeeze", ["o", "one"], ["s"], name="squeeze"),
        node("Squeeze", ["go", "one"], ["gs"], name="squeeze2"),
        node("Add", ["s", "gs"], ["a"], name="add"),
        node("MatMul", ["a", "k"], ["y"], name="head"),
    ]
    constants = {
        "w": normal(1, 16, 3),
        "r": normal(1, 16, 4, seed=1),
        "b": normal(1, 32, seed=2),
        "gw": normal(1, 12, 3, seed=3),
        "gr": normal(1, 12, 4, seed=4),
        "one": np.array([1]),
        "k": normal(4, 2, seed=5),
    }
    return build(nodes, {"x": [5, 1, 3]}, ["y"], constants)


def branch(
    body: list[onnx.NodeProto], output: str, constants: Mapping[str, object] | None = None
) -> onnx.GraphProto:
    """A subgraph without inputs."""
    value = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(np.asarray(a), k) for k, a in (constants or {}).items()]
    return helper.make_graph(body, f"make_{output}", [], [value], tensors)


def _branches() -> onnx.ModelProto:
    then = branch([node("MatMul", ["r", "w1"], ["t"], name="then")], "t", {"w1": normal(4, 4)})
    other = branch([node("Neg", ["r"], ["e"], name="else")], "e")
    nodes = [
        node("Relu", ["x"], ["r"], name="relu"),
        node("If", ["flag"], ["i"], name="if", then_branch=then, else_branch=other),
        node("MatMul", ["i", "w"], ["y"], name="head"),
    ]
    constants = {"flag": np.array(True), "w": normal(4, 2, seed=1)}
    return build(nodes, {"x": [2, 4]}, {"y": [2, 2]}, constants)


def _halves() -> onnx.ModelProto:
    nodes = [
        node("Cast", ["x"], ["h"], name="cast", to=TensorProto.FLOAT16),
        node("MatMul", ["h", "w"], ["m"], name="matmul"),
        node("Softmax", ["m"], ["s"], name="softmax"),
        node("Cast", ["s"], ["y"], name="back", to=TensorProto.FLOAT),
    ]
    return build(nodes, {"x": [2, 4]}, ["y"], {"w": normal(4, 3).astype(np.float16)})


def _function() -> onnx.ModelProto:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    body = [node("MatMul", ["a", "b"], ["m"], name="m"), node("Tanh", ["m"], ["o"], name="t")]
    function = helper.make_function("mine", "Layer", ["a", "b"], ["o"], body, imports)
    nodes = [node("Layer", ["x", "w"], ["h"], name="one", domain="mine")]
    nodes += [node("Layer", ["h", "w"], ["y"], name="two", domain="mine")]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(normal(4, 4), "w")],
    )
    return helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)


def _old() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Clip", ["c"], ["k"], name="clip", min=0.0, max=6.0),
        node("Pad", ["k"], ["p"], name="pad", pads=[0, 0, 1, 1, 0, 0, 1, 1]),
        node("Upsample", ["p", "s"], ["u"], name="up"),
        node("Squeeze", ["u"], ["y"], name="squeeze", axes=[0]),
    ]
    constants = {"w": normal(2, 3, 1, 1), "s": np.array([1, 1, 2, 2], np.float32)}
    return build(nodes, {"x": [1, 3, 4, 4]}, ["y"], constants, opset=9)


BUILDERS: tuple[Callable[[], onnx.ModelProto], ...] = (
    _convolutions,
    _shapes,
    _transformer,
    _recurrent,
    _branches,
    _halves,
    _function,
    _old,
)


@cache
def models() -> tuple[onnx.ModelProto, ...]:
    """The models, built once."""
    return tuple(make() for make in BUILDERS)


@cache
def backend_models() -> tuple[onnx.ModelProto, ...]:
    """ONNX's own one-operator models: one of each operator, in every form they come in."""
    import warnings

    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(case.model for case in load_model_tests(kind="node") if case.model is not None)
