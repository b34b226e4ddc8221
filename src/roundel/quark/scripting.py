"""Small functions that scripts import beside the quantizer: about versions, models, types, and ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization.calibrate import TensorData, TensorsData

from roundel.calibrate.collect import collect
from roundel.calibrate.observers import Observer
from roundel.calibrate.ranges import (
    Distribution,
    Entropy,
    Method,
    MinMax,
    Percentile,
    choose,
    choose_range,
)
from roundel.calibrate.resolve import method_of
from roundel.data import open_samples
from roundel.errors import ModelError
from roundel.measure.folders import similarity
from roundel.model.graph import input_specs, is_constant, is_float32, iter_values
from roundel.model.graph import opset_version as opset_of
from roundel.model.load import load_model
from roundel.model.session import open_session
from roundel.numerics.floats import largest
from roundel.passes import refresh_shapes
from roundel.passes.operators import nchw_to_nhwc
from roundel.quark.config import QuantizationConfig
from roundel.quark.enums import CalibrationMethod, QuantType
from roundel.quark.errors import QuarkConfigError
from roundel.quark.runtime import Model
from roundel.quark.translate import translate
from roundel.types import Array, FloatType, QType, Scheme

_FINITE = {int(ir.DataType[kind.name]): largest(kind) for kind in FloatType}
_CODES = {int(ir.DataType[kind.name]): kind for kind in QType}
_SHORT, _FULL = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT


def is_version_below(package: ModuleType, target_version: str) -> bool:
    """Whether a package is older than a version, by its numbers."""
    return _numbers(str(package.__version__)) < _numbers(target_version)


def _numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' as (2, 13): trailing zeros do not count."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit()) if part[:1].isdigit() else ""
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def _proto(model: Model) -> onnx.ModelProto:
    return model if isinstance(model, onnx.ModelProto) else onnx.load(model)


def get_opset_version(model: onnx.ModelProto) -> int:
    """The opset of the standard operators."""
    return opset_of(ir.from_proto(model))


def get_batch_size(model: onnx.ModelProto) -> int | str:
    """The first dimension of the first input: its size, or its name."""
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    return int(first.dim_value) or str(first.dim_param)


def make_batch_size_fixed(model: onnx.ModelProto, batch_size: int = 1) -> onnx.ModelProto:
    """The model with that first dimension at all inputs and outputs; the argument is changed, too."""
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if dims:
            dims[0].dim_value = batch_size
    del model.graph.value_info[:]  # inner shapes follow anew
    return model


def check_model_is_fp16(input_model: Model) -> bool:
    """Whether float16 is the only float at the model's borders and in its weights."""
    graph = _proto(input_model).graph
    borders = (value.type.tensor_type.elem_type for value in (*graph.input, *graph.output))
    kinds = {*borders, *(tensor.data_type for tensor in graph.initializer)}
    return _SHORT in kinds and _FULL not in kinds


