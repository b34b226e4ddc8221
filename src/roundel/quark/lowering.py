"""From the newer config to the classic one: specs become types, methods and symmetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundel.qdq.functions.blocks import ELEMENT_OF, WIDTHS
from roundel.quark.algorithms import AdaQuantConfig, AdaRoundConfig, AlgoConfig
from roundel.quark.config import Config, QuantizationConfig
from roundel.quark.enums import (
    CalibMethod,
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantFormat,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantFormat,
    QuantGranularity,
    QuantType,
    ScaleType,
)
from roundel.quark.errors import QuarkConfigError
from roundel.quark.qconfig import QConfig
from roundel.quark.specs import Int8, Int16, QLayerConfig, QTensorConfig, UInt8, UInt16
from roundel.types import BlockType

_METHODS: Mapping[CalibMethod, Any] = {
    CalibMethod.MinMax: CalibrationMethod.MinMax,
    CalibMethod.Percentile: CalibrationMethod.Percentile,
    CalibMethod.Entropy: CalibrationMethod.Entropy,
    CalibMethod.Distribution: CalibrationMethod.Distribution,
    CalibMethod.LayerwisePercentile: LayerWiseMethod.LayerWisePercentile,
    CalibMethod.MinMSE: ExtendedCalibrationMethod.MinMSE,
}
_SHIFTED: Mapping[CalibMethod, Any] = {
    CalibMethod.MinMax: PowerOfTwoMethod.NonOverflow,
    CalibMethod.MinMSE: PowerOfTwoMethod.MinMSE,
}
_INTEGERS = (Int8, UInt8, Int16, UInt16)
_NATIVE = {Int8: QuantType.QInt8, UInt8: QuantType.QUInt8}
# Which attributes of a block operator a spec stands for.
_BLOCKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{
        block.value: ("BFPAttributes", {"bfp_method": "to_bfp_prime", "bit_width": width})
        for block, width in WIDTHS.items()
    },
    BlockType.BFP16.value: ("BFPAttributes", {"bfp_method": "to_bfp", "bit_width": 16}),
    **{block.value: ("MXAttributes", {"element_dtype": element}) for block, element in ELEMENT_OF.items()},
}


def lowered(config: QConfig | Config | QuantizationConfig) -> QuantizationConfig:
    """The classic config that says the same; layers with specs of their own are left to `selection`.

    Raises:
        QuarkConfigError: the config is of no known kind, or lacks the specs that it needs.
    """
    if isinstance(config, QuantizationConfig):
        return config
    if isinstance(config, Config):
        return lowered(config.global_quant_config)
    if not isinstance(config, QConfig):
        raise QuarkConfigError(
            "This is not a config.", observed=type(config).__name__, expected="Config(…) or QConfig(…)"
        )
    moving, stored = _specs(config.global_config)
    names, subgraphs = split_excluded(config.exclude)
    classic = QuantizationConfig(
        calibrate_method=_method(moving),
        quant_format=QuantFormat.QDQ if _native(moving, stored) else ExtendedQuantFormat.QDQ,
        activation_type=_type(moving),
        weight_type=_type(stored),
        nodes_to_exclude=names,
        subgraphs_to_exclude=subgraphs,
        per_channel=stored.quant_granularity is QuantGranularity.Channel,
        use_external_data_format=config.use_external_data_format,
        include_cle=False,
        enable_npu_cnn=moving.scale_type is stored.scale_type is ScaleType.PowerOf2,
        extra_options={**_spec_options(moving, stored), **config.extra_options},
    )
    return with_algorithms(classic, config.algo_config)


def with_algorithms(config: QuantizationConfig, algorithms: list[AlgoConfig]) -> QuantizationConfig:
    """A copy of the config with the algorithms' flags and options.

    Raises:
        QuarkConfigError: two of them exclude each other.
    """
    tuning = [a for a in algorithms if isinstance(a, AdaRoundConfig | AdaQuantConfig)]
    if len(tuning) > 1:
        raise QuarkConfigError(
            "AdaRound and AdaQuant cannot both tune a model.",
            observed=", ".join(type(a).__name__ for a in tuning),
            expected="one of them",
        )
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    options = dict(config.extra_options)
    for algorithm in algorithms:
        fields.update(algorithm.flags)
        options.update(algorithm.get_options())
    return QuantizationConfig(**{**fields, "extra_options": options})


def split_excluded(exclude: list[Any]) -> tuple[list[str], list[Any]]:
    """Names and patterns apart from (starts, ends) pairs, which may lie in a list of their own."""
    names: list[str] = []
    subgraphs: list[Any] = []
    for item in exclude:
        if isinstance(item, str):
            names.append(item)
        elif isinstance(item, tuple):
            subgraphs.append(item)
        elif isinstance(item, list):
            inner = split_excluded(item)
            names += inner[0]
            subgraphs += inner[1]
        else:
            raise QuarkConfigError(
                "Something in `exclude` cannot be read.",
                observed=repr(item)[:120],
                expected="a node name, '^pattern.*', or ([start nodes], [end nodes])",
            )
    return names, subgraphs


def _specs(layer: QLayerConfig) -> tuple[QTensorConfig, QTensorConfig]:
    moving, stored = layer.input_tensors, layer.weight
    if moving is None or stored is None:
        raise QuarkConfigError(
            "The global config needs specs for inputs and weights.",
            observed=layer,
            expected="QLayerConfig(input_tensors=…, weight=…)",
        )
    return moving, stored


def _native(moving: QTensorConfig, stored: QTensorConfig) -> bool:
    return moving.kind in _NATIVE and stored.kind in _NATIVE


def _type(spec: QTensorConfig) -> Any:
    return _NATIVE.get(spec.kind, spec.kind.quant_type)


def _method(spec: QTensorConfig) -> Any:
    table = _SHIFTED if spec.scale_type is ScaleType.PowerOf2 else _METHODS
    if spec.calibration_method not in table:
        raise QuarkConfigError(
            "This method does not choose power-of-two scales.",
            observed=spec,
            expected="CalibMethod.MinMSE or CalibMethod.MinMax",
        )
    return table[spec.calibration_method]


def _spec_options(moving: QTensorConfig, stored: QTensorConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if moving.kind in _INTEGERS:
        options["ActivationSymmetric"] = moving.symmetric
    if stored.kind in _INTEGERS:
        options["WeightSymmetric"] = stored.symmetric
    if ScaleType.Int16 in (moving.scale_type, stored.scale_type):
        options["Int16Scale"] = True
    for spec in (moving, stored):
        if spec.kind.block is not None:
            key, attributes = _BLOCKS[spec.kind.block]
            options[key] = dict(attributes)
    return options
