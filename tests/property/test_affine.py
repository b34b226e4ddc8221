"""Quantized numbers are those of ONNX Runtime, bit for bit; scales and zero points keep their promises."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx import TensorProto, helper

from roundel.numerics.affine import (
    bias_params,
    code_limits,
    dequantize,
    fake_quantize,
    int16_ratio,
    params_from_range,
    quantize,
    weight_params,
)
from roundel.types import PerChannel, QParams, QType, ScaleKind, Scheme

TENSOR = {
    QType.INT8: TensorProto.INT8,
    QType.UINT8: TensorProto.UINT8,
    QType.INT16: TensorProto.INT16,
    QType.UINT16: TensorProto.UINT16,
    QType.INT32: TensorProto.INT32,
}
NARROW = [QType.INT8, QType.UINT8]
STORED = [*NARROW, QType.INT16, QType.UINT16]
F32 = np.finfo(np.float32)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
scales = st.floats(2.0**-60, 2.0**60, width=32)
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@cache
def _session(op: str, qtype: QType, domain: str, axis: int | None) -> ort.InferenceSession:
    """One node whose scale and zero point are fed, so that a session serves all examples."""
    real, codes = ("x", TensorProto.FLOAT), ("x", TENSOR[qtype])
    source, result = (real, codes[1]) if op == "QuantizeLinear" else (codes, TensorProto.FLOAT)
    rank = 0 if axis is None else 1
    attributes = {} if axis is None else {"axis": axis}
    inputs = [
        helper.make_tensor_value_info(source[0], source[1], ["a", "b", "c"]),
        helper.make_tensor_value_info("s", TensorProto.FLOAT, ["n"] * rank),
        helper.make_tensor_value_info("z", TENSOR[qtype], ["n"] * rank),
    ]
    node = helper.make_node(op, ["x", "s", "z"], ["y"], domain=domain, **attributes)
    output = helper.make_tensor_value_info("y", result, ["a", "b", "c"])
    graph = helper.make_graph([node], "g", inputs, [output])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def _ort(op: str, x: NDArray[Any], params: QParams, domain: str) -> NDArray[Any]:
    session = _session(op, params.qtype, domain, params.axis)
    return session.run(None, {"x": x, "s": params.scale, "z": params.zero_point})[0]


def _domains(qtype: QType) -> list[str]:
    return ["", "com.microsoft"] if qtype in NARROW else ["com.microsoft"]


@st.composite
def _params(draw: st.DrawFn, qtype: QType, shape: tuple[int, ...], axis: int | None) -> QParams:
    codes = st.integers(qtype.qmin, qtype.qmax)
    if axis is None:
        scale, zero = np.float32(draw(scales)), draw(codes)
        return QParams(np.asarray(scale), np.asarray(zero, qtype.dtype), qtype)
    n = shape[axis]
    scale = np.asarray([draw(scales) for _ in range(n)], np.float32)
    zero = np.asarray([draw(codes) for _ in range(n)], qtype.dtype)
    return QParams(scale, zero, qtype, axis)


@st.composite
def _values(draw: st.DrawFn, shape: tuple[int, ...], params: QParams) -> NDArray[np.float32]:
    """Any floats, mixed with ties, values at the edge of saturation, subnormals and both zeros."""
    scale = float(params.scale.reshape(-1)[0])
    zero = int(params.zero_point.reshape(-1)[0])
    ties = st.integers(-70000, 70000).map(lambda k: (k + 0.5) * scale)
    edges = st.sampled_from([params.qtype.qmin, params.qtype.qmax]).flatmap(
        lambda q: st.sampled_from([-0.5, 0.0, 0.5, 1.0]).map(lambda d: (q - zero + d) * scale)
    )
    odd = st.sampled_from([0.0, -0.0, float(F32.tiny), -float(F32.smallest_subnormal), 3e38, -3e38])
    one = st.one_of(finite, ties, edges, odd)
    flat = [np.float32(draw(one)) for _ in range(int(np.prod(shape)))]
    return np.asarray(flat, np.float32).reshape(shape)


SHAPE = (2, 3, 2)
everywhere = pytest.mark.parametrize("axis", [None, 0, 1, 2])


@everywhere
@pytest.mark.parametrize("qtype", STORED)
@given(data=st.data())
@relaxed
def test_quantize_is_onnx_runtimes(qtype: QType, axis: int | None, data: st.DataObject) -> None:
    params = data.draw(_params(qtype, SHAPE, axis))
    x = data.draw(_values(SHAPE, params))
    with np.errstate(over="ignore"):
        mine = quantize(x, params)
    for domain in _domains(qtype):
        np.testing.assert_array_equal(mine, _ort("QuantizeLinear", x, params, domain))
    assert mine.dtype == qtype.dtype


@everywhere
@pytest.mark.parametrize("qtype", [*STORED, QType.INT32])
@given(data=st.data())
@relaxed
def test_dequantize_is_onnx_runtimes(qtype: QType, axis: int | None, data: st.DataObject) -> None:
    params = data.draw(_params(qtype, SHAPE, axis))
    if qtype is QType.INT32:  # has no zero point in ONNX
        params = QParams(params.scale, np.zeros_like(params.zero_point), qtype, axis)
    codes = data.draw(hnp.arrays(qtype.dtype, SHAPE))
    mine = dequantize(codes, params)
    for domain in [""] if qtype is QType.INT32 else _domains(qtype):
        theirs = _ort("DequantizeLinear", codes, params, domain)
        assert mine.tobytes() == theirs.tobytes()


schemes = st.builds(
    Scheme,
    qtype=st.sampled_from(STORED),
    symmetric=st.booleans(),
    reduce_range=st.booleans(),
)
magnitudes = st.floats(-1e30, 1e30, allow_nan=False)


@given(a=magnitudes, b=magnitudes, scheme=schemes)
@settings(deadline=None)
def test_float_scales_cover_the_range_and_hold_zero(a: float, b: float, scheme: Scheme) -> None:
    low, high = min(a, b), max(a, b)
    params = params_from_range(low, high, scheme)
    scale, zero = float(params.scale), int(params.zero_point)
    assert np.isfinite(scale)
    assert scale > 0
    assert scheme.qtype.qmin <= zero <= scheme.qtype.qmax
    assert dequantize(quantize(np.zeros(1, np.float32), params), params)[0] == 0.0
    if max(-low, high, 0) / 2**17 < F32.tiny:  # too small for any scale: degenerate, see below
        return
    # Half a step is what rounding the zero point may cost; an unsigned middle of 128 costs one more.
    slack = (0.5 if not scheme.symmetric else 1.0) * scale * (1 + 1e-5) + 1e-6 * max(abs(low), abs(high))
    assert (scheme.qtype.qmin - zero) * scale <= low + slack
    assert (scheme.qtype.qmax - zero) * scale >= high - slack


@given(high=st.floats(1e-30, 1e30), scheme=schemes)
def test_symmetric_zero_points_are_the_middle(high: float, scheme: Scheme) -> None:
    params = params_from_range(-high / 3, high, Scheme(scheme.qtype, symmetric=True))
    middle = 0 if scheme.qtype.signed else 2 ** (scheme.qtype.bits - 1)
    assert int(params.zero_point) == middle


@pytest.mark.parametrize("qtype", STORED)
@pytest.mark.parametrize("low", [0.0, -0.0, -1e-44])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_range_without_width_gets_scale_one(qtype: QType, low: float, symmetric: bool) -> None:
    params = params_from_range(low, 0.0, Scheme(qtype, symmetric))
    assert params.scale == 1.0
    assert dequantize(quantize(np.zeros(1, np.float32), params), params)[0] == 0.0


@pytest.mark.parametrize("qtype", STORED)
@pytest.mark.parametrize("high", [0.0, 1e-44, 2.5])
def test_no_code_is_below_zero_for_a_range_without_negatives(qtype: QType, high: float) -> None:
    """What replaces a Relu by saturation relies on."""
    params = params_from_range(0.0, high, Scheme(qtype, symmetric=False))
    assert int(params.zero_point) == qtype.qmin
    assert fake_quantize(np.float32([-3.0]), params)[0] == 0.0


@given(low=st.floats(-1e38, 0), high=st.floats(0, 1e38))
def test_huge_ranges_have_finite_scales(low: float, high: float) -> None:
    params = params_from_range(low * 3, high * 3, Scheme(QType.INT8, symmetric=False))
    assert np.isfinite(params.scale)


@given(high=st.floats(2.0**-100, 2.0**100))
def test_power_of_two_scales_are_powers_of_two(high: float) -> None:
    scheme = Scheme(QType.INT8, scale=ScaleKind.POWER_OF_TWO)
    mantissa, _ = np.frexp(params_from_range(-high, high, scheme).scale)
    assert mantissa == 0.5


@given(scale=st.floats(1e-4, 1e4))
def test_int16_ratios_are_within_half_a_step(scale: float) -> None:
    ratio = float(int16_ratio(scale))
    numerators = ratio * 2.0 ** np.arange(17)
    whole = numerators == np.round(numerators)
    assert (whole & (numerators <= 32767)).any()
    assert abs(ratio - scale) <= max(2.0**-17, scale * 2.0**-14)


@pytest.mark.parametrize("narrow", [False, True])
@given(x=hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(-1e6, 1e6, width=32)))
def test_narrow_leaves_out_the_lowest_code(narrow: bool, x: NDArray[np.float32]) -> None:
    params = QParams(np.float32(1), np.int8(0), QType.INT8)
    assert quantize(x, params, narrow=narrow).min() >= (-127 if narrow else -128)
    assert quantize(np.float32([-1e6]), params, narrow=narrow)[0] == (-127 if narrow else -128)


@given(x=st.floats(-100, 100, width=32), scheme=schemes)
def test_arrays_without_dimensions(x: float, scheme: Scheme) -> None:
    array = np.asarray(x, np.float32)
    params = weight_params(array, scheme)
    codes = quantize(array, params)
    assert codes.shape == ()
    assert dequantize(codes, params).shape == ()


@given(
    weight=hnp.arrays(np.float32, (3, 4), elements=st.floats(-100, 100, width=32)),
    axis=st.sampled_from([0, 1, -1]),
    scheme=schemes,
)
def test_each_channel_is_quantized_as_if_alone(
    weight: NDArray[np.float32], axis: int, scheme: Scheme
) -> None:
    per_channel = Scheme(scheme.qtype, scheme.symmetric, granularity=PerChannel(axis))
    whole = fake_quantize(weight, weight_params(weight, per_channel))
    alone = Scheme(scheme.qtype, scheme.symmetric)
    for index in range(weight.shape[axis]):
        row = weight.take(index, axis)
        np.testing.assert_array_equal(whole.take(index, axis), fake_quantize(row, weight_params(row, alone)))


@given(x=scales, w=hnp.arrays(np.float32, 3, elements=st.floats(2.0**-30, 2.0**30, width=32)))
def test_bias_scale_is_the_product(x: float, w: NDArray[np.float32]) -> None:
    weight = QParams(w, np.zeros(3, np.int8), QType.INT8, axis=0)
    bias = bias_params(np.float32(x).reshape(()), weight, factor=0.5)
    np.testing.assert_array_equal(bias.scale, (np.float64(np.float32(x)) * w * 0.5).astype(np.float32))
    assert bias.qtype is QType.INT32
    assert not bias.zero_point.any()


def test_code_limits_of_reduced_ranges() -> None:
    assert code_limits(Scheme(QType.INT8, reduce_range=True)) == (-64, 64)
    assert code_limits(Scheme(QType.UINT8, symmetric=False, reduce_range=True)) == (0, 127)
    assert code_limits(Scheme(QType.INT8)) == (-127, 127)
    assert code_limits(Scheme(QType.INT8, symmetric=False)) == (-128, 127)
