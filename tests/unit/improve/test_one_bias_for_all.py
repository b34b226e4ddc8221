"""A Gemm may add one number to all its outputs: every step that counts one for each must cope."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import roundel

PER_CHANNEL: dict[str, Any] = {"weights": {"per_channel": True}}
PLAIN: dict[str, Any] = {"improve": {"equalize": {"enabled": False}}}
TUNED: dict[str, Any] = {"improve": {"finetune": {"algorithm": "adaquant", "iterations": 20}}}


def two_layers(shape: tuple[int, ...]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    arrays = {"w": (8, 6), "b": shape, "w2": (6, 4)}
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="first"),
        helper.make_node("Relu", ["y"], ["z"], name="relu"),
        helper.make_node("Gemm", ["z", "w2"], ["o"], name="second"),
    ]
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
        for name, dims in (("x", [1, 8]), ("o", [1, 4]))
    ]
    constants = [
        numpy_helper.from_array(rng.normal(size=dims).astype(np.float32), name)
        for name, dims in arrays.items()
    ]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 6)])
@pytest.mark.parametrize(
    ("preset", "changes"),
    [("xint8", PLAIN), ("xint8", {}), ("a8w8", {}), ("a8w8", PER_CHANNEL), ("a8w8", TUNED)],
)
def test_a_bias_of_any_shape_is_quantized(
    preset: str, changes: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model = two_layers(shape)
    rng = np.random.default_rng(1)
    samples = [{"x": rng.normal(size=(1, 8)).astype(np.float32)} for _ in range(40)]
    result = roundel.quantize(model, recipe=preset, data=samples, changes=changes)
    sessions = [ort.InferenceSession(m.SerializeToString()) for m in (model, result.model)]
    wanted, got = (np.concatenate([s.run(None, x)[0] for x in samples]) for s in sessions)
    assert np.square(got - wanted).mean() < 0.003 * np.square(wanted).mean()
