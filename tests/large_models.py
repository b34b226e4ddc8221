"""Models that are too large to be committed, written layer by layer so that making one needs no memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper


def matmul_stack(path: Path, layers: int, width: int) -> Path:
    """`layers` times MatMul and Relu; the weights (4 * layers * width ** 2 bytes) lie in `<name>.data`."""
    base = np.random.default_rng(0).standard_normal((width, width), dtype=np.float32)
    base *= np.float32(np.sqrt(2 / width))
    nodes, weights, current = [], [], "x"
    data = path.with_name(f"{path.name}.data")
    with data.open("wb") as file:
        for index in range(layers):
            name, made = f"w{index}", "y" if index == layers - 1 else f"r{index}"
            weights.append(_reference(name, data.name, file.tell(), base))
            np.roll(base, 7 * index, 0).tofile(file)
            nodes.append(helper.make_node("MatMul", [current, name], [f"m{index}"], name=f"matmul{index}"))
            nodes.append(helper.make_node("Relu", [f"m{index}"], [made], name=f"relu{index}"))
            current = made
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "stack", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _reference(name: str, location: str, offset: int, like: np.ndarray) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=like.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", like.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
