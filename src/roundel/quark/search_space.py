"""Search spaces of the documents' kind: lists of values, ranges, and groups that count under a condition."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from roundel.errors import did_you_mean
from roundel.quark import enums, specs
from roundel.quark.algorithms import AdaQuantConfig, AdaRoundConfig, AlgoConfig, CLEConfig
from roundel.quark.errors import QuarkConfigError, expected_names
from roundel.quark.qconfig import QConfig
from roundel.quark.specs import QLayerConfig, QTensorConfig
from roundel.studies.space import Choice, Span

Space = Mapping[str, Any]
Params = dict[str, Any]

_CONDITION = "only_if"
_SPECS = ("XInt8Spec", "Int8Spec", "UInt8Spec", "Int16Spec", "UInt16Spec", "BFloat16Spec", "BFP16Spec")
_WORDS = {
    "calibration_method": enums.CalibMethod,
    "scale_type": enums.ScaleType,
    "quant_granularity": enums.QuantGranularity,
}
_TUNERS: Mapping[str, type[AlgoConfig]] = {"adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
_TUNING = ("algorithms", "adaround_params", "adaquant_params")


def get_auto_search_config(config_name: str) -> dict[str, Any]:
    """A search that ships: XINT8_SEARCH, A8W8_SEARCH, A16W8_SEARCH or ADVANCED_SEARCH, free to be changed.

    Raises:
        QuarkConfigError: there is none of that name.
    """
    if config_name not in _SHIPPED:
        raise QuarkConfigError(
            f"There is no search '{config_name}'.", **expected_names(config_name, _SHIPPED)
        )
    return {
        "search_space": copy.deepcopy(_SHIPPED[config_name]),
        "n_trials": 20,
        "n_jobs": 1,
        "output_dir": "./output",
        "temp_dir": "./temp_dir",
        "search_algo": "TPE",
        "search_evaluator": None,
        "search_metric": None,
        "direction": "minimize",
        "base_framework": "onnx",
        "study_storage_db": "auto_search.db",
        "load_study_if_exists": True,
        "study_name": "AutoSearch",
        "model_input": None,
        "calib_data_reader": None,
        "eval_data_reader": None,
        "two_stage_search": True,
        "plot_results": False,
    }


def generate_all_configs(search_space: Space) -> list[Params]:
    """Every combination of a space without ranges, groups only where their condition holds.

    Raises:
        QuarkConfigError: the space has a range, or a group without a condition.
    """
    plain = {key: value for key, value in search_space.items() if not isinstance(value, Mapping)}
    for key, value in flattened(search_space).items():
        if isinstance(value, Span):
            raise QuarkConfigError("A grid has no ranges.", where=key, expected="a list of values")
    found = []
    for values in itertools.product(*(_listed(key, value) for key, value in plain.items())):
        found += _with_groups(dict(zip(plain, values, strict=True)), search_space)
    return found


def flattened(search_space: Space) -> dict[str, Choice | Span]:
    """The space as a study takes it: 'group.key' for what stands in groups.

    Raises:
        QuarkConfigError: something is neither a list, a range nor a group with a condition.
    """
    flat: dict[str, Choice | Span] = {}
    for key, value in search_space.items():
        if not isinstance(value, Mapping):
            flat[key] = _choice(key, _listed(key, value))
            continue
        _condition(key, value)
        for inner, values in value.items():
            if inner != _CONDITION:
                name = f"{key}.{inner}"
                flat[name] = _range(name, values) if isinstance(values, Mapping) else _choice(name, values)
    return flat


def assembled(search_space: Space, parameters: Mapping[str, Any]) -> Params:
    """What a study has chosen, in the form of the space; groups whose condition fails are left out."""
    found: Params = {}
    for key, value in search_space.items():
        if not isinstance(value, Mapping):
            found[key] = parameters[key]
        elif _holds(_condition(key, value), found):
            found[key] = {inner: parameters[f"{key}.{inner}"] for inner in value if inner != _CONDITION}
    return found


def without_tuning(search_space: Space) -> Params:
    """The part that is about calibration."""
    return {key: value for key, value in search_space.items() if key not in _TUNING}


def tuning_of(search_space: Space, best: Params) -> Params:
    """The part that is about fine-tuning, around a calibration that is settled."""
    settled: Params = {}
    for key, value in best.items():
        if isinstance(value, Mapping):
            group = {inner: [one] for inner, one in value.items()}
            settled[key] = {**group, _CONDITION: search_space[key][_CONDITION]}
        else:
            settled[key] = [value]
    return {**settled, **{key: search_space[key] for key in _TUNING if key in search_space}}


def qconfig_of(params: Params) -> QConfig:
    """The config that a combination stands for.

    Raises:
        QuarkConfigError: a name is not known.
    """
    given = dict(params)
    activation = _spec(given.pop("activation", None), given.pop("activation_params", {}), "activation")
    weight = _spec(given.pop("weight", None), given.pop("weight_params", {}), "weight")
    algorithms: list[AlgoConfig] = []
    tuner = given.pop("algorithms", None)
    options = {name: given.pop(f"{name}_params", {}) for name in _TUNERS}
    if tuner is not None:
        if tuner not in _TUNERS:
            raise QuarkConfigError(f"There is no algorithm '{tuner}'.", **expected_names(str(tuner), _TUNERS))
        algorithms.append(_TUNERS[tuner](**_split(options[tuner])))
    equalize, steps = given.pop("cle_algo", None), given.pop("cle_params", {})
    if equalize is not None:
        algorithms.append(CLEConfig(**steps))
    return QConfig(
        QLayerConfig(input_tensors=activation, weight=weight),
        specific_layer_config=given.pop("specific_layer_config", None),
        layer_type_config=given.pop("layer_type_config", None),
        exclude=given.pop("exclude", None),
        use_external_data_format=bool(given.pop("use_external_data_format", False)),
        algo_config=algorithms,
        **given,
    )


def _spec(name: Any, params: Mapping[str, Any], where: str) -> QTensorConfig:
    if name not in _SPECS:
        raise QuarkConfigError(
            f"There is no spec '{name}'.",
            where=where,
            expected=", ".join(_SPECS),
            hint=did_you_mean(str(name), _SPECS),
        )
    words = dict(params)
    for key, kind in _WORDS.items():
        if isinstance(words.get(key), str):
            words[key] = _member(kind, words[key], f"{where}_params.{key}")
    made = getattr(specs, str(name))(**words)
    assert isinstance(made, QTensorConfig)
    return made


def _member(kind: Any, name: str, where: str) -> Any:
    names = {member.name.casefold(): member for member in kind}
    if name.casefold() not in names:
        raise QuarkConfigError(
            f"There is no '{name}'.", where=where, **expected_names(name, [m.name for m in kind])
        )
    return names[name.casefold()]


def _split(params: Mapping[str, Any]) -> dict[str, Any]:
    """Iterations and rate may be given as one pair, so that they change together."""
    words = dict(params)
    if "NumIterLR" in words:
        words["num_iterations"], words["learning_rate"] = words.pop("NumIterLR")
    return words


def _with_groups(base: Params, search_space: Space) -> list[Params]:
    found = [base]
    for key, value in search_space.items():
        if isinstance(value, Mapping):
            found = [more for config in found for more in _with_group(config, key, value)]
    return found


def _with_group(config: Params, key: str, group: Mapping[str, Any]) -> Iterator[Params]:
    if not _holds(_condition(key, group), config):
        yield config
        return
    inner = {name: values for name, values in group.items() if name != _CONDITION}
    for values in itertools.product(*inner.values()):
        yield {**config, key: dict(zip(inner, values, strict=True))}


def _holds(condition: Any, config: Params) -> bool:
    if isinstance(condition, str):
        return config.get(condition) is not None
    return all(config.get(key) == value for key, value in condition.items())


def _condition(key: str, group: Mapping[str, Any]) -> Any:
    condition = group.get(_CONDITION)
    if not isinstance(condition, str | Mapping):
        raise QuarkConfigError(
            "A group of a search space says when it counts.",
            where=key,
            expected=f"'{_CONDITION}': 'activation', or '{_CONDITION}': {{'algorithms': 'adaround'}}",
        )
    return condition


def _listed(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise QuarkConfigError(
            "A field of a search space is a list of values.", where=key, observed=repr(value)[:120]
        )
    return list(value)


def _choice(key: str, values: Any) -> Choice:
    try:
        return Choice.of(_listed(key, values))
    except TypeError as error:
        raise QuarkConfigError(
            "The values of a search space are plain: texts, numbers, lists.", where=key, observed=error
        ) from error


def _range(key: str, words: Mapping[str, Any]) -> Choice | Span:
    if words.get("type") not in ("int", "float") or not {"low", "high"} <= set(words):
        raise QuarkConfigError(
            "A range has a type and two ends.",
            where=key,
            observed=json.dumps(dict(words), default=str)[:120],
            expected="{'type': 'int' or 'float', 'low': …, 'high': …, and maybe 'step' or 'log'}",
        )
    low, high = words["low"], words["high"]
    if words["type"] == "int":
        if "step" in words:
            return Choice.of(range(int(low), int(high) + 1, int(words["step"])))
        return Span(int(low), int(high), bool(words.get("log", False)))
    return Span(float(low), float(high), bool(words.get("log", False)))


def _shipped(activation: str, weight: str, methods: list[str], most: int, **more: Any) -> Params:
    steps = {"type": "int", "low": 3000, "high": most, "step": 3000}
    both = [True] if activation == "XInt8Spec" else [True, False]
    return {
        "activation": [activation],
        "activation_params": {"symmetric": both, "calibration_method": methods, _CONDITION: "activation"},
        "weight": [weight],
        "weight_params": {"symmetric": [True], "quant_granularity": ["Tensor"], _CONDITION: "weight"},
        "cle_algo": ["cle", None],
        "cle_params": {"cle_steps": [-1, 1], _CONDITION: {"cle_algo": "cle"}},
        "algorithms": ["adaround", "adaquant"],
        "adaquant_params": {
            "num_iterations": dict(steps),
            "learning_rate": {"type": "float", "low": 1e-6, "high": 1e-4, "log": True},
            "data_size": [1000],
            "batch_size": [2],
            "early_stop": [True],
            _CONDITION: {"algorithms": "adaquant"},
        },
        "adaround_params": {
            "num_iterations": dict(steps),
            "learning_rate": {"type": "float", "low": 1e-2, "high": 1e-1, "log": True},
            _CONDITION: {"algorithms": "adaround"},
        },
        **more,
    }


_FLOAT_SCALE = {"AlignSlice": [False], "FoldRelu": [True], "AlignConcat": [True]}
_SHIPPED: Mapping[str, Params] = {
    "XINT8_SEARCH": _shipped("XInt8Spec", "XInt8Spec", ["MinMSE"], 20000),
    "A8W8_SEARCH": _shipped(
        "Int8Spec", "Int8Spec", ["MinMax", "Percentile", "LayerwisePercentile"], 20000, **_FLOAT_SCALE
    ),
    "A16W8_SEARCH": _shipped(
        "Int16Spec", "Int8Spec", ["MinMax", "Percentile"], 20000, **_FLOAT_SCALE, AlignEltwiseQuantType=[True]
    ),
    "ADVANCED_SEARCH": _shipped(
        "Int8Spec", "Int8Spec", ["MinMax", "Percentile", "LayerwisePercentile"], 30000
    ),
}
