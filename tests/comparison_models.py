"""Float models and quantized forms of them, made here and by ONNX Runtime's own quantizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from helpers import Feed, build, node, normal

SHAPE = (1, 3, 12, 12)


def images(count: int = 6) -> list[Feed]:
    """Gaussian inputs."""
    return [{"x": normal(*SHAPE, seed=40 + i)} for i in range(count)]


def residual_net(*, clip: bool = False) -> onnx.ModelProto:
    """Conv, batch norm and activation; a residual Conv; pool and Gemm."""
    activation = node("Clip", ["n1", "zero", "six"], ["a1"], "act1") if clip else _relu("n1", "a1", "act1")
    constants: dict[str, Any] = {
        "w1": normal(8, 3, 3, 3, seed=1, scale=0.4),
        "gamma": np.abs(normal(8, seed=2)) + 0.5,
        "beta": normal(8, seed=3, scale=0.3),
        "mu": normal(8, seed=4, scale=0.2),
        "var": np.abs(normal(8, seed=5)) + 0.5,
        "w2": normal(8, 8, 3, 3, seed=6, scale=0.2),
        "b2": normal(8, seed=7, scale=0.1),
        "w3": normal(8, 5, seed=8),
        "b3": normal(5, seed=9),
    }
    if clip:
        constants |= {"zero": np.float32(0), "six": np.float32(6)}
    return build(
        [
            node("Conv", ["x", "w1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["c1", "gamma", "beta", "mu", "var"], ["n1"], "bn1"),
            activation,
            node("Conv", ["a1", "w2", "b2"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
            _relu("c2", "a2", "act2"),
            node("Add", ["a1", "a2"], ["s"], "add"),
            node("GlobalAveragePool", ["s"], ["p"], "pool"),
            node("Flatten", ["p"], ["f"], "flatten"),
            node("Gemm", ["f", "w3", "b3"], ["y"], "head"),
        ],
        {"x": SHAPE},
        {"y": [1, 5]},
        constants,
    )


def chain(*, scale_rows: np.ndarray | None = None) -> onnx.ModelProto:
    """Conv, Relu, Conv, Relu, Conv; with factors on the rows of the first and the columns of the second."""
    w1, b1 = normal(6, 3, 3, 3, seed=1, scale=0.3), normal(6, seed=2, scale=0.2)
    w2, b2 = normal(6, 6, 3, 3, seed=3, scale=0.3), normal(6, seed=4, scale=0.2)
    if scale_rows is not None:
        factors = np.asarray(scale_rows, np.float32)
        w1, b1 = w1 * factors[:, None, None, None], b1 * factors
        w2 = w2 / factors[None, :, None, None]
    return build(
        [
            node("Conv", ["x", "w1", "b1"], ["c1"], "conv1"),
            _relu("c1", "a1", "act1"),
            node("Conv", ["a1", "w2", "b2"], ["c2"], "conv2"),
            _relu("c2", "a2", "act2"),
            node("Conv", ["a2", "w3"], ["y"], "conv3"),
        ],
        {"x": SHAPE},
        {"y": [1, 4, 6, 6]},
        {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "w3": normal(4, 6, 3, 3, seed=5, scale=0.3)},
    )


def ort_quantized(
    model: onnx.ModelProto, folder: Path, data: Sequence[Feed], **options: Any
) -> onnx.ModelProto:
    """What ONNX Runtime's static quantizer makes of it."""
    source, target = folder / "float.onnx", folder / "ort.onnx"
    onnx.save(model, source)
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, **options}
    quantize_static(source, target, _Reader(data), quant_format=QuantFormat.QDQ, **kinds)
    return onnx.load(target)


def renamed(model: onnx.ModelProto, table: dict[str, str]) -> onnx.ModelProto:
    """The model with other tensor names."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for n in copy.graph.node:
        for names in (n.input, n.output):
            for index, name in enumerate(names):
                names[index] = table.get(name, name)
    del copy.graph.value_info[:]
    return copy


def with_weight(model: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.ModelProto:
    """The model with another content for one initializer."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(array, name))
            return copy
    raise KeyError(name)


def _relu(source: str, target: str, name: str) -> onnx.NodeProto:
    return node("Relu", [source], [target], name)


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, data: Sequence[Feed]) -> None:
        self._data = iter(data)

    def get_next(self) -> Feed | None:
        return next(self._data, None)
