"""The newer config, QConfig, its presets, and what it says in the words of the classic one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from roundel.qdq.functions.blocks import ELEMENT_OF, WIDTHS
from roundel.quark import enums, specs
from roundel.quark.config import Config, QuantizationConfig, Settings, readable
from roundel.quark.errors import QuarkConfigError, named
from roundel.quark.presets import ALIGNED, FORCE, VINT8_OPTIONS, get_default_config
from roundel.types import BlockType


class QConfig(Settings):
    """Specs for all layers, exceptions for some, algorithms, and extra options as keyword arguments.

    Args:
        global_config: specs for every layer.
        specific_layer_config: layer config -> node names.
        layer_type_config: layer config -> operator types; the key None keeps those types in float.
        exclude: node names, '^…' patterns, and (starts, ends) pairs whose nodes stay float.
        algo_config: what to do beyond calibration.
        use_external_data_format: weights in a file of their own.
        kwargs: extra options, or `extra_options={…}`.
    """

    def __init__(
        self,
        global_config: specs.QLayerConfig,
        specific_layer_config: Mapping[specs.QLayerConfig, list[str]] | None = None,
        layer_type_config: Mapping[specs.QLayerConfig | None, list[str]] | None = None,
        exclude: Iterable[Any] | None = None,
        algo_config: Iterable[specs.AlgoConfig] | None = None,
        use_external_data_format: bool = False,
        **kwargs: Any,
    ) -> None:
        self.global_config = global_config
        self.specific_layer_config = dict(specific_layer_config or {})
        self.layer_type_config = dict(layer_type_config or {})
        self.exclude = list(exclude or [])
        self.algo_config = list(algo_config or [])
        self.use_external_data_format = use_external_data_format
        nested = kwargs.pop("extra_options", None) or {}
        self.extra_options: dict[str, Any] = {**kwargs, **nested}

    @staticmethod
    def get_default_config(config_name: str) -> Config:
        """The classic preset of that name, as a config that may be changed freely."""
        return Config(get_default_config(config_name))

    def to_dict(self) -> dict[str, Any]:
        """Plain words that `from_dict` reads back to an equal config."""
        return {
            "global_config": self.global_config.to_dict(),
            "specific_layer_config": [[c.to_dict(), n] for c, n in self.specific_layer_config.items()],
            "layer_type_config": [[c and c.to_dict(), n] for c, n in self.layer_type_config.items()],
            "exclude": list(self.exclude),
            "algo_config": [algorithm.to_dict() for algorithm in self.algo_config],
            "use_external_data_format": self.use_external_data_format,
            "extra_options": dict(self.extra_options),
        }

    @staticmethod
    def from_dict(words: Mapping[str, Any]) -> QConfig:
        """The config that `to_dict` wrote down."""
        layers, types = words.get("specific_layer_config", []), words.get("layer_type_config", [])
        algorithms = words.get("algo_config", [])
        return QConfig(
            specs.QLayerConfig.from_dict(words["global_config"]),
            {specs.QLayerConfig.from_dict(config): names for config, names in layers},
            {config and specs.QLayerConfig.from_dict(config): names for config, names in types},
            words.get("exclude"),
            [named("algorithm", one.get("name"), specs.BY_NAME).from_dict(one) for one in algorithms],
            words.get("use_external_data_format", False),
            extra_options=words.get("extra_options"),
        )

    def __str__(self) -> str:
        named = {key: value for key, value in vars(self).items() if value}
        lines = [f"  {key} = {readable(value, 2)}" for key, value in named.items()]
        return "\n".join(["QConfig(", *lines, ")"])


_FLOAT_SCALE = {**FORCE, **ALIGNED}
_VINT8 = {**VINT8_OPTIONS, "OptimizeModel": False, "EnableNPUCnn": False}

# name: (activation spec, weight spec, options); the tuned forms of the first three follow from them.
_ROWS: dict[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "XINT8": (specs.XInt8Spec, specs.XInt8Spec, FORCE),
    "A8W8": (specs.Int8Spec, specs.Int8Spec, _FLOAT_SCALE),
    "A16W8": (specs.Int16Spec, specs.Int8Spec, {**_FLOAT_SCALE, "AlignEltwiseQuantType": True}),
    "VINT8": (specs.XInt8Spec, specs.XInt8Spec, _VINT8),
    "BF16": (specs.BFloat16Spec, specs.BFloat16Spec, FORCE),
    "BFP16": (specs.BFP16Spec, specs.BFP16Spec, {}),
}
_TUNABLE = ("XINT8", "A8W8", "A16W8")
_PRESETS: dict[str, tuple[str, str | None]] = {
    **{f"{name}_QCONFIG": (name, None) for name in _ROWS},
    **{f"{name}_{word.upper()}_QCONFIG": (name, word) for name in _TUNABLE for word in specs.TUNERS},
}
QCONFIG_NAMES = tuple(_PRESETS)


def qconfig_preset(name: str) -> QConfig | None:
    """The QConfig that a script imports under this name, in a fresh copy; None where there is none."""
    if name not in _PRESETS:
        return None
    row, tuner = _PRESETS[name]
    activation, weight, options = _ROWS[row]
    layer = specs.QLayerConfig(input_tensors=activation(), weight=weight())
    return QConfig(layer, algo_config=[specs.TUNERS[tuner]()] if tuner else [], extra_options=options)


_METHODS: Mapping[enums.CalibMethod, Any] = {
    **{enums.CalibMethod[method.name]: method for method in enums.CalibrationMethod},
    enums.CalibMethod.LayerwisePercentile: enums.LayerWiseMethod.LayerWisePercentile,
    enums.CalibMethod.MinMSE: enums.ExtendedCalibrationMethod.MinMSE,
}
_SHIFTED: Mapping[enums.CalibMethod, Any] = {
    enums.CalibMethod.MinMax: enums.PowerOfTwoMethod.NonOverflow,
    enums.CalibMethod.MinMSE: enums.PowerOfTwoMethod.MinMSE,
}
_INTEGERS = (specs.Int8, specs.UInt8, specs.Int16, specs.UInt16)
_NATIVE = {specs.Int8: enums.QuantType.QInt8, specs.UInt8: enums.QuantType.QUInt8}
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
    check_config(config, QConfig)
    moving, stored = config.global_config.input_tensors, config.global_config.weight
    if moving is None or stored is None:
        raise QuarkConfigError(
            "The global config needs specs for inputs and weights.",
            observed=config.global_config,
            expected="QLayerConfig(input_tensors=…, weight=…)",
        )
    names, subgraphs = split_excluded(config.exclude)
    native = {moving.kind, stored.kind} <= _NATIVE.keys()
    classic = QuantizationConfig(
        calibrate_method=_method(moving),
        quant_format=enums.QuantFormat.QDQ if native else enums.ExtendedQuantFormat.QDQ,
        activation_type=_NATIVE.get(moving.kind, moving.kind.quant_type),
        weight_type=_NATIVE.get(stored.kind, stored.kind.quant_type),
        nodes_to_exclude=names,
        subgraphs_to_exclude=subgraphs,
        per_channel=stored.quant_granularity is enums.QuantGranularity.Channel,
        use_external_data_format=config.use_external_data_format,
        include_cle=False,
        enable_npu_cnn=moving.scale_type is stored.scale_type is enums.ScaleType.PowerOf2,
        extra_options={**_spec_options(moving, stored), **config.extra_options},
    )
    return with_algorithms(classic, config.algo_config)


def check_config(config: object, *kinds: type) -> None:
    """Refuse what is no config.

    Raises:
        QuarkConfigError: it is of no kind that is taken.
    """
    if not isinstance(config, kinds):
        raise QuarkConfigError(
            "This is not a config.", observed=type(config).__name__, expected="Config(…) or QConfig(…)"
        )


def with_algorithms(config: QuantizationConfig, algorithms: list[specs.AlgoConfig]) -> QuantizationConfig:
    """A copy of the config with the algorithms' flags and options.

    Raises:
        QuarkConfigError: two of them exclude each other.
    """
    tuning = [type(a).__name__ for a in algorithms if isinstance(a, tuple(specs.TUNERS.values()))]
    if len(tuning) > 1:
        raise QuarkConfigError(
            "AdaRound and AdaQuant cannot both tune a model.",
            observed=", ".join(tuning),
            expected="one of them",
        )
    flags: dict[str, Any] = {}
    options = dict(config.extra_options)
    for algorithm in algorithms:
        flags.update(algorithm.flags)
        options.update(algorithm.get_options())
    return replace(config, **flags, extra_options=options)


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


def _method(spec: specs.QTensorConfig) -> Any:
    table = _SHIFTED if spec.scale_type is enums.ScaleType.PowerOf2 else _METHODS
    if spec.calibration_method not in table:
        raise QuarkConfigError(
            "This method does not choose power-of-two scales.",
            observed=spec,
            expected="CalibMethod.MinMSE or CalibMethod.MinMax",
        )
    return table[spec.calibration_method]


def _spec_options(moving: specs.QTensorConfig, stored: specs.QTensorConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for spec, symmetry in ((moving, "ActivationSymmetric"), (stored, "WeightSymmetric")):
        if spec.kind in _INTEGERS:
            options[symmetry] = spec.symmetric
        if spec.kind.block is not None:
            key, attributes = _BLOCKS[spec.kind.block]
            options[key] = dict(attributes)
    if enums.ScaleType.Int16 in (moving.scale_type, stored.scale_type):
        options["Int16Scale"] = True
    return options
