"""bfloat16 and float16 are ONNX Runtime's Cast, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from helpers import rng
from roundel.numerics import floats

SPECIAL = [
    *(0x7FFFFFFF, 0x7FC00000, 0xFFC00001, 0x7F800001, 0xFF800001),  # NaN
    *(0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF),  # infinity and what rounds to it
    *(0x80000000, 0x00000000, 0x00000001, 0x80000001, 0x00008000, 0x00018000),  # zeros and subnormals
    *(0x3F808000, 0x3F818000, 0x3F808001),  # ties
]


def every_kind() -> NDArray[np.float32]:
    """Random bit patterns: NaN, infinities and subnormals among them."""
    bits = rng().integers(0, 2**32, 100_000, np.uint64).astype(np.uint32)
    return np.concatenate([bits, np.asarray(SPECIAL, np.uint32)]).view(np.float32)


def cast(x: NDArray[np.float32], to: int) -> NDArray[Any]:
    there, back = helper.make_node("Cast", ["x"], ["c"], to=to), helper.make_node("Cast", ["c"], ["y"], to=1)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph([there, back], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


def test_bfloat16_is_cast() -> None:
    x = every_kind()
    expected = cast(x, TensorProto.BFLOAT16)
    np.testing.assert_array_equal(floats.round_bfloat16(x).view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(
        np.left_shift(floats.to_bits(x), 16, dtype=np.uint32), expected.view(np.uint32)
    )


def test_bfloat16_limits() -> None:
    limits = np.asarray([floats.LARGEST_BFLOAT16, floats.SMALLEST_BFLOAT16], np.float32)
    np.testing.assert_array_equal(floats.round_bfloat16(limits), limits)
    assert np.isinf(floats.round_bfloat16(np.float32(floats.LARGEST_BFLOAT16 * 1.002)))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_bfloat16_keeps_shapes(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    assert floats.round_bfloat16(x).shape == floats.to_bits(x).shape == shape
    assert floats.round_bfloat16(np.ones((4, 6), np.float32)[:, ::2].T).shape == (3, 4)


def test_the_input_is_left_alone() -> None:
    x = every_kind()
    before = x.copy()
    floats.round_bfloat16(x)
    np.testing.assert_array_equal(x.view(np.uint32), before.view(np.uint32))


def test_float16_is_cast() -> None:
    x = every_kind()
    expected, got = cast(x, TensorProto.FLOAT16), floats.to_float16(x).astype(np.float32)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))
