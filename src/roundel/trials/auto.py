"""Walk the ladder: try one number format after the other until the accuracy budget holds."""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from roundel.errors import RecipeError, VerifyError
from roundel.measure.scores import Metric
from roundel.measure.sensitivity import sensitivity
from roundel.model.files import write_text
from roundel.model.structure import ModelSource
from roundel.options import DataWords, fixing, recipe_changes, takes_data_words
from roundel.outputs import model_targets, refuse_overwriting
from roundel.recipe.load import load_recipe
from roundel.result import QuantizeResult
from roundel.trials import rungs as ladders
from roundel.trials.budget import Drop, DropUnit, parse_drop, parse_time
from roundel.trials.engine import Engine, OutOfTime, Question, TitledListener, trying, what_is_read
from roundel.trials.rungs import AutoResult, Rung, RungForecast, RungStep, RungVerdict
from roundel.types import Listener, Silent


@takes_data_words
def auto(
    model: ModelSource,
    output: str | Path | None = None,
    *,
    data: object,
    max_drop: str | float = "1%",
    eval_data: object = None,
    labels: object = None,
    metric: str | Metric | None = None,
    lower_is_better: bool = False,
    decoder: str | None = None,
    time: str | float | None = None,
    device: str | None = None,
    rungs: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_subgraph: Sequence[str] = (),
    fix_inputs: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    listener: Listener | None = None,
    on_step: Callable[[RungStep], None] | None = None,
    **words: Unpack[DataWords],
) -> AutoResult:
    """Find the fastest number format that keeps the model within an accuracy budget, and write that model.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model. It is never changed.
        output: the file to write; its record `NAME.json` and the ladder `NAME.auto.json` appear beside it.
        data: calibration data, as `roundel.quantize` takes it, with the words from `samples` to `letterbox`.
        max_drop: '1%' of the float model's metric, '1 point' of a hundred, '1map', a point of the metric map,
            or '0.01' in the metric's own units.
        eval_data: data to judge by; without it, every fourth item of `data` is held out for that.
        labels: of what judges (all of `data` without `eval_data`), as `roundel.evaluate` takes them.
        metric: top1, top5, agreement, fidelity, cosine; of boxes: map, boxf1; 'module:function',
            'file.py:function' or a function;
            without one: top1 with labels, else agreement with the float model for class scores, and fidelity
            for anything else.
        lower_is_better: for a metric of your own that measures an error.
        decoder: of boxes: ssd, yolov5, yolox or yolov8; else as the outputs' shapes say.
        time: '10m', '90s' or seconds: no rung begins, or goes on, beyond it; the first is always finished.
        device: the NPU it is for; rungs whose format it does not take are left out.
        rungs: only these, by name, in the ladder's order.
        exclude: what stays float, as `roundel.quantize` takes it; `include` and `exclude_subgraph` likewise.
        fix_inputs: inputs that become constants, as `roundel.quantize` takes them.
        changes: recipe values for every rung, nested as in the file.
        listener: told about progress.
        on_step: called with each rung when it is done.

    Returns:
        The ladder and the winner; `met` is False where no rung meets the budget, and the best is handed over.
        Where a metric counts rows, each rung says how likely it is to meet the budget on other data.

    Raises:
        RoundelError: something in the model, the data or the options is wrong; nothing was written.
    """
    settings = recipe_changes(fixing(changes, fix_inputs), words, exclude, include, exclude_subgraph)
    budget = parse_drop(max_drop)
    metric = _metric_of(budget, metric)
    question = Question(data, eval_data, labels, metric, lower_is_better, decoder)
    ladder = {} if output is None else {"output's ladder": ladder_path(Path(output))}
    refuse_overwriting({**model_targets(output), **ladder}, what_is_read(model, question))
    start, limit = clock.perf_counter(), parse_time(time)
    deadline = None if limit is None else start + limit
    chosen = ladders.chosen_rungs(rungs)
    patient = rungs is not None or deadline is not None
    recipes = [load_recipe(rung.preset, settings) for rung in chosen]
    out = ladders.out_of_reach(chosen, device)
    target, told = None if output is None else Path(output), listener or Silent()
    with trying(model, recipes[0], question, told, device) as engine:
        walk = _Walk(engine, budget, settings, start, deadline, told, on_step, patient)
        walk.up(chosen, out)
        if walk.best is None:
            raise _nothing(walk.steps)
        found = walk.finished(target)
        if target is not None:
            write_text(ladder_path(target), found.to_json())
        return found


_DISTANT = 0.1  # of the margin: a drop nearer to the budget would ask for a hundred times the rows
_SURELY = 0.05  # a slower format must be so much likelier to be worth it
_WON_BACK = 2.0  # times the budget: of more than that, fine-tuning does not win back enough


