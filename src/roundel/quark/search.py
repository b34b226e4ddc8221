"""Search spaces of the documents' kind: lists of values, ranges, and groups that count under a condition."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from roundel.data.samples import repeatable
from roundel.measure.folders import similarity
from roundel.measure.yardstick import Measure, Yardstick
from roundel.model import load_model
from roundel.model.files import write_text
from roundel.pipeline import quantize
from roundel.quark import enums, specs
from roundel.quark.errors import QuarkConfigError, named
from roundel.quark.presets import ALIGNED
from roundel.quark.qconfig import QConfig
from roundel.quark.translate import translate
from roundel.recipe.settings import Data
from roundel.report.console import terminal
from roundel.stages import open_data
from roundel.trials.study import Choice, Sampler, Span, Study, Trial
from roundel.types import Array, Listener, Silent

Space = Mapping[str, Any]
Params = dict[str, Any]

_CONDITION = "only_if"
_WORDS: Mapping[str, Any] = {
    "calibration_method": enums.CalibMethod,
    "scale_type": enums.ScaleType,
    "quant_granularity": enums.QuantGranularity,
}
_TUNING = ("algorithms", "adaround_params", "adaquant_params")


def get_auto_search_config(config_name: str) -> dict[str, Any]:
    """A search that ships: XINT8_SEARCH, A8W8_SEARCH, A16W8_SEARCH or ADVANCED_SEARCH, free to be changed.

    Raises:
        QuarkConfigError: there is none of that name.
    """
    return {
        "search_space": copy.deepcopy(named("search", config_name, _SHIPPED)),
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
    for name, values in flattened(search_space).items():
        if isinstance(values, Span):
            raise QuarkConfigError("A grid has no ranges.", where=name, expected="a list of values")
    groups = {key: value for key, value in search_space.items() if isinstance(value, Mapping)}
    found = _product({key: value for key, value in search_space.items() if key not in groups})
    for key, group in groups.items():
        lists = {name: values for name, values in group.items() if name != _CONDITION}
        parts: list[Params] = [{key: one} for one in _product(lists)]
        found = [
            {**config, **copy.deepcopy(part)}
            for config in found
            for part in (parts if _holds(group[_CONDITION], config) else [{}])
        ]
    return found


def _product(lists: Space) -> list[Params]:
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def flattened(search_space: Space) -> dict[str, Choice | Span]:
    """The space as a study takes it: 'group.key' for what stands in groups.

    Raises:
        QuarkConfigError: something is neither a list, a range nor a group with a condition.
    """
    flat: dict[str, Choice | Span] = {}
    for key, value in search_space.items():
        named_values = {key: value}
        if isinstance(value, Mapping):
            if not isinstance(value.get(_CONDITION), str | Mapping):
                raise QuarkConfigError(
                    "A group of a search space says when it counts.",
                    where=key,
                    expected=f"'{_CONDITION}': 'activation', or '{_CONDITION}': {{'algorithms': 'adaround'}}",
                )
            named_values = {f"{key}.{inner}": one for inner, one in value.items() if inner != _CONDITION}
        for name, values in named_values.items():
            flat[name] = _range(name, values) if isinstance(values, Mapping) else _choice(name, values)
    return flat


def assembled(search_space: Space, parameters: Mapping[str, Any]) -> Params:
    """What a study has chosen, in the form of the space; groups whose condition fails are left out."""
    groups = {key: value for key, value in search_space.items() if isinstance(value, Mapping)}
    found = {key: parameters[key] for key in search_space if key not in groups}
    for key, value in groups.items():
        if _holds(value[_CONDITION], found):
            found[key] = {inner: parameters[f"{key}.{inner}"] for inner in value if inner != _CONDITION}
    return found


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
    algorithms: list[specs.AlgoConfig] = []
    tuner = given.pop("algorithms", None)
    options = {name: given.pop(f"{name}_params", {}) for name in specs.TUNERS}
    if tuner is not None:
        kind, words = named("algorithm", tuner, specs.TUNERS), dict(options[tuner])
        if "NumIterLR" in words:  # one pair, so that they change together
            words["num_iterations"], words["learning_rate"] = words.pop("NumIterLR")
        algorithms.append(kind(**words))
    equalize, steps = given.pop("cle_algo", None), given.pop("cle_params", {})
    if equalize is not None:
        algorithms.append(specs.CLEConfig(**steps))
    layer = specs.QLayerConfig(input_tensors=activation, weight=weight)
    return QConfig(layer, algo_config=algorithms, **given)


def _spec(name: Any, params: Mapping[str, Any], where: str) -> specs.QTensorConfig:
    spec = named("spec", name, specs.SPECS, where)
    words = dict(params)
    for key, kind in _WORDS.items():
        if isinstance(words.get(key), str):
            members = {member.name.casefold(): member for member in kind}
            words[key] = named(key, words[key].casefold(), members, f"{where}_params")
    return spec(**words)


def _holds(condition: Any, config: Params) -> bool:
    if isinstance(condition, str):
        return config.get(condition) is not None
    return all(config.get(key) == value for key, value in condition.items())


def _choice(key: str, values: Any) -> Choice:
    if not isinstance(values, list | tuple) or not values:
        what = "A field of a search space is a list of values."
        raise QuarkConfigError(what, where=key, observed=repr(values)[:120])
    try:
        return Choice.of(values)
    except TypeError as error:
        raise QuarkConfigError(
            "The values of a search space are plain: texts, numbers, lists.", where=key, observed=error
        ) from error


def _range(key: str, words: Mapping[str, Any]) -> Choice | Span:
    kind = {"int": int, "float": float}.get(words.get("type", ""))
    if kind is None or not {"low", "high"} <= set(words):
        raise QuarkConfigError(
            "A range has a type and two ends.",
            where=key,
            observed=json.dumps(dict(words), default=str)[:120],
            expected="{'type': 'int' or 'float', 'low': …, 'high': …, and maybe 'step' or 'log'}",
        )
    low, high = kind(words["low"]), kind(words["high"])
    if isinstance(low, int) and isinstance(high, int) and "step" in words:
        return Choice.of(range(low, high + 1, int(words["step"])))
    return Span(low, high, bool(words.get("log", False)))


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


_FLOAT_SCALE = {key: [value] for key, value in ALIGNED.items()}
_RANGES = ["MinMax", "Percentile", "LayerwisePercentile"]
_SHIPPED: Mapping[str, Params] = {
    "XINT8_SEARCH": _shipped("XInt8Spec", "XInt8Spec", ["MinMSE"], 20000),
    "A8W8_SEARCH": _shipped("Int8Spec", "Int8Spec", _RANGES, 20000, **_FLOAT_SCALE),
    "A16W8_SEARCH": _shipped(
        "Int16Spec", "Int8Spec", _RANGES[:2], 20000, **_FLOAT_SCALE, AlignEltwiseQuantType=[True]
    ),
    "ADVANCED_SEARCH": _shipped("Int8Spec", "Int8Spec", _RANGES, 30000),
}


_USUAL = get_auto_search_config("ADVANCED_SEARCH")
# Of a search whose config does not come from there.
_OPTIONS = {**_USUAL, "two_stage_search": False, "study_storage_db": None, "load_study_if_exists": False}
_IDLE = {
    "n_jobs": "one model is made at a time, on all cores",
    "temp_dir": "nothing is left outside output_dir",
    "study_name": "a study's file holds one study",
}
_SAMPLERS: Mapping[str, Sampler] = {"TPE": "tpe", "Random": "random", "Grid": "tpe"}
_GRID = "Grid"


def _l1(wanted: Array, found: Array) -> float:
    return float(np.abs(np.asarray(found, np.float64) - wanted).sum())


def _ssim(wanted: Array, found: Array) -> float:
    value = similarity(wanted, found).ssim
    if value is None:
        raise QuarkConfigError("The outputs are not pictures.", where="search_metric ssim")
    return value


# By name: the distance or likeness of two outputs, and whether less is better.
_METRICS: Mapping[str, Measure] = {
    name: Measure(name, words, lower=lower, share=False, pair=pair)
    for name, words, lower, pair in (
        ("L2", "length of the difference", True, lambda a, b: similarity(a, b).l2),
        ("L1", "sum of absolute differences", True, _l1),
        ("cos", "cosine of the angle", False, lambda a, b: similarity(a, b).cosine),
        ("psnr", "peak signal to noise, in dB", False, lambda a, b: similarity(a, b).psnr_db),
        ("ssim", "structural similarity", False, _ssim),
    )
}


class AutoSearchPro:
    """Tries configs from a search space; every model and the best parameters go to `output_dir`.

    Args:
        config: as `get_auto_search_config` gives it, with at least `model_input` and `calib_data_reader`.
            A metric decides itself whether less is better; `direction` is that of an evaluator, whose figure
            for a model is subtracted from the one for the float model.

    Raises:
        QuarkConfigError: a key or a value is not known, or something is missing.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for key in config:
            named("option of a search", key, _OPTIONS)
        self.config: dict[str, Any] = {**_OPTIONS, **config}
        self._space: Params = dict(self.config["search_space"])
        flattened(self._space)
        self._metric = named("search_metric", self.config["search_metric"] or "L2", _METRICS)
        self._sampler = named("search_algo", self.config["search_algo"], _SAMPLERS)
        if self.config["direction"] not in ("minimize", "maximize"):
            raise QuarkConfigError("A search minimizes or maximizes.", observed=self.config["direction"])
        for key in ("model_input", "calib_data_reader"):
            if self.config[key] is None:
                raise QuarkConfigError(f"A search needs '{key}'.", where="AutoSearchPro(config)")
        if self.config["base_framework"] != "onnx":
            raise QuarkConfigError("Searches are of ONNX models.", observed=self.config["base_framework"])
        if self.config["plot_results"]:
            raise QuarkConfigError(
                "A search draws no plots.",
                where="plot_results",
                hint="Look at the study's file with optuna-dashboard.",
            )
        self._output = Path(self.config["output_dir"])

    def run(self) -> dict[str, Any]:
        """Search; gives the best combination, in the form of the space.

        Raises:
            DependencyError: Optuna is not installed.
            RoundelError: the model, the data or every combination is unfit.
        """
        self._output.mkdir(parents=True, exist_ok=True)
        for key, why in _IDLE.items():
            if self.config[key] != _USUAL[key]:
                terminal().print(f"note: {key}: {why}", highlight=False, markup=False)
        work = _Work(self.config, self._metric, self._output)
        space, algorithm = self._space, self.config["search_algo"]
        if self.config["two_stage_search"]:
            calibration = {key: value for key, value in space.items() if key not in _TUNING}
            best = self._stage(work, calibration, _GRID, "calibration_", None)
            if "algorithms" not in space:
                return self._finished(best)
            space = tuning_of(space, best)
        return self._finished(self._stage(work, space, algorithm, "", self.config["n_trials"]))

    def _stage(self, work: _Work, space: Params, algorithm: str, prefix: str, trials: int | None) -> Params:
        """The best combination of one study."""
        names: Mapping[str, Choice | Span]
        chosen: Callable[[Mapping[str, Any]], Params]
        if algorithm == _GRID:
            configs = generate_all_configs(space)[:trials]
            names, trials = {"config": Choice.of(configs)}, len(configs)
            chosen = itemgetter("config")
        else:
            names, chosen = flattened(space), partial(assembled, space)
        database = self.config["study_storage_db"]
        file = None if database is None else self._output / f"{prefix}{database}"
        if file is not None and not self.config["load_study_if_exists"]:
            file.unlink(missing_ok=True)
        study = Study(file, names, [work.direction], sampler=self._sampler)
        study.claim(file, {"model": str(self.config["model_input"]), "metric": self.config["search_metric"]})
        assert trials is not None

        def heard(trial: Trial) -> None:
            values = ", ".join(f"{value:.6g}" for value in trial.values) or f"refused, {trial.reason}"
            terminal().print(f"trial {prefix}{trial.number}: {values}", markup=False, highlight=False)

        numbers = itertools.count(len(study.trials))

        def evaluate(given: Mapping[str, Any], told: Listener) -> tuple[float, ...]:
            return work.evaluate(chosen(given), f"quantized_model_{prefix}{next(numbers)}.onnx")

        study.run(trials, evaluate, Silent(), heard)
        if not study.best:
            reasons = dict.fromkeys(trial.reason for trial in study.trials)
            raise QuarkConfigError("Every combination was refused.", observed="; ".join(reasons)[:300])
        return chosen(study.best[0].parameters)

    def _finished(self, best: Params) -> dict[str, Any]:
        write_text(self._output / "best_params.json", json.dumps(best, indent=2) + "\n")
        return best


