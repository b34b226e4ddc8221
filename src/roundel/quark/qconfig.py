"""The newer config, QConfig, and its presets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from roundel.quark.algorithms import KINDS, AdaQuantConfig, AdaRoundConfig, AlgoConfig
from roundel.quark.config import Config, Settings, readable
from roundel.quark.errors import named
from roundel.quark.presets import VINT8_OPTIONS, get_default_config
from roundel.quark.specs import BFloat16Spec, BFP16Spec, Int8Spec, Int16Spec, QLayerConfig, XInt8Spec


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
        global_config: QLayerConfig,
        specific_layer_config: Mapping[QLayerConfig, list[str]] | None = None,
        layer_type_config: Mapping[QLayerConfig | None, list[str]] | None = None,
        exclude: Iterable[Any] | None = None,
        algo_config: Iterable[AlgoConfig] | None = None,
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
        return QConfig(
            QLayerConfig.from_dict(words["global_config"]),
            {QLayerConfig.from_dict(config): names for config, names in layers},
            {config and QLayerConfig.from_dict(config): names for config, names in types},
            words.get("exclude"),
            [_algorithm(given) for given in words.get("algo_config", [])],
            words.get("use_external_data_format", False),
            extra_options=words.get("extra_options"),
        )

    def __str__(self) -> str:
        named = {key: value for key, value in vars(self).items() if value}
        lines = [f"  {key} = {readable(value, 2)}" for key, value in named.items()]
        return "\n".join(["QConfig(", *lines, ")"])


def _algorithm(words: Mapping[str, Any]) -> AlgoConfig:
    return named("algorithm", words.get("name"), KINDS).from_dict(words)


_FORCE = {"ForceQuantizeNoInputCheck": True}
_FLOAT_SCALE = {**_FORCE, "AlignSlice": False, "FoldRelu": True, "AlignConcat": True}
_VINT8 = {**VINT8_OPTIONS, "OptimizeModel": False, "EnableNPUCnn": False}

# name: (activation spec, weight spec, options); the tuned forms of the first three follow from them.
_ROWS: dict[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "XINT8": (XInt8Spec, XInt8Spec, _FORCE),
    "A8W8": (Int8Spec, Int8Spec, _FLOAT_SCALE),
    "A16W8": (Int16Spec, Int8Spec, {**_FLOAT_SCALE, "AlignEltwiseQuantType": True}),
    "VINT8": (XInt8Spec, XInt8Spec, _VINT8),
    "BF16": (BFloat16Spec, BFloat16Spec, _FORCE),
    "BFP16": (BFP16Spec, BFP16Spec, {}),
}
_TUNABLE = ("XINT8", "A8W8", "A16W8")
_TUNERS = {"": None, "_ADAROUND": AdaRoundConfig, "_ADAQUANT": AdaQuantConfig}

QCONFIG_NAMES = tuple(
    f"{name}{suffix}_QCONFIG" for name in _ROWS for suffix in (_TUNERS if name in _TUNABLE else ("",))
)


def qconfig_preset(name: str) -> QConfig | None:
    """The QConfig that a script imports under this name, in a fresh copy; None where there is none."""
    if name not in QCONFIG_NAMES:
        return None
    stem = name.removesuffix("_QCONFIG")
    suffix = next((s for s in _TUNERS if s and stem.endswith(s)), "")
    activation, weight, options = _ROWS[stem.removesuffix(suffix)]
    tuner = _TUNERS[suffix]
    return QConfig(
        QLayerConfig(input_tensors=activation(), weight=weight()),
        algo_config=[tuner()] if tuner else None,
        extra_options=options,
    )
