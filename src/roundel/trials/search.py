"""`roundel search`: which values of a recipe's fields suit this model best."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from roundel.errors import RecipeError, did_you_mean
from roundel.measure.scores import Metric
from roundel.model import ModelSource, load_model
from roundel.model.files import write_text
from roundel.model.graph import fingerprint
from roundel.options import DataWords, chosen_recipe, fixing, recipe_changes, takes_data_words
from roundel.outputs import model_targets, refuse_overwriting
from roundel.plain import Card, counted, to_plain
from roundel.recipe.load import RecipeSource, dump_yaml, load_recipe, preset_key, preset_names, unfolded
from roundel.recipe.settings import Recipe, merge
from roundel.result import QuantizeResult
from roundel.trials.engine import Engine, Question, trying, what_is_read
from roundel.trials.study import PRESET, Sampler, SpaceSource, Study, Trial, read_space
from roundel.types import Listener, Silent
from roundel.work.executors import Executor

_SHOWN = 10
MORE = {
    "size": ("minimize", "bytes of the file"),
    "time": ("minimize", "seconds for making it"),
    "npu": ("maximize", "share of the multiplications that the NPU is predicted to take"),
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SearchResult(Card):
    """What a search has found so far.

    Attributes:
        objectives: names, the metric first.
        best: the best trials first; with several objectives, those that no other is better than in all.
        trials: all that have ended, those of earlier runs among them.
        wanted: how many were asked for.
        recipe: of the best trial; None where every trial was refused.
        reference: the float model's value of the metric.
        judged_on: what the models were judged on.
        study: the file, or 'in memory'.
        options: words for `roundel quantize` that make the best model again.
        result: the best model, where an output was asked for.
    """

    objectives: tuple[str, ...]
    best: tuple[Trial, ...]
    trials: tuple[Trial, ...]
    wanted: int
    recipe: Recipe | None
    reference: float
    judged_on: str
    study: str
    options: str = ""
    result: QuantizeResult | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "objectives": list(self.objectives),
            "metric": self.objectives[0],
            "float": to_plain(self.reference),
            "judged_on": self.judged_on,
            "study": self.study,
            "trials": self.wanted,
            "finished": len(self.trials),
            "best": to_plain(self.best[:_SHOWN]),
            "refused": to_plain([trial for trial in self.trials if trial.reason]),
            "options": self.options,
        }

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        best = self.best[0] if self.best else None
        values = zip(self.objectives, best.values if best else (), strict=False)
        return {
            "study": f"{self.study}, {len(self.trials)} of {counted(self.wanted, 'trial')}",
            "best": ", ".join(f"{name} {value:.6g}" for name, value in values) or "none",
            "with": ", ".join(f"{k}={v}" for k, v in best.parameters.items()) if best else "nothing",
            "judged on": f"{self.judged_on}; float {self.objectives[0]} {self.reference:.6g}",
        }


@takes_data_words
def search(
    model: ModelSource,
    output: str | Path | None = None,
    *,
    data: object,
    space: SpaceSource,
    trials: int = 20,
    study: str | Path | None = None,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    save_recipe: str | Path | None = None,
    eval_data: object = None,
    labels: object = None,
    metric: str | Metric | None = None,
    lower_is_better: bool = False,
    decoder: str | None = None,
    also: Sequence[str] = (),
    sampler: Sampler = "tpe",
    seed: int = 0,
    device: str | None = None,
    exclude: Sequence[str] = (),
    fix_inputs: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    listener: Listener | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    **words: Unpack[DataWords],
) -> SearchResult:
    """Try combinations of recipe values, and keep what was found in a file that a later run goes on with.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model. It is never changed.
        output: a file for the best model, made again at the end; its record appears beside it.
        data: calibration data, as `roundel.quantize` takes it, with the words from `samples` to `letterbox`.
        space: by dotted field, or 'preset': a list of values, or {'low', 'high', 'log'}; or words such as
            'weights.method=minmax,mse' and 'calibration.percentile=99..100'; or a YAML file of them.
        trials: how many in all, those of earlier runs in the same study among them.
        study: an SQLite file; a killed search goes on from it. None: the search ends with the process.
        preset: what the values are changes to; a8w8 when neither this nor a recipe is given.
        recipe: the same, as a file, a mapping or a Recipe.
        save_recipe: write the best recipe there.
        eval_data: data to judge by; without it, every fourth item of `data` is held out for that.
        labels: of what judges, as `roundel.evaluate` takes them.
        metric: as `roundel.auto` takes it, or sqnr, which is the default without labels.
        lower_is_better: for a metric of your own that measures an error.
        decoder: of boxes: ssd, yolov5, yolox or yolov8; else as the outputs' shapes say.
        also: further objectives: size, time, npu.
        sampler: tpe learns from the trials before, random does not.
        seed: of the sampler.
        device: the NPU it is for.
        exclude: nodes that stay float.
        fix_inputs: inputs that become constants, as `roundel.quantize` takes them.
        changes: recipe values for every trial, nested as in the file.
        executor: where each trial's calibration runs, from `roundel.executor(…)`; else in this process.
        listener: told about progress.
        on_trial: called with each trial when it has ended.

    Raises:
        DependencyError: Optuna is not installed.
        RoundelError: the space, the study, the model or the data do not fit.
    """
    told, chosen = listener or Silent(), chosen_recipe(preset, recipe)
    metric = "sqnr" if metric is None and labels is None else metric
    question = Question(data, eval_data, labels, metric, lower_is_better, decoder)
    sources = {**what_is_read(model, question), "recipe": chosen, "space": space}
    refuse_overwriting({**model_targets(output), "best recipe": save_recipe, "study": study}, sources)
    wanted = read_space(space)
    base = load_recipe(chosen, recipe_changes(fixing(changes, fix_inputs), words, exclude=exclude))
    directions = _directions(also, "minimize" if lower_is_better else "maximize")
    _check_sampling(trials, sampler)
    # The study first: a missing package or a wrong file should not wait for the float model.
    file = None if study is None else Path(study)
    tried = Study(file, wanted, list(directions.values()), sampler=sampler, seed=seed)
    with trying(model, base, question, told, device, executor) as engine:
        tried.claim(file, _key(engine, base, directions))
        evaluate = _Evaluation(engine, base, tuple(also))
        tried.run(trials, evaluate, told, on_trial or (lambda trial: None))
    found = replace(evaluate.result(tried, file, output), wanted=trials, options=_options(tried.best, chosen))
    if save_recipe is not None and found.recipe is not None:
        write_text(Path(save_recipe), dump_yaml(found.recipe))
    return found


def recipe_of(base: Recipe, parameters: Mapping[str, Any]) -> Recipe:
    """The base with the values of a trial; a preset replaces the base, which then counts for its data only.

    Raises:
        RecipeError: the values do not go together.
    """
    fields = {name: value for name, value in parameters.items() if name != PRESET}
    if PRESET not in parameters:
        return load_recipe(base, fields)
    said = base.model_dump(exclude_defaults=True)
    kept = {section: said.get(section, {}) for section in ("data", "selection", "verify")}
    if base.prepare.fixed_inputs:  # the model's inputs, which are what the samples are made for
        kept["prepare"] = {"fixed_inputs": dict(base.prepare.fixed_inputs)}
    return load_recipe(str(parameters[PRESET]), merge(kept, unfolded(fields)))


@dataclass(frozen=True, slots=True, eq=False)
class _Evaluation:
    """Turns parameters into the values of the objectives."""

    engine: Engine
    base: Recipe
    also: tuple[str, ...]

    def __call__(self, parameters: Mapping[str, Any], told: Listener) -> tuple[float, ...]:
        engine, start = self.engine, time.perf_counter()
        self.make(parameters, engine.path, told)
        figures = {"time": time.perf_counter() - start, "size": float(engine.file_bytes())}
        if "npu" in self.also:
            figures["npu"] = engine.npu_share() or 0.0
        return (engine.judge(told).value, *(figures[name] for name in self.also))

    def make(self, parameters: Mapping[str, Any], path: Path, told: Listener) -> QuantizeResult:
        """The model of a trial."""
        return self.engine.make(path, recipe_of(self.base, parameters), told)

    def result(self, study: Study, file: Path | None, output: str | Path | None) -> SearchResult:
        """What the study holds; the best model is made again where an output is asked for."""
        yardstick, best, made = self.engine.yardstick, study.best, None
        if best and output is not None:
            made = self.make(best[0].parameters, Path(output), Silent())
        return SearchResult(
            objectives=(yardstick.measure.name, *self.also),
            best=best,
            trials=study.trials,
            wanted=len(study.trials),
            recipe=recipe_of(self.base, best[0].parameters) if best else None,
            reference=yardstick.reference.value,
            judged_on=self.engine.judged_on,
            study=str(file) if file is not None else "in memory",
            result=made,
        )


def _check_sampling(trials: int, sampler: str) -> None:
    if trials < 1 or sampler not in ("tpe", "random"):
        raise RecipeError(
            "A search needs at least one trial and a sampler.",
            observed=f"trials={trials}, sampler={sampler}",
            expected="trials 1 or more; sampler tpe or random",
        )


def _directions(also: Sequence[str], metric: str) -> dict[str, str]:
    for name in also:
        if name not in MORE:
            raise RecipeError(
                f"There is no objective '{name}'.",
                where="--also",
                expected=", ".join(f"{key} ({words})" for key, (_, words) in MORE.items()),
                hint=did_you_mean(name, MORE),
            )
    return {"metric": metric, **{name: MORE[name][0] for name in also}}


def _key(engine: Engine, base: Recipe, directions: Mapping[str, str]) -> dict[str, Any]:
    """What the figures of a study depend on."""
    yardstick = engine.yardstick
    return {
        "model": fingerprint(load_model(engine.model).model),
        "recipe": base.model_dump(mode="json", exclude_defaults=True),
        "metric": yardstick.measure.name,
        "float": str(yardstick.reference.value),
        "judged on": engine.judged_on,
        "objectives": list(directions),
        "device": engine.device,
        **({} if engine.decoder is None else {"decoder": engine.decoder}),
    }


def _options(best: Sequence[Trial], recipe: RecipeSource) -> str:
    """The words of a command line that make the best trial's model; none for a recipe that has no name."""
    if not best or not isinstance(recipe, str | Path):
        return ""
    given, words = best[0].parameters, []
    if PRESET not in given:
        words = ["-p" if preset_key(recipe) in preset_names() else "-r", str(recipe)]
    for name, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += ["-p", text] if name == PRESET else ["-s", f"{name}={text}"]
    return shlex.join(words)
