"""A config as the translation reads it: types, scales and families, worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from roundel.quark.blocks import block_type
from roundel.quark.config import QuantizationConfig
from roundel.quark.enums import (
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
    VitisQuantFormat,
    element_type,
    is_extended,
)
from roundel.quark.errors import QuarkConfigError

# The newer API's spellings of the classic fields; both are understood in extra_options.
FIELD_OPTIONS: Mapping[str, str] = {
    "OptimizeModel": "optimize_model",
    "ConvertFP16ToFP32": "convert_fp16_to_fp32",
    "ConvertNCHWToNHWC": "convert_nchw_to_nhwc",
    "OpTypesToQuantize": "op_types_to_quantize",
    "NodesToQuantize": "nodes_to_quantize",
    "ExtraOpTypesToQuantize": "extra_op_types_to_quantize",
    "InputNodes": "input_nodes",
    "OutputNodes": "output_nodes",
    "SpecificTensorPrecision": "specific_tensor_precision",
    "EnableNPUCnn": "enable_npu_cnn",
    "EnableNPUTransformer": "enable_npu_transformer",
    "ExecutionProviders": "execution_providers",
    "DebugMode": "debug_mode",
    "PrintSummary": "print_summary",
    "IgnoreWarnings": "ignore_warnings",
    "CryptoMode": "crypto_mode",
}

# Method: how ranges are chosen, which numbers a scale may be, and whether |x| is cut as a whole.
_METHODS: Mapping[Any, tuple[str, str, bool]] = {
    CalibrationMethod.MinMax: ("minmax", "float", True),
    CalibrationMethod.Entropy: ("entropy", "float", False),
    CalibrationMethod.Percentile: ("percentile", "float", True),
    CalibrationMethod.Distribution: ("distribution", "float", True),
    LayerWiseMethod.LayerWisePercentile: ("layerwise_percentile", "float", True),
    PowerOfTwoMethod.NonOverflow: ("minmax", "power_of_two", True),
    PowerOfTwoMethod.MinMSE: ("mse", "power_of_two", True),
    Int16Method.MinMax: ("minmax", "int16", True),
    ExtendedCalibrationMethod.MinMSE: ("mse", "float", True),
}
_OLD_BLOCK_FORMATS = {
    VitisQuantFormat.BFPFixNeuron: ExtendedQuantType.QBFP,
    VitisQuantFormat.MXFixNeuron: ExtendedQuantType.QMX,
}
_INTEGERS = frozenset({"int8", "uint8", "int16", "uint16"})
_FLOATS = frozenset({"bfloat16", "float16"})


def normalised(config: QuantizationConfig) -> QuantizationConfig:
    """A copy in which every setting stands in one place: fields in fields, options in options."""
    options = dict(config.extra_options or {})
    lifted = {name: options.pop(key) for key, name in FIELD_OPTIONS.items() if key in options}
    copied = {row.name: getattr(config, row.name) for row in fields(config)}
    result = QuantizationConfig(**{**copied, **lifted, "extra_options": options})
    if result.enable_dpu:
        result = replace(result, enable_npu_cnn=True, enable_dpu=False)
    if result.quant_format in _OLD_BLOCK_FORMATS:
        kind = _OLD_BLOCK_FORMATS[result.quant_format]
        result = replace(result, activation_type=kind, weight_type=kind)
    if isinstance(result.quant_format, VitisQuantFormat):
        result = replace(result, quant_format=ExtendedQuantFormat.QDQ)
    return result


@dataclass(frozen=True)
class Request:
    """A normalised config, and what follows from its fields."""

    config: QuantizationConfig

    @property
    def options(self) -> Mapping[str, Any]:
        """The extra options."""
        return self.config.extra_options

    def asked(self, key: str, default: Any = False) -> Any:
        """The value of an option."""
        value = self.options.get(key)
        return default if value is None else value

    @cached_property
    def method(self) -> tuple[str, str, bool]:
        """Calibration method, scale, and whether ranges are cut symmetrically."""
        found = _METHODS.get(self.config.calibrate_method)
        if found is None:
            raise QuarkConfigError(
                "The calibration method is unknown.",
                where="calibrate_method",
                observed=self.config.calibrate_method,
                expected=", ".join(f"{type(m).__name__}.{m.name}" for m in _METHODS),
            )
        return found

    @property
    def scale(self) -> str:
        """Which numbers scales may be."""
        return "int16" if self.asked("Int16Scale") else self.method[1]

    @cached_property
    def activation(self) -> str:
        """The activations' element type in the recipe's words."""
        return block_type(element_type(self.config.activation_type, "activation_type"), self.options)

    @cached_property
    def weight(self) -> str:
        """The weights' element type in the recipe's words."""
        return block_type(element_type(self.config.weight_type, "weight_type"), self.options)

    @property
    def integer_activations(self) -> bool:
        """Whether activations are integers."""
        return self.activation in _INTEGERS

    @property
    def integer_weights(self) -> bool:
        """Whether weights are integers."""
        return self.weight in _INTEGERS

    @property
    def short_floats(self) -> bool:
        """Whether any tensor is stored as bfloat16 or float16."""
        return bool({self.activation, self.weight} & _FLOATS)

    @property
    def block_activations(self) -> bool:
        """Whether activations are stored in blocks."""
        return self.activation not in _INTEGERS | _FLOATS

    @property
    def blocks(self) -> bool:
        """Whether any tensor is stored in blocks."""
        return self.block_activations or self.weight not in _INTEGERS | _FLOATS

    @property
    def few_bits(self) -> bool:
        """Weights of MatMul in few bits, everything else in float."""
        return bool(self.asked("UseMatMulNBits") or self.asked("UseGPTQ"))

    @property
    def extended(self) -> bool:
        """The extended format: com.microsoft Q/DQ nodes and the longer operator list."""
        # Overrides of single tensors have always asked for it, too.
        return is_extended(self.config.quant_format) or bool(self.options.get("TensorQuantOverrides"))

    @property
    def npu(self) -> bool:
        """The NPU's 8-bit engine: power-of-two scales, shift limits, its own arithmetic."""
        return self.config.enable_npu_cnn and not self.extended and self.scale == "power_of_two"

    @property
    def tuned(self) -> bool:
        """Whether the model is fine-tuned; options for it are enough to ask for it."""
        return self.config.include_fast_ft or "FastFinetune" in self.options

    @property
    def effort(self) -> str:
        """Accuracy by default; short floats and blocks need no data, unless something is asked for."""
        if self.tuned:
            return "high"
        return "fast" if self.integer_weights or self.asked("BiasCorrection") else "none"

    @property
    def casts(self) -> bool:
        """Whether bfloat16 tensors are written as Cast pairs."""
        return bool(self.asked("BF16QDQToCast") or self.asked("EnableVaimlBF16"))
