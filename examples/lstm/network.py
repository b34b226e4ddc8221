"""A network for signals: a convolution, an LSTM, a head; the head is fitted, the rest is seeded and stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

LENGTH, CHANNELS, HIDDEN, CLASSES = 128, 12, 48, 4


def build(head: Any) -> onnx.ModelProto:
    """Signals of one channel in, scores of the classes out."""
    generator = np.random.default_rng(0)

    def drawn(*shape: int, spread: float) -> Any:
        return generator.normal(0, spread, shape).astype(np.float32)

    constants = {
        "conv.w": drawn(CHANNELS, 1, 9, spread=0.4),
        "conv.b": drawn(CHANNELS, spread=0.1),
        "lstm.w": drawn(1, 4 * HIDDEN, CHANNELS, spread=0.3),
        "lstm.r": drawn(1, 4 * HIDDEN, HIDDEN, spread=0.15),
        "lstm.b": drawn(1, 8 * HIDDEN, spread=0.1),
        "flat": np.int64([-1, HIDDEN]),
        "head.w": head[:-1],
        "head.b": head[-1],
    }
    nodes = [
        helper.make_node(
            "Conv",
            ["signal", "conv.w", "conv.b"],
            ["c"],
            name="conv",
            pads=[4, 4],
            strides=[2],
            kernel_shape=[9],
        ),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Transpose", ["r"], ["steps"], name="steps", perm=[2, 0, 1]),
        helper.make_node(
            "LSTM", ["steps", "lstm.w", "lstm.r", "lstm.b"], ["", "last"], name="lstm", hidden_size=HIDDEN
        ),
        helper.make_node("Reshape", ["last", "flat"], ["features"], name="flat"),
        helper.make_node("Gemm", ["features", "head.w", "head.b"], ["scores"], name="head"),
    ]
    inputs = [helper.make_tensor_value_info("signal", TensorProto.FLOAT, ["N", 1, LENGTH])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", CLASSES])]
    weights = [numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items()]
    graph = helper.make_graph(nodes, "signals", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def signals(count: int, seed: int) -> tuple[Any, Any]:
    """Waves of four kinds, in noise, and which kind each one is."""
    generator = np.random.default_rng(seed)
    at = np.linspace(0, 1, LENGTH)
    labels = generator.integers(0, CLASSES, count)
    found = np.empty((count, 1, LENGTH), np.float32)
    for row, label in enumerate(labels):
        speed, phase = generator.uniform(3, 6), generator.uniform(0, 2 * np.pi)
        angle = 2 * np.pi * speed * at + phase
        wave = (
            np.sin(angle),
            np.sign(np.sin(angle)),
            np.sin(angle * (1 + at)),
            np.sin(angle) * np.exp(-3 * at),
        )
        found[row, 0] = wave[label] + generator.normal(0, 0.1, LENGTH)
    return found, labels


def fitted() -> onnx.ModelProto:
    """The network with a head that least squares finds on the LSTM's last state."""
    x, labels = signals(1200, seed=1)
    bare = build(np.zeros((HIDDEN + 1, CLASSES), np.float32))
    bare.graph.output.append(helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", HIDDEN]))
    session = ort.InferenceSession(bare.SerializeToString(), providers=["CPUExecutionProvider"])
    seen = session.run(["features"], {"signal": x})[0]
    wide = np.concatenate([seen, np.ones((len(seen), 1))], 1)
    goal = np.eye(CLASSES)[labels]
    head = np.linalg.solve(wide.T @ wide + 0.1 * np.eye(HIDDEN + 1), wide.T @ goal)
    return build(head.astype(np.float32))