def infer_shape(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the shapes that can be inferred."""
    copy = ir.from_proto(model)
    refresh_shapes(copy)
    return ir.to_proto(copy)


def load_model_with_shape_infer(model_path: str | Path) -> onnx.ModelProto:
    """The model of a file with the shapes that can be inferred."""
    return infer_shape(onnx.load(model_path))


def check_onnx_model(model_input: Model, use_external_data_format: bool = False) -> None:
    """Open the model in ONNX Runtime.

    Raises:
        ValueError: it cannot be opened.
    """
    try:
        open_session(load_model(model_input, allow_quantized=True).model)
    except ModelError as error:
        raise ValueError(str(error)) from error


def remove_initializer_from_input(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose weights are not listed as inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in [value for value in copy.graph.input if value.name in weights]:
        copy.graph.input.remove(value)
    return copy


def convert_nchw_to_nhwc(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that takes and gives images with their channels last."""
    copy = ir.from_proto(model)
    refresh_shapes(copy)
    nchw_to_nhwc(copy)
    return ir.to_proto(copy)


def get_matmul_nodes_without_weights(input_model: Model) -> list[str]:
    """Names of the MatMul nodes that multiply two computed tensors."""
    graph = _proto(input_model).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [n.name for n in graph.node if n.op_type == "MatMul" and n.input[1] not in weights]


def get_tensor_value(initializer: onnx.TensorProto) -> Array:
    """A weight as an array."""
    return np.asarray(onnx.numpy_helper.to_array(initializer))


def generate_initializer(tensor_array: Any, dtype: Any, name: str) -> onnx.TensorProto:
    """An array as a weight."""
    return onnx.numpy_helper.from_array(np.asarray(tensor_array, dtype), name)


def scale2pos(scale: float) -> int:
    """The position of a power-of-two scale: minus its logarithm."""
    return round(-math.log2(min(max(float(scale), 2.0**-127), 2.0**127)))


def pos2scale(pos: int) -> float:
    """The scale at a position."""
    return 2.0**-pos


def get_qmin_qmax_for_qType(  # noqa: N802 - the name that scripts import
    qType: int,  # noqa: N803
    reduce_range: bool = False,
    symmetric: bool = False,
) -> tuple[Any, Any]:
    """The smallest and the largest value of an ONNX element type.

    Raises:
        ValueError: the type is none that can be quantized to.
    """
    if qType in _FINITE:
        most = _FINITE[qType]
        return np.float32(-most), np.float32(most)
    kind = _CODES.get(qType)
    if kind is None:
        raise QuarkConfigError("The element type has no codes.", observed=qType, expected=sorted(_CODES))
    low, high = kind.qmin, kind.qmax
    if reduce_range:
        low, high = (-(-low // 2), (high + 1) // 2) if kind.signed else (0, high // 2)
    elif symmetric and kind.signed:
        low = -high
    return np.array(low, kind.dtype), np.array(high, kind.dtype)


def quantize_nparray(
    qType: int,  # noqa: N803
    arr: Array,
    scale: Any,
    zero_point: Any,
    low: float | None = None,
    high: float | None = None,
) -> Array:
    """Codes of an array, rounded half to even and cut to the symmetric range, as Quark has them."""
    lowest, highest = (int(end) for end in get_qmin_qmax_for_qType(qType, symmetric=True))
    bottom = lowest if low is None else max(lowest, low)
    top = highest if high is None else min(highest, high)
    codes = np.rint(np.asarray(arr, np.float32) / scale) + zero_point
    return np.asarray(np.clip(codes, bottom, top).astype(_CODES[qType].dtype))


def calculate_mse(x: Array, y: Array) -> Array:
    """The mean squared difference."""
    return np.asarray(np.mean((x - y) ** 2))


def _measured(name: str, what: str) -> Callable[[Array, Array], float]:
    def calculate(x: Array, y: Array) -> float:
        found = getattr(similarity(np.asarray(x), np.asarray(y)), name)
        return math.nan if found is None else float(found)

    calculate.__doc__ = f"{what} of two arrays."
    return calculate


calculate_cos = _measured("cosine", "The cosine similarity")
calculate_l2_distance = _measured("l2", "The length of the difference")
calculate_psnr = _measured("psnr_db", "The peak signal to noise ratio in dB")
calculate_ssim = _measured("ssim", "The structural similarity; NaN where they are no pictures,")


def calculate_l1_distance(x: Array, y: Array) -> float:
    """The sum of absolute differences."""
    return float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).sum())


def run_calibration(
    model_input: Model,
    data_reader: Any,
    op_types_to_calibrate: Sequence[str] | None = None,
    activation_type: Any = QuantType.QInt8,
    calibrate_method: Any = CalibrationMethod.MinMax,
    use_external_data_format: bool = False,
    execution_providers: list[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> TensorsData:
    """The range of every float tensor over data, in ONNX Runtime's form.

    Args:
        model_input: the float model, as it is.
        data_reader: whatever Roundel takes as data.
        op_types_to_calibrate: only tensors around nodes of these types; None means all.
        activation_type: the type whose codes a range is chosen for.
        calibrate_method: as in a config.
        use_external_data_format: of no effect: nothing is written.
        execution_providers: of no effect: the CPU calibrates.
        extra_options: those of a config that are about calibration.
    """
    config = QuantizationConfig(
        calibrate_method=calibrate_method,
        activation_type=activation_type,
        extra_options=dict(extra_options or {}),
    )
    recipe, model = translate(config).recipe, load_model(model_input).model
    refresh_shapes(model)
    method, wanted = method_of(recipe), None if op_types_to_calibrate is None else set(op_types_to_calibrate)
    around = {
        str(value.name)
        for node in model.graph
        if wanted is None or node.op_type in wanted
        for value in (*node.inputs, *node.outputs)
        if value is not None
    }
    names = [
        str(value.name)
        for value in iter_values(model.graph)
        if value.name in around and is_float32(value) and not is_constant(value)
    ]
    samples = open_samples(data_reader, input_specs(model), limit=recipe.data.samples)
    seen = collect(model, dict.fromkeys(names, method.needs), samples, keep=1)
    scheme = recipe.activations.integer
    ranges = {name: _range(method, seen.stats[name], scheme) for name in names if name in seen.stats}
    known = isinstance(calibrate_method, CalibrationMethod)
    return TensorsData(calibrate_method if known else CalibrationMethod.MinMax, ranges)


def _range(method: Method, stat: Observer, scheme: Scheme) -> TensorData:
    if isinstance(method, MinMax | Percentile | Entropy | Distribution):
        found = choose_range(method, stat)
        low, high = found.low, found.high
    else:  # what the codes reach
        params = choose(method, stat, scheme)
        zero = int(params.zero_point)
        first = params.qtype.qmin + (1 if params.qtype.signed and scheme.symmetric else 0)
        low, high = ((code - zero) * float(params.scale) for code in (first, params.qtype.qmax))
    return TensorData(lowest=np.array(low, np.float32), highest=np.array(high, np.float32))
