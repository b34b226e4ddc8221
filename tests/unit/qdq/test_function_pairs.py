"""The bodies of ExtendedQuantizeLinear and ExtendedDequantizeLinear, run by a stock ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from helpers import rng, saturated_float16
from roundel.errors import ModelError
from roundel.numerics.floats import round_bfloat16
from roundel.qdq.functions import attach, strip
from roundel.qdq.nodes import QUARK

LEVELS = [
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
]
PAIR = ("ExtendedQuantizeLinear", "ExtendedDequantizeLinear")


def pair_model(
    types: tuple[int, ...], scale: float | list[float] = 1.0, *, opset: int = 17, axis: int = 1
) -> onnx.ModelProto:
    """A chain of pairs, one for each type, on a tensor [n, 4, m]."""
    nodes, constants, last = [], [], "x"
    shape = list(np.shape(scale))
    constants.append(helper.make_tensor("s", TensorProto.FLOAT, shape, np.ravel(scale)))
    for i, kind in enumerate(types):
        constants.append(helper.make_tensor(f"z{i}", kind, shape, [0] * max(1, np.size(scale))))
        out = "y" if i == len(types) - 1 else f"y{i}"
        ends = ([last, "s", f"z{i}"], [f"c{i}"]), ([f"c{i}", "s", f"z{i}"], [out])
        for op, (inputs, outputs) in zip(PAIR, ends, strict=True):
            nodes.append(helper.make_node(op, inputs, outputs, f"{op}{i}", domain=QUARK, axis=axis))
        last = out
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4, "m"]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(QUARK, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def attached(model: onnx.ModelProto) -> onnx.ModelProto:
    result = ir.to_proto(attach(ir.from_proto(model)))
    onnx.checker.check_model(result, full_check=True)
    return result


def run(model: onnx.ModelProto, x: NDArray[np.float32], level: Any) -> NDArray[np.float32]:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    return np.asarray(ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0])


def every_kind() -> NDArray[np.float32]:
    bits = rng().integers(0, 2**32, 3 * 4 * 1000, np.uint64).astype(np.uint32)
    special = [0x80000000, 0, 0x7FC00000, 0x7F800000, 0xFF800000, 0x00000001, 0x80000001, 0x7F7FFFFF]
    bits[: len(special)] = special
    return bits.view(np.float32).reshape(3, 4, 1000)


def assert_same_bits(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    invalid = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), invalid)
    np.testing.assert_array_equal(got[~invalid].view(np.uint32), expected[~invalid].view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("opset", [17, 21])
def test_bfloat16(level: Any, opset: int) -> None:
    x = every_kind()
    with np.errstate(invalid="ignore"):
        expected = round_bfloat16(x + np.float32(0))  # + 0: the pair makes +0 of -0
    assert_same_bits(run(attached(pair_model((TensorProto.BFLOAT16,), opset=opset)), x, level), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("axis", [1, -2])
def test_bfloat16_scaled_per_channel(level: Any, axis: int) -> None:
    scale = [1.0, 0.5, 3.0, 0.3]
    model = attached(pair_model((TensorProto.BFLOAT16,), scale, axis=axis))
    x, s = every_kind(), np.asarray(scale, np.float32)[:, None]
    with np.errstate(all="ignore"):
        expected = round_bfloat16(x / s + np.float32(0)) * s
    assert_same_bits(run(model, x, level), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_float16_saturates(level: Any) -> None:
    x = every_kind()
    assert_same_bits(run(attached(pair_model((TensorProto.FLOAT16,))), x, level), saturated_float16(x))


def test_two_types_in_one_model() -> None:
    model = attached(pair_model((TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.BFLOAT16)))
    assert len(model.functions) == 4
    assert sorted({node.overload for node in model.graph.node}) == ["", "float16"]
    x = every_kind()
    with np.errstate(invalid="ignore"):
        rounded = saturated_float16(round_bfloat16(x + np.float32(0)))
    expected = round_bfloat16(rounded + np.float32(0))
    assert_same_bits(run(model, x, LEVELS[-1]), expected)


def test_strip_gives_the_bare_form_back() -> None:
    bare = pair_model((TensorProto.BFLOAT16, TensorProto.FLOAT16))
    once = ir.from_proto(attached(bare))
    result = ir.to_proto(strip(once))
    assert not result.functions
    assert list(result.graph.node) == list(bare.graph.node)
    assert len(once.functions) == 4, "strip leaves its argument alone"
    assert ir.to_proto(attach(once)).functions == ir.to_proto(once).functions


def test_integer_types_are_refused() -> None:
    with pytest.raises(ModelError, match="no function body") as caught:
        attach(ir.from_proto(pair_model((TensorProto.INT8,))))
    assert "INT8" in str(caught.value)


def test_unknown_operators_are_refused() -> None:
    model = pair_model((TensorProto.BFLOAT16,))
    model.graph.node[0].op_type = "ExtendedLSTM"
    with pytest.raises(ModelError, match="no function body"):
        attach(ir.from_proto(model))