class _Work:
    """Makes and judges models: by a measure, or by the script's own evaluator."""

    def __init__(self, config: Mapping[str, Any], measure: Measure, output: Path) -> None:
        self._model, given = config["model_input"], config["eval_data_reader"]
        self._known, self._output = dict[str, tuple[float, ...]](), output
        inputs = load_model(self._model, allow_quantized=True).model
        self._data = judge = repeatable(open_data(inputs, Data(), config["calib_data_reader"]))
        if given is not None and given is not config["calib_data_reader"]:
            judge = repeatable(open_data(inputs, Data(), given))
        self._figure: Callable[[Path], float]
        if config["search_evaluator"] is not None:
            evaluator, self.direction = config["search_evaluator"], config["direction"]
            reference = float(evaluator(self._model))
            self._figure = lambda path: reference - float(evaluator(str(path)))
        else:
            self.direction = "minimize" if measure.lower else "maximize"
            yardstick = Yardstick(self._model, judge, metric=measure)
            self._figure = lambda path: yardstick.judge(path).value

    def evaluate(self, params: Params, name: str) -> tuple[float, ...]:
        """The figure of one combination; one that was computed before is not computed again."""
        key = json.dumps(params, sort_keys=True)
        if key not in self._known:
            path = self._output / name
            told = translate(qconfig_of(params), self._model)
            quantize(self._model, path, recipe=told.recipe, data=self._data)
            self._known[key] = (self._figure(path),)
        return self._known[key]