def _metric_of(budget: Drop, metric: str | Metric | None) -> str | Metric | None:
    """What is measured: as was said, or as the budget's unit says.

    Raises:
        RecipeError: nothing can be said about the drop of this metric.
    """
    named = metric.strip().casefold() if isinstance(metric, str) else metric
    if budget.unit is DropUnit.MAP and named not in (None, "map"):
        raise RecipeError(
            "The budget is one of mAP, and the metric is another one.",
            where=f"--max-drop '{budget}'",
            observed=f"--metric {metric}",
            expected="--metric map, or a budget in points",
        )
    if named == "sqnr":
        raise RecipeError(
            "The float model's signal to noise is infinite, so nothing can be said about its drop.",
            where="--metric sqnr",
            hint="Use --metric fidelity: 99 % is 20 dB, 99.9 % is 30 dB.",
        )
    return "map" if budget.unit is DropUnit.MAP else metric


def ladder_path(model_path: Path) -> Path:
    """Where the record of the walk goes."""
    return model_path.with_suffix(".auto.json")


@dataclass(slots=True, eq=False)
class _Walk:
    """The state of one walk.

    Attributes:
        engine: makes and judges models.
        budget: what may be lost.
        changes: recipe values for every rung.
        start, deadline: on the clock.
        told: hears about progress.
        heard: called with each rung when it is done.
        patient: whether it may take minutes to fine-tune: the user named that rung, or gave it time.
        steps: the rungs so far.
        best: place and model of the one to hand over.
    """

    engine: Engine
    budget: Drop
    changes: Mapping[str, Any]
    start: float
    deadline: float | None
    told: Listener
    heard: Callable[[RungStep], None] | None
    patient: bool
    steps: list[RungStep] = field(default_factory=list)
    best: tuple[int, QuantizeResult] | None = None

    @property
    def _found(self) -> bool:
        return any(step.likely for step in self.steps)

    def up(self, ladder: Sequence[Rung], out: Mapping[str, str]) -> None:
        """Try the rungs until one is likely to meet the budget, but for those that are out for a reason."""
        forecast = self._forecast()
        for rung in ladder:
            if self._found and not self._faster(rung):
                continue
            why = out.get(rung.name) or self._pointless(rung)
            if why is None and self.best is not None:
                why = _too_long(forecast.seconds(rung), self.deadline)
            if why:
                self._note(RungStep.of(rung, RungVerdict.SKIPPED, why))
                continue
            start = clock.perf_counter()
            self._try(rung, forecast.seconds(rung))
            forecast.learn(rung, clock.perf_counter() - start)

    def _faster(self, rung: Rung) -> bool:
        """Whether it would run faster than what meets the budget, and has a chance to meet it, too."""
        assert self.best is not None
        winner = self.steps[self.best[0]].rung
        # Where all of A16W8 meets the budget, a part of it may do.
        return winner == "a16w8" if rung.mixed else rung.torch and not winner.startswith("xint8")

    def finished(self, target: Path | None) -> AutoResult:
        """The result, written where it was asked for."""
        assert self.best is not None
        index, result = self.best
        yardstick, step = self.engine.yardstick, self.steps[index]
        assert step.drop is not None
        verdict = RungVerdict.CHOSEN if step.likely else RungVerdict.BEST
        rows = self._rows_to_tell(step) if step.verdict is RungVerdict.UNDECIDED else None
        self.steps[index] = replace(step, verdict=verdict)
        if target is not None:
            result.save(target)
        result = replace(result, path=target)
        return AutoResult(
            met=self.budget.allows(step.drop),
            steps=tuple(self.steps),
            metric=yardstick.measure.name,
            metric_words=yardstick.measure.words,
            reference=yardstick.reference.value,
            max_drop=str(self.budget),
            judged_on=self.engine.judged_on,
            result=result,
            path=target,
            seconds=clock.perf_counter() - self.start,
            notes=tuple(self._notes()),
            rows_to_tell=rows,
        )

    def _rows_to_tell(self, step: RungStep) -> int | None:
        """How many rows would leave no doubt, were the drop what it seems; None where no number does."""
        assert step.drop is not None
        distance = abs(self.budget.amount - step.drop)
        if not step.margin or distance < _DISTANT * step.margin:
            return None
        return math.ceil(self.engine.yardstick.rows * (step.margin / distance) ** 2)

    def _try(self, rung: Rung, expected: float) -> None:
        """Make and judge a rung's model, or its models one after the other."""
        start = clock.perf_counter()
        # Whatever the time, the first model is finished: there must be something to hand over.
        told = TitledListener(self.told, rung.name, None if self.best is None else self.deadline)
        try:
            for name, title, changes in self._variants(rung, told):
                self._judge(replace(rung, name=name, title=title), changes, told, (start, expected))
                start = clock.perf_counter()
                if self.steps[-1].likely:
                    return
        except OutOfTime:
            why = "time was over before it was done"
        except VerifyError as error:
            why = f"its model is not legal: {error.what}"
        else:
            return
        self._note(RungStep.of(rung, RungVerdict.STOPPED, why, seconds=clock.perf_counter() - start))

    def _variants(self, rung: Rung, told: Listener) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        if not rung.mixed:
            yield rung.name, rung.title, self.changes
            return
        engine, changes = self.engine, self.changes
        ranking = sensitivity(
            engine.model, preset=rung.preset, data=engine.learn, changes=changes, listener=told
        )
        for mixture in ladders.grown(ranking.layers, changes):
            count = f"{mixture.layers} of {mixture.of} layers in A16W8"
            yield f"mixed {mixture.layers}/{mixture.of}", count, mixture.changes

    def _judge(
        self, rung: Rung, changes: Mapping[str, Any], told: Listener, times: tuple[float, float]
    ) -> None:
        engine, yardstick, (start, expected) = self.engine, self.engine.yardstick, times
        stats = engine.folder / f"{rung.family}.stats" if rung.family in ("xint8", "float") else None
        result = engine.make(engine.path, rung.preset, told, changes=changes, stats=stats)
        found = engine.judge(told)
        reference = yardstick.reference.value
        lost = self.budget.of(reference, found.value, lower=yardstick.measure.lower)
        margin = None if found.margin is None else abs(self.budget.of(reference, reference - found.margin))
        step = RungStep.of(
            rung,
            RungVerdict.of(self.budget, lost, margin),
            metric=found.value,
            drop=lost,
            sqnr_db=found.sqnr_db,
            npu_share=engine.npu_share(),
            file_bytes=engine.file_bytes(),
            seconds=clock.perf_counter() - start,
            forecast=expected,
            margin=margin,
            probability=self.budget.probability(lost, margin),
            changes=changes,
        )
        self._remember(step, result)
        self._note(step)

    def _remember(self, step: RungStep, result: QuantizeResult) -> None:
        """Keep the model that is handed over if nothing better comes."""
        before = None if self.best is None else self.steps[self.best[0]]
        if before is not None and not step.likely and (before.likely or not self._better(step, before)):
            return
        self.best = (len(self.steps), replace(result, path=None))

    def _better(self, step: RungStep, before: RungStep) -> bool:
        """Whether a slower rung comes so much nearer that it is worth it; neither is likely to be enough."""
        assert step.metric is not None
        assert before.metric is not None
        if step.probability is None or before.probability is None or step.verdict is RungVerdict.FAILS:
            return self.engine.yardstick.measure.better(step.metric, before.metric)
        return step.probability > before.probability + _SURELY

    def _note(self, step: RungStep) -> None:
        self.steps.append(step)
        if self.heard is not None:
            self.told.close()
            self.heard(step)

    def _pointless(self, rung: Rung) -> str | None:
        """Why a rung cannot help, or not as much as it costs."""
        tried = {step.rung: step for step in self.steps if step.drop is not None and not step.likely}
        if rung.mixed and "a16w8" in tried:
            sure = tried["a16w8"].verdict is RungVerdict.FAILS
            return f"A16W8 everywhere {'does not' if sure else 'is not likely to'} meet the budget either"
        lost = tried["xint8"].drop if rung.torch and "xint8" in tried else None
        if lost is not None and not self.budget.allows(lost / _WON_BACK):
            return f"XINT8 loses {self.budget.words(lost)}: too much for fine-tuning to win back"
        if rung.torch and not self.patient:
            return f"takes minutes; --time 20m, or --rungs {rung.name}, has it tried"
        return None

    def _forecast(self) -> RungForecast:
        yardstick, learn = self.engine.yardstick, self.engine.learn
        one = yardstick.reference.seconds / max(yardstick.samples, 1)
        learned = learn.count if learn.count is not None else sum(1 for _ in learn)
        return RungForecast(one * learned, yardstick.reference.seconds)

    def _notes(self) -> Iterator[str]:
        yardstick, budget = self.engine.yardstick, self.budget
        step = yardstick.resolution
        if step is not None and budget.of(1.0, 1.0 - step) > budget.amount > 0:
            yield (
                f"{yardstick.rows} rows judge, so {yardstick.measure.name} moves in steps of {step:.2%}:"
                f" a budget of {budget} cannot be told from none; more evaluation data would tell"
            )
        if self.engine.learn.description.get("random"):
            yield "judged on random data: the figures mean nothing for real inputs"


def _too_long(needed: float, deadline: float | None) -> str | None:
    """Why a rung that takes so many seconds does not fit into what is left of the time."""
    if deadline is None:
        return None
    left = deadline - clock.perf_counter()
    if left <= 0:
        return "time is over"
    return f"would take about {needed:.0f} s, {left:.0f} s are left" if needed > left else None


def _nothing(steps: Sequence[RungStep]) -> RecipeError:
    reasons = dict.fromkeys(f"{step.rung}: {step.reason}" for step in steps)
    return RecipeError(
        "No rung of the ladder could be tried.",
        observed="; ".join(reasons),
        hint="Choose another device, or other rungs.",
    )
