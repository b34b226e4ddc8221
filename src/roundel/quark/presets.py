"""The classic presets, one line each; `get_default_config` hands out a fresh copy every time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roundel.qdq.functions.blocks import ELEMENT_OF
from roundel.quark import enums
from roundel.quark.config import QuantizationConfig
from roundel.quark.errors import named
from roundel.quark.specs import BFP16Spec, Int8Spec, MXInt8Spec, QLayerConfig, QTensorConfig

_TUNING = {
    "DataSize": 1000,
    "FixedSeed": 1705472343,
    "BatchSize": 2,
    "NumIterations": 1000,
    "OptimDevice": "cpu",
    "InferDevice": "cpu",
    "EarlyStop": True,
}
DEFAULT_ADAROUND_PARAMS = {**_TUNING, "OptimAlgorithm": "adaround", "LearningRate": 0.1}
DEFAULT_ADAQUANT_PARAMS = {**_TUNING, "OptimAlgorithm": "adaquant", "LearningRate": 1e-5}
DEFAULT_BFP_PARAMS = {"bfp_method": "to_bfp", "axis": 1, "bit_width": 16, "block_size": 8, "rounding_mode": 2}
DEFAULT_MICROEXPONENTS_PARAMS = {
    **{"bfp_method": "to_bfp_prime", "axis": 1, "bit_width": 13, "block_size": 16},
    **{"sub_block_size": 2, "sub_block_shift_bits": 1, "rounding_mode": 2},
}
DEFAULT_MICROSCALING_PARAMS = {"element_dtype": "int8", "axis": 1, "block_size": 32, "rounding_mode": 2}

_TUNERS = {"_ADAROUND": DEFAULT_ADAROUND_PARAMS, "_ADAQUANT": DEFAULT_ADAQUANT_PARAMS}
_BOTH = tuple(_TUNERS)
_ADAQUANT = ("_ADAQUANT",)


@dataclass(frozen=True, slots=True)
class Preset:
    """One row: what a name means, and the endings under which it also exists with fine-tuning."""

    name: str
    calibrate: Any = enums.CalibrationMethod.MinMax
    form: Any = enums.QuantFormat.QDQ
    activation: Any = enums.QuantType.QInt8
    weight: Any = enums.QuantType.QInt8
    options: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    tuned: tuple[str, ...] = ()

    def config(self, suffix: str) -> QuantizationConfig:
        """A config of its own, fine-tuned where the name ends like that."""
        options, flags = copy.deepcopy(dict(self.options)), dict(self.flags)
        if suffix:
            options["FastFinetune"] = dict(_TUNERS[suffix])
            flags["include_fast_ft"] = True
        return QuantizationConfig(
            calibrate_method=self.calibrate,
            quant_format=self.form,
            activation_type=self.activation,
            weight_type=self.weight,
            extra_options=options,
            preset=self.name + suffix,
            **flags,
        )


_PERCENTILE, _MSE = enums.CalibrationMethod.Percentile, enums.PowerOfTwoMethod.MinMSE
_EXT = enums.ExtendedQuantFormat.QDQ
_U8, _S8 = enums.QuantType.QUInt8, enums.QuantType.QInt8
_S16, _U16 = enums.ExtendedQuantType.QInt16, enums.ExtendedQuantType.QUInt16
_FP16, _BF16 = enums.ExtendedQuantType.QFloat16, enums.ExtendedQuantType.QBFloat16
_BFP, _MX = enums.ExtendedQuantType.QBFP, enums.ExtendedQuantType.QMX
_MINMAX = enums.CalibrationMethod.MinMax

FORCE = {"ForceQuantizeNoInputCheck": True}
ALIGNED = {"AlignSlice": False, "FoldRelu": True, "AlignConcat": True}
_SYMMETRIC = {"ActivationSymmetric": True}
_NPU = {"enable_npu_cnn": True}
_ENCODER = {"enable_npu_transformer": True}
_FLOAT_SCALE = {**_SYMMETRIC, **FORCE, **ALIGNED}
_WIDE = {"Percentile": 99.9999}
_ACCURATE = {**_WIDE, "FastFinetune": DEFAULT_ADAROUND_PARAMS}
_TUNE = {"include_fast_ft": True}

VINT8_OPTIONS: Mapping[str, Any] = {
    "UseRandomData": True,
    "ConvertBNToConv": True,
    "ConvertSigmoidToHardSigmoid": False,
    "ConvertClipToRelu": True,
    "ConvertSplitToSlice": True,
    "SplitLargeKernelPool": False,
    "ReplaceClip6Relu": True,
    "ConvertReduceMeanToGlobalAvgPool": False,
    **{f"RemoveQDQConv{op}": False for op in ("Clip", "PRelu", "Relu", "LeakyRelu")},
    "Int32Bias": False,
    "DedicatedQDQPair": True,
    "QuantizeAllOpTypes": True,
}


def _bfp(**changes: object) -> dict[str, Any]:
    return {"BFPAttributes": {**DEFAULT_MICROEXPONENTS_PARAMS, **changes}}


def _mx(element: str) -> dict[str, Any]:
    return {"MXAttributes": {**DEFAULT_MICROSCALING_PARAMS, "element_dtype": element}}


def _mixed(spec: type[QTensorConfig], **more: object) -> dict[str, Any]:
    target = QLayerConfig(input_tensors=spec(), weight=spec(), bias=spec())  # type: ignore[call-arg]
    return {"AutoMixprecision": {"TargetLayerConfig": target, **more}}


def _mixed_bf16(spec: type[QTensorConfig]) -> dict[str, Any]:
    return {
        **_SYMMETRIC,
        "QuantizeBias": False,
        "DedicateDQNode": True,
        "CalibDataSize": 1,
        **_mixed(spec, DualQuantNodes=True),
    }


# fmt: off
_ROWS: tuple[Preset, ...] = (
    Preset("UINT8_DYNAMIC_QUANT", weight=_U8, flags={"use_dynamic_quant": True}),
    Preset("XINT8", _MSE, activation=_U8, flags=_NPU, options={**_SYMMETRIC, **FORCE}, tuned=_BOTH),
    Preset("VINT8", _MSE, flags={"optimize_model": False}, options={**_SYMMETRIC, **VINT8_OPTIONS}),
    Preset("S8S8_AAWS", _PERCENTILE, options={**_WIDE, **FORCE}, tuned=_BOTH),
    Preset("U8S8_AAWS", _PERCENTILE, activation=_U8, options=FORCE, tuned=_BOTH),
    Preset("U8U8_AAWA", _PERCENTILE, activation=_U8, weight=_U8,
           options={"ActivationSymmetric": False, "WeightSymmetric": False, **FORCE}),
    Preset("S16S8_ASWS", _PERCENTILE, _EXT, _S16, options={**_SYMMETRIC, **FORCE}, tuned=_BOTH),
    Preset("A8W8", _MINMAX, _EXT, options=_FLOAT_SCALE, tuned=_BOTH),
    Preset("A16W8", _MINMAX, _EXT, _S16, tuned=_BOTH,
           options={**_FLOAT_SCALE, "AlignEltwiseQuantType": True}),
    Preset("U16S8_AAWS", _PERCENTILE, _EXT, _U16, options=FORCE, tuned=_BOTH),
    Preset("FP16", _MINMAX, _EXT, _FP16, _FP16, options=FORCE, tuned=_ADAQUANT),
    Preset("BF16", _MINMAX, _EXT, _BF16, _BF16, tuned=_ADAQUANT,
           options={"QuantizeAllOpTypes": True, **FORCE}),
    Preset("BFP16", _MINMAX, _EXT, _BFP, _BFP, tuned=_ADAQUANT,
           options={"BFPAttributes": DEFAULT_BFP_PARAMS}),
    *(Preset(f"MX{bits}", _MINMAX, _EXT, _BFP, _BFP, options=_bfp(bit_width=width), tuned=_ADAQUANT)
      for bits, width in ((4, 11), (6, 13), (9, 16))),
    *(Preset(block.name, _MINMAX, _EXT, _MX, _MX, options=_mx(element), tuned=_ADAQUANT)
      for block, element in ELEMENT_OF.items()),
    Preset("S16S16_MIXED_S8S8", _PERCENTILE, _EXT, _S16, _S16, flags={"include_auto_mp": True},
           options={**_WIDE, "Int32Bias": False, "Int16Bias": False, "WeightSymmetric": True,
                    "ActivationSymmetric": False, **FORCE, **_mixed(Int8Spec)}),
    Preset("BF16_MIXED_BFP16", _MINMAX, _EXT, _BF16, _BF16, flags={"include_auto_mp": True},
           options=_mixed_bf16(BFP16Spec), tuned=_ADAQUANT),
    Preset("BF16_MIXED_MXINT8", _MINMAX, _EXT, _BF16, _BF16, flags={"include_auto_mp": True},
           options=_mixed_bf16(MXInt8Spec), tuned=_ADAQUANT),
    Preset("BF16_BFP16", _MINMAX, _EXT, _BF16, _BFP, options={"BFPAttributes": DEFAULT_BFP_PARAMS}),
    Preset("BF16_MXINT8", _MINMAX, _EXT, _BF16, _MX, options=_mx("int8")),
    Preset("MX9_INT8", _MINMAX, _EXT, _BFP, _S8, options=_bfp(bit_width=16)),
    Preset("INT8_CNN_DEFAULT", activation=_U8, options=FORCE),
    Preset("INT16_CNN_DEFAULT", _MINMAX, _EXT, _U16, _S16, options=FORCE),
    Preset("INT8_TRANSFORMER_DEFAULT", activation=_U8, flags=_ENCODER, options={"CalibMovingAverage": True}),
    Preset("INT16_TRANSFORMER_DEFAULT", _MINMAX, _EXT, _U16, _S16, flags=_ENCODER,
           options={"CalibMovingAverage": True}),
    Preset("INT8_CNN_ACCURATE", _PERCENTILE, activation=_U8, flags=_TUNE, options={**_ACCURATE, **FORCE}),
    Preset("INT16_CNN_ACCURATE", _PERCENTILE, _EXT, _U16, _S16, flags=_TUNE, options={**_ACCURATE, **FORCE}),
    Preset("INT8_TRANSFORMER_ACCURATE", _PERCENTILE, activation=_U8, flags={**_ENCODER, **_TUNE},
           options=_ACCURATE),
    Preset("INT16_TRANSFORMER_ACCURATE", _PERCENTILE, _EXT, _U16, _S16, flags={**_ENCODER, **_TUNE},
           options=_ACCURATE),
    Preset("MATMUL_NBITS", options={
        "UseMatMulNBits": True,
        "MatMulNBitsParams": {"GroupSize": 128, "Symmetric": True, "Bits": 4, "AccuracyLevel": 1},
    }),
)
# fmt: on

# A constant to import, which is no name for `get_default_config`.
_UNLISTED_OPTIONS = {**_SYMMETRIC, "WeightsOnly": True, "FastFinetune": DEFAULT_ADAROUND_PARAMS}
_UNLISTED = Preset(
    "XINT8_WEIGHTSONLY_ADAROUND", _MSE, activation=_U8, options=_UNLISTED_OPTIONS, flags={**_NPU, **_TUNE}
)


def _variants(rows: tuple[Preset, ...]) -> dict[str, tuple[Preset, str]]:
    """Every name, those with a fine-tuning ending included, and the row it comes from."""
    return {row.name + suffix: (row, suffix) for row in rows for suffix in ("", *row.tuned)}


_BY_NAME = _variants(_ROWS)
_BY_CONSTANT = _variants((*_ROWS, _UNLISTED))


def config_names() -> tuple[str, ...]:
    """All names that `get_default_config` knows."""
    return tuple(_BY_NAME)


def get_default_config(config_name: str) -> QuantizationConfig:
    """The preset of that name, as a config that may be changed freely.

    Raises:
        QuarkConfigError: there is no such preset; it is a ValueError, too.
    """
    row, suffix = named("preset", config_name, _BY_NAME)
    return row.config(suffix)


def get_default_config_mapping() -> dict[str, QuantizationConfig]:
    """All presets by name, in fresh copies."""
    return {name: row.config(suffix) for name, (row, suffix) in _BY_NAME.items()}


def preset_constant(name: str) -> QuantizationConfig | None:
    """What a script imports as NAME_CONFIG, in a fresh copy; None where there is no such preset."""
    row, suffix = _BY_CONSTANT.get(name.removesuffix("_CONFIG"), (None, ""))
    return row.config(suffix) if row is not None and name.endswith("_CONFIG") else None
