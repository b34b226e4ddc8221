"""The small functions that scripts import beside the quantizer."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from helpers import build, node, normal, run
from roundel.quark import (
    CalibrationMethod,
    PowerOfTwoMethod,
    QuantType,
    calculate_cos,
    calculate_l1_distance,
    calculate_l2_distance,
    calculate_mse,
    calculate_psnr,
    calculate_ssim,
    check_model_is_fp16,
    check_onnx_model,
    convert_nchw_to_nhwc,
    generate_initializer,
    get_batch_size,
    get_matmul_nodes_without_weights,
    get_opset_version,
    get_qmin_qmax_for_qType,
    get_tensor_value,
    infer_shape,
    is_version_below,
    load_model_with_shape_infer,
    make_batch_size_fixed,
    pos2scale,
    quantize_nparray,
    remove_initializer_from_input,
    run_calibration,
    scale2pos,
)
from script_cases import Reader


@pytest.mark.parametrize(
    ("have", "target", "below"),
    [
        ("1.9.0", "1.18.0", True),
        ("2.13.0+cpu", "2.13.0", False),
        ("1.18", "1.18.0", False),
        ("2.0rc1", "2", False),
    ],
)
def test_versions_are_compared_by_their_numbers(have: str, target: str, below: bool) -> None:
    package = ModuleType("package")
    package.__version__ = have  # type: ignore[attr-defined]
    assert is_version_below(package, target) is below


def test_about_models(model: onnx.ModelProto, path, tmp_path) -> None:
    assert get_opset_version(model) == 17
    assert get_batch_size(model) == 1
    assert get_batch_size(build([node("Relu", ["x"], ["y"])], {"x": ["n", 3]}, ["y"], {})) == "n"
    free = make_batch_size_fixed(build([node("Relu", ["x"], ["y"])], {"x": ["n", 3]}, ["y"], {}), 4)
    assert run(free, {"x": np.zeros((4, 3), np.float32)})[0].shape == (4, 3)
    assert not check_model_is_fp16(path)
    known = {value.name for value in infer_shape(model).graph.value_info}
    assert {"r", "a"} <= known == {value.name for value in load_model_with_shape_infer(path).graph.value_info}
    check_onnx_model(model)
    broken = onnx.ModelProto()
    broken.CopyFrom(model)
    broken.graph.node[0].op_type = "Nothing"
    with pytest.raises(ValueError, match="Nothing"):
        check_onnx_model(broken)
    listed = onnx.ModelProto()
    listed.CopyFrom(model)
    listed.graph.input.append(onnx.helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3, 3, 3]))
    assert [value.name for value in remove_initializer_from_input(listed).graph.input] == ["x"]
    last = convert_nchw_to_nhwc(model)
    assert [dim.dim_value for dim in last.graph.input[0].type.tensor_type.shape.dim] == [1, 8, 8, 3]
    pair = [node("MatMul", ["x", "x"], ["p"], name="two"), node("MatMul", ["p", "w"], ["y"], name="one")]
    both = build(pair, {"x": [3, 3]}, ["y"], {"w": normal(3, 3)})
    assert get_matmul_nodes_without_weights(both) == ["two"]
    np.testing.assert_array_equal(get_tensor_value(generate_initializer([1, 2], np.int64, "k")), [1, 2])


def test_about_numbers() -> None:
    assert (scale2pos(0.25), pos2scale(3)) == (2, 0.125)
    ends = [
        tuple(map(int, get_qmin_qmax_for_qType(TensorProto.INT8, *how)))
        for how in ((), (True,), (False, True))
    ]
    assert ends == [(-128, 127), (-64, 64), (-127, 127)]
    assert tuple(map(int, get_qmin_qmax_for_qType(TensorProto.UINT8, True))) == (0, 127)
    assert float(get_qmin_qmax_for_qType(TensorProto.FLOAT16)[1]) == 65504
    with pytest.raises(ValueError, match="no codes"):
        get_qmin_qmax_for_qType(TensorProto.DOUBLE)
    codes = quantize_nparray(TensorProto.INT8, np.float32([-9, 0.25, 0.75, 9]), np.float32(0.05), 0)
    assert codes.tolist() == [-127, 5, 15, 127]
    assert codes.dtype == np.int8
    a, b = np.float32([1, 2, 2]), np.float32([1, 2, 4])
    assert float(calculate_mse(a, b)) == pytest.approx(4 / 3)
    assert calculate_l1_distance(a, b) == calculate_l2_distance(a, b) == 2
    assert calculate_cos(a, a) == pytest.approx(1)
    assert calculate_psnr(a, b) > 0
    assert np.isnan(calculate_ssim(a, b))


@pytest.mark.parametrize(
    "method", [CalibrationMethod.MinMax, CalibrationMethod.Percentile, PowerOfTwoMethod.MinMSE]
)
def test_ranges_over_data(model: onnx.ModelProto, method) -> None:
    """As a calibrator has them, on the model as it is: from the data alone for minimum and maximum."""
    options = {"ActivationSymmetric": True, "CalibDataSize": 4}
    found = run_calibration(model, Reader(), ["Conv"], QuantType.QInt8, method, extra_options=options)
    assert set(found.data) == {"x", "c", "r", "d"}
    low, high = (float(end) for end in found.data["x"].range_value)
    values = np.concatenate([sample["x"].ravel() for sample in iter(Reader(4).get_next, None)])
    if method is CalibrationMethod.MinMax:
        assert (low, high) == (values.min(), values.max())
    assert 0.4 * values.max() < high < 2.1 * values.max()
    assert low < 0
