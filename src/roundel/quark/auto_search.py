"""AutoSearchPro: a study over configs, on the engine of `roundel search`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from roundel.data import Samples
from roundel.data.splitting import repeatable
from roundel.evaluate.predictor import Predictor
from roundel.evaluate.similarity import similarity
from roundel.evidence import open_data
from roundel.model.save import write_text
from roundel.pipeline import quantize
from roundel.quark.errors import QuarkConfigError, expected_names
from roundel.quark.search_space import (
    Params,
    assembled,
    flattened,
    generate_all_configs,
    get_auto_search_config,
    qconfig_of,
    tuning_of,
    without_tuning,
)
from roundel.quark.translate import translate
from roundel.recipe import Data
from roundel.report.console import terminal
from roundel.report.listener import Listener, Silent
from roundel.studies.engine import Sampler, Study, Trial
from roundel.studies.space import Choice, Span

_USUAL = get_auto_search_config("ADVANCED_SEARCH")
_KEYS = tuple(_USUAL)
_IDLE = {
    "n_jobs": "one model is made at a time, on all cores",
    "temp_dir": "nothing is left outside output_dir",
    "study_name": "a study's file holds one study",
}
_SAMPLERS: Mapping[str, Sampler] = {"TPE": "tpe", "Random": "random"}
_GRID = "Grid"
# By name: the distance or likeness of two outputs, and whether less is better.
_METRICS: Mapping[str, tuple[Callable[[Any, Any], float | None], bool]] = {
    "L2": (lambda a, b: similarity(a, b).l2, True),
    "L1": (lambda a, b: float(np.abs(np.asarray(b, np.float64) - a).sum()), True),
    "cos": (lambda a, b: similarity(a, b).cosine, False),
    "psnr": (lambda a, b: similarity(a, b).psnr_db, False),
    "ssim": (lambda a, b: similarity(a, b).ssim, False),
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
            if key not in _KEYS:
                raise QuarkConfigError(f"A search has no option '{key}'.", **expected_names(str(key), _KEYS))
        alone = {"two_stage_search": False, "study_storage_db": None, "load_study_if_exists": False}
        self.config: dict[str, Any] = {**_USUAL, **alone, **config}
        self._space: Params = dict(self.config["search_space"])
        flattened(self._space)
        self._metric = _known("search_metric", self.config["search_metric"] or "L2", _METRICS)
        self._sampler = _known("search_algo", self.config["search_algo"], {**_SAMPLERS, _GRID: "tpe"})
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
        with tempfile.TemporaryDirectory(prefix="roundel-search-") as folder:
            work = _Work(self.config, self._metric, Path(folder), self._output)
            space, algorithm = self._space, self.config["search_algo"]
            if self.config["two_stage_search"]:
                calibration = without_tuning(space)
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
            chosen = _config_of
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

        count = len(study.trials)

        def evaluate(given: Mapping[str, Any], told: Listener) -> tuple[float, ...]:
            nonlocal count
            count += 1
            return work.evaluate(chosen(given), f"quantized_model_{prefix}{count - 1}.onnx")

        study.run(trials, evaluate, Silent(), heard)
        if not study.best:
            reasons = dict.fromkeys(trial.reason for trial in study.trials)
            raise QuarkConfigError("Every combination was refused.", observed="; ".join(reasons)[:300])
        return chosen(study.best[0].parameters)

    def _finished(self, best: Params) -> dict[str, Any]:
        write_text(self._output / "best_params.json", json.dumps(best, indent=2) + "\n")
        return best


class _Work:
    """Makes and judges models."""

    def __init__(self, config: Mapping[str, Any], metric: Any, folder: Path, output: Path) -> None:
        self._model, self._evaluator, self._output = config["model_input"], config["search_evaluator"], output
        self._measure, less = metric
        float_model = Predictor(self._model)
        self._data = repeatable(open_data(float_model.model, Data(), config["calib_data_reader"]))
        given = config["eval_data_reader"]
        self._judge: Samples = self._data
        if given is not None and given is not config["calib_data_reader"]:
            self._judge = repeatable(open_data(float_model.model, Data(), given))
        self._folder, self._known = folder, dict[str, tuple[float, ...]]()
        if self._evaluator is not None:
            self.direction = config["direction"]
            self._reference = float(self._evaluator(self._model))
            return
        self.direction = "minimize" if less else "maximize"
        for index, (_, sample) in enumerate(self._judge.named()):
            arrays: dict[str, Any] = {
                str(i): a for i, a in enumerate(float_model.run(sample, index).values())
            }
            np.savez(folder / f"{index}.npz", **arrays)

    def evaluate(self, params: Params, name: str) -> tuple[float, ...]:
        """The figure of one combination; one that was computed before is not computed again."""
        key = json.dumps(params, sort_keys=True)
        if key not in self._known:
            path = self._output / name
            told = translate(qconfig_of(params), self._model)
            quantize(self._model, path, recipe=told.recipe, data=self._data)
            self._known[key] = (self._figure(path),)
        return self._known[key]

    def _figure(self, path: Path) -> float:
        if self._evaluator is not None:
            return self._reference - float(self._evaluator(str(path)))
        predictor, total, count = Predictor(path), 0.0, 0
        for index, (_, sample) in enumerate(self._judge.named()):
            with np.load(self._folder / f"{index}.npz", allow_pickle=False) as wanted:
                for place, array in enumerate(predictor.run(sample, index).values()):
                    value = self._measure(wanted[str(place)], array)
                    if value is None:
                        raise QuarkConfigError("The outputs are not pictures.", where="search_metric ssim")
                    total, count = total + value, count + 1
        return total / count


def _config_of(given: Mapping[str, Any]) -> Params:
    return dict(given["config"])


def _known(key: str, name: Any, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise QuarkConfigError(f"There is no {key} '{name}'.", **expected_names(str(name), table))
    return table[name]
