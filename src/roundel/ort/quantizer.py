"""quantize_static, quantize_dynamic and quantize: translate, then run Roundel's pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization.calibrate import CalibrationMethod
from onnxruntime.quantization.quant_utils import QuantFormat, QuantType
from onnxruntime.quantization.quantize import DynamicQuantConfig, StaticQuantConfig

from roundel.model.load import load_model
from roundel.ort.words import operator_types, pairs_of_wide_types, translated
from roundel.quark.config import Config, QuantizationConfig
from roundel.quark.errors import QuarkConfigError
from roundel.quark.quantizer import ModelQuantizer
from roundel.quark.quantizer import quantize_dynamic as dynamic
from roundel.recipe.settings import merge
from roundel.report.console import terminal

Model = str | Path | onnx.ModelProto
_CONFIGS = StaticQuantConfig | DynamicQuantConfig


def quantize_static(
    model_input: Model,
    model_output: str | Path,
    calibration_data_reader: object = None,
    quant_format: Any = QuantFormat.QDQ,
    op_types_to_quantize: list[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = QuantType.QInt8,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: list[str] | None = None,
    nodes_to_exclude: list[str] | None = None,
    use_external_data_format: bool = False,
    calibrate_method: Any = CalibrationMethod.MinMax,
    calibration_providers: list[str] | None = None,
    extra_options: dict[str, Any] | None = None,
    calibration_cache_path: str | Path | None = None,
) -> None:
    """Quantize with calibration data, as `onnxruntime.quantization.quantize_static` does.

    The same tensors get Q/DQ pairs of the same types; scales, rounding and biases are chosen by error.

    Raises:
        RoundelError: something is wrong with the arguments, the model or the data; nothing was written.
    """
    words, model = translated(extra_options or {}, calibrate_method), load_model(model_input).model
    overrides = words.options.get("TensorQuantOverrides", {})
    wide = pairs_of_wide_types((activation_type, weight_type), overrides, model)
    words.options["Recipe"] = merge(words.options["Recipe"], wide)
    if calibration_cache_path is not None:
        words.options["SaveAndRestore"] = str(calibration_cache_path)
    config = QuantizationConfig(
        calibrate_method=calibrate_method,
        quant_format=quant_format,
        activation_type=activation_type,
        weight_type=weight_type,
        op_types_to_quantize=operator_types(op_types_to_quantize, model),
        nodes_to_quantize=list(nodes_to_quantize or ()),
        nodes_to_exclude=list(nodes_to_exclude or ()),
        per_channel=per_channel,
        reduce_range=reduce_range,
        use_external_data_format=use_external_data_format,
        execution_providers=list(calibration_providers or ()),
        optimize_model=False,
        include_cle=False,
        include_sq=words.smooth,
        extra_options=words.options,
    )
    ModelQuantizer(Config(config)).quantize_model(model_input, model_output, calibration_data_reader)
    for note in words.notes:
        terminal().print(f"note: {note}", highlight=False, markup=False)


def quantize_dynamic(
    model_input: Model,
    model_output: str | Path,
    op_types_to_quantize: list[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: list[str] | None = None,
    nodes_to_exclude: list[str] | None = None,
    use_external_data_format: bool = False,
    extra_options: dict[str, Any] | None = None,
) -> None:
    """Quantize weights; activations are measured when the model runs.

    Raises:
        RoundelError: something is wrong with the arguments or the model; nothing was written.
    """
    words = translated(extra_options or {}, None)
    kept = {
        key: words.options[key] for key in ("WeightSymmetric", "MatMulConstBOnly") if key in words.options
    }
    dynamic(
        model_input,
        model_output,
        op_types_to_quantize,
        per_channel,
        reduce_range,
        weight_type,
        nodes_to_quantize,
        nodes_to_exclude,
        use_external_data_format=use_external_data_format,
        extra_options=kept,
    )


def quantize(model_input: Model, model_output: str | Path, quant_config: Any) -> None:
    """Quantize as one of ONNX Runtime's config objects says.

    Raises:
        QuarkConfigError: the config is of another kind.
    """
    given = dict(vars(quant_config)) if isinstance(quant_config, _CONFIGS) else {}
    if isinstance(quant_config, StaticQuantConfig):
        quantize_static(model_input, model_output, **given)
    elif isinstance(quant_config, DynamicQuantConfig):
        given.pop("activation_type", None)  # always measured, in 8 bits
        quantize_dynamic(model_input, model_output, **given)
    else:
        raise QuarkConfigError(
            "This is not a config for static or dynamic quantization.",
            observed=type(quant_config).__name__,
            expected="StaticQuantConfig or DynamicQuantConfig",
            hint="For weights of MatMul in few bits use `roundel quantize --preset matmul_nbits`.",
        )
