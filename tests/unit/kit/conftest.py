"""Small models in every format, and a stand-in for AMD's onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import roundel
from roundel.example import load_example

MICROSOFT = "com.microsoft"
QUARK = "com.amd.quark"


def initializer(name: str, array: object, dtype: str = "float32") -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array, dtype=dtype), name)


def build(
    nodes: list, initializers: list, *, shape: list | None = None, domains: tuple = ()
) -> onnx.ModelProto:
    dims = shape or [1, 2, 4, 4]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializers,
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def qdq_model(
    *,
    scale: float = 0.125,
    act: str = "int8",
    weight: str = "int8",
    zero: int = 0,
    per_channel: bool = False,
    bias: str | None = None,
    domain: str = "",
    shape: list | None = None,
) -> onnx.ModelProto:
    """Two convolutions with Q/DQ around activations and weights."""
    nodes: list = []
    inits = [initializer("s", scale), initializer("z", zero, act)]
    weight_scale = [0.25, 0.25] if per_channel else 0.25
    inits += [initializer("ws", weight_scale), initializer("wz", np.zeros_like(weight_scale), weight)]
    extra = {"axis": 0} if per_channel else {}
    current = "x"
    for i in range(2):
        inits.append(initializer(f"w{i}", np.ones((2, 2, 1, 1)), weight))
        nodes += [
            helper.make_node("QuantizeLinear", [current, "s", "z"], [f"q{i}"], f"Q{i}", domain=domain),
            helper.make_node("DequantizeLinear", [f"q{i}", "s", "z"], [f"d{i}"], f"DQ{i}", domain=domain),
            helper.make_node(
                "DequantizeLinear", [f"w{i}", "ws", "wz"], [f"dw{i}"], f"DW{i}", domain=domain, **extra
            ),
        ]
        inputs = [f"d{i}", f"dw{i}"]
        if bias:
            inits.append(initializer(f"b{i}", [1, 2], bias))
            inits += [] if i else [initializer("bs", 0.03125), initializer("bz", 0, bias)]
            nodes.append(helper.make_node("DequantizeLinear", [f"b{i}", "bs", "bz"], [f"db{i}"], f"DB{i}"))
            inputs.append(f"db{i}")
        current = "y" if i else "c0"
        nodes.append(helper.make_node("Conv", inputs, [current], f"C{i}"))
    return build(nodes, inits, shape=shape, domains=(domain,) if domain else ())


def saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


@pytest.fixture(scope="session")
def a8w8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded example, quantized."""
    example = load_example()
    path = tmp_path_factory.mktemp("a8w8") / "digits.a8w8.onnx"
    roundel.quantize(example.model_path, path, recipe="a8w8", data=example.calibration[:8])
    return path
