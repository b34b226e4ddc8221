"""Rank a model's layers by what quantizing them costs at its outputs, in time linear in their number."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from roundel import stages
from roundel.errors import RecipeError
from roundel.improve.memory import run_key
from roundel.improve.probe import QuantizerProbe
from roundel.measure import layers
from roundel.model import LoadedModel, ModelSource
from roundel.model.files import Portable
from roundel.model.session import Lanes
from roundel.options import DataWords, chosen_recipe, fixing, no_data, recipe_changes, takes_data_words
from roundel.recipe.load import RecipeSource, load_recipe, unfolded
from roundel.recipe.settings import Recipe, merge
from roundel.remembered import Remembered
from roundel.state import Context, State
from roundel.types import Arrays, Listener, heard_by
from roundel.work.checkpoints import open_store
from roundel.work.executors import Executor, Ready, Work, mapped


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """What these quantizers alone do to the outputs.

    Attributes:
        number: its place.
        on: tensors whose quantizers are on.
        count: how many samples to look at.
    """

    number: int
    on: tuple[str, ...]
    count: int

    @property
    def digest(self) -> str:
        """Of the question."""
        return hashlib.blake2b(repr((self.on, self.count)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class _Board:
    """A calibrated model that answers questions, wherever they are worked on.

    Attributes:
        state: the prepared float model, how each tensor is stored, and samples.
        tensors: those that can be switched.
    """

    state: State
    tensors: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """On its way to another process: the model in plain bytes, once, and what a probe needs beside it."""
        stored = {name: getattr(self.state, name) for name in _STORED}
        samples = {"inputs": list(self.state.inputs), "outputs": list(self.state.outputs)}
        return _arrived, (Portable.of(self.state.model), stored | samples, self.tensors)

    def answers(self, step: str, questions: Iterable[ProbeQuestion], work: Work) -> Iterator[float]:
        """The error of each question, in their order: power over that of the outputs.

        Args:
            step: the name under which the answers are remembered.
            questions: any number of them.
            work: where, and what is remembered.
        """
        state = self.state
        key = partial(run_key, state.model, state, state.inputs, state.recipe)
        errors = (float(arrays["error"]) for _, arrays in mapped(work, self, questions, step, key))
        return (math.inf if math.isnan(error) else error for error in errors)

    def open(self, cores: int) -> Ready[ProbeQuestion]:
        state, groups = self.state, [(name,) for name in self.tensors]
        parts = state, groups, state.recipe, state.inputs, state.outputs
        probe = QuantizerProbe(state.model, *parts, lanes=Lanes(cores, 1))

        def error(question: ProbeQuestion) -> Arrays:
            """Power of the error over that of the outputs, which count alike."""
            close = probe.error(dict.fromkeys(question.on), question.count)
            return {"error": np.array(close.noise / close.signal if close.signal > 0 else 0.0)}

        return Ready(error)


_STORED = ("recipe", "plan", "params", "float_scales", "values", "codes", "reads")


def _arrived(portable: Portable, stored: dict[str, Any], tensors: tuple[str, ...]) -> _Board:
    model = portable.model()
    return _Board(State(model=model, loaded=LoadedModel(model, None, None, 0, ()), **stored), tensors)


_CHECKED = 32  # samples that the worst are checked with, together
_WORTH = 0.01  # share of the costs of all layers below which nothing is proposed


@takes_data_words
def sensitivity(
    model: ModelSource,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    data: object = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    fix_inputs: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    look: int = 8,
    worst: int = 5,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **words: Unpack[DataWords],
) -> layers.Sensitivity:
    """Rank the layers by what quantizing them costs at the output, and say what would help.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model. It is never changed. Of a quantized model that
            has its record beside it, the run's float model, recipe and data are taken.
        preset: a preset's name, with static integers; a8w8 when neither this nor a recipe is given.
        recipe: a recipe file, a mapping or a Recipe.
        data: calibration data, as `roundel.quantize` takes it, with the words from `samples` to `letterbox`.
        exclude: nodes that stay float, as `roundel.quantize` takes them.
        include: only these are quantized.
        fix_inputs: inputs that become constants, as `roundel.quantize` takes them.
        changes: recipe values that differ from the recipe's own, nested as in the file.
        look: samples that each layer is measured with.
        worst: how many layers, at most, get proposals, whose effect together is measured as well.
        executor: where it runs, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done: shards of the samples, and layers.
        resume: go on from the checkpoint where there is one; the result is that of a run without a break.
        listener: told about progress.

    Raises:
        RoundelError: something in the model, the data or the recipe is wrong.
    """
    if look < 1 or worst < 1:
        raise RecipeError(
            "Sensitivity needs samples and layers to look at.",
            observed=f"look={look}, worst={worst}",
            expected="1 or more of each",
        )
    start = time.perf_counter()
    known = Remembered.beside([model])
    if known.record:  # of a finished run: the layers are those of its float model
        model, data = known.float_model(), data if data is not None else known.data()
        recipe = known.recipe if preset is None and recipe is None else recipe
    told_before = known.settings(None, words).model_dump(exclude_defaults=True)
    before = merge({"data": told_before} if told_before else {}, unfolded(changes or {}))
    tree = recipe_changes(fixing(before, fix_inputs), None, exclude, include)
    settings = load_recipe(chosen_recipe(preset, recipe), tree)
    if data is None:
        raise no_data()
    work = Work(executor, open_store(checkpoint, resume=resume))
    with heard_by(listener) as told:
        return _measured(model, settings, data, (look, worst), told, start, work)


def _measured(
    source: ModelSource,
    settings: Recipe,
    data: object,
    counts: tuple[int, int],
    told: Listener,
    start: float,
    work: Work,
) -> layers.Sensitivity:
    plain = calibrated_only(settings, max(counts[0], _CHECKED))
    told.step("load and prepare")
    seen = stages.collect(stages.plan(stages.prepare(source, plain)), data, Context(told, work))
    state = stages.resolve(seen)
    parts = layers.layers_of(state.model, state)
    if not parts:
        raise RecipeError(
            "Nothing is stored in integers, so that no layer can be measured.",
            where=f"recipe {settings.name}",
            expected="a static recipe of int8 or int16, such as a8w8, and operators that it quantizes",
        )
    board = _Board(state, tuple(name for name in state.params if name in state.plan.tensors))
    costs, by_tensor = _costs(board, parts, counts[0], told, work)

    def widened(layer: layers.StoredLayer) -> bool:
        return layers.widening(layer, costs[layer], state, settings) is not None

    ranked = _ranked(costs, by_tensor, counts[1], widened)
    advised = [layer for layer in ranked[: counts[1]] if costs[layer].left >= _WORTH]
    for layer in advised:
        found = layers.remedies(layer, costs[layer], state.model, state, settings)
        costs[layer] = replace(costs[layer], remedies=found)
    whole = _check(board, advised, costs, told, work)
    head = layers.find_head(state.model, state.plan, state.inputs[: counts[0]])
    if head is not None:
        of_head = (cost.share for cost in costs.values() if set(head.nodes).issuperset(cost.nodes))
        head = replace(head, share=min(1.0, sum(of_head)))
    return layers.Sensitivity(
        model=state.loaded.name,
        recipe=settings.name,
        samples=min(counts[0], len(state.inputs)),
        sqnr_db=layers.cost_db(whole),
        layers=tuple(costs[layer] for layer in ranked),
        together=layers.combined([costs[layer] for layer in advised], settings),
        head=head,
        seconds=time.perf_counter() - start,
        notes=(*seen.notes, *_doubts(settings, state)),
    )


def calibrated_only(recipe: Recipe, samples: int) -> Recipe:
    """The recipe without what improves its result, keeping enough samples.

    Raises:
        RecipeError: the recipe calibrates nothing.
    """
    if recipe.mode != "static":
        raise RecipeError(
            "Sensitivity is of static recipes.",
            where=f"recipe {recipe.name}",
            observed=f"mode {recipe.mode}",
            expected="a static recipe of integers, such as a8w8 or xint8",
        )
    steps = {"finetune": {"algorithm": "none"}, "smooth": {"enabled": False}, "rotate": {"enabled": False}}
    return recipe.merged({"effort": "none", "improve": steps, "verify": {"samples": samples}})


def _costs(
    board: _Board, parts: Sequence[layers.StoredLayer], count: int, told: Listener, work: Work
) -> tuple[dict[layers.StoredLayer, layers.LayerCost], dict[str, float]]:
    """What each layer costs, and what each of their activations does."""
    told.step("measure each layer", len(parts))
    asked = [on for layer in parts for on in (*((name,) for name in layer.activations), layer.weights) if on]
    questions = (ProbeQuestion(n, tuple(on), count) for n, on in enumerate(asked))
    costs = board.answers("layers", questions, work)
    found, by_tensor = [], dict[str, float]()
    for done, layer in enumerate(parts):
        for name in layer.activations:
            by_tensor[name] = next(costs)
        moving = sum(by_tensor[name] for name in layer.activations)
        stored = next(costs) if layer.weights else 0.0
        found.append(layers.LayerCost(layer.name, layer.op, layer.nodes, moving, stored, 0.0))
        told.advance(done + 1)
    total = _total(found)
    shares = (_share(cost.cost, total) for cost in found)
    shared = [replace(cost, share=share, left=share) for cost, share in zip(found, shares, strict=True)]
    return dict(zip(parts, shared, strict=True)), by_tensor


def _total(costs: Iterable[layers.LayerCost]) -> float:
    """The sum that shares are of; a layer that makes the outputs infinite would leave the others none."""
    return sum(cost.cost for cost in costs if math.isfinite(cost.cost)) or 1.0


def _share(cost: float, total: float) -> float:
    return cost / total if math.isfinite(cost) else 1.0


def _ranked(
    costs: dict[layers.StoredLayer, layers.LayerCost],
    by_tensor: Mapping[str, float],
    worst: int,
    widened: Callable[[layers.StoredLayer], bool],
) -> list[layers.StoredLayer]:
    """The costly first, by what is left of their costs once the worst have got the 16 bits that help them.

    What a layer reads gets 16 bits with it, so that the layer before it is cured as well and comes later.
    """
    total = _total(costs.values())
    waiting, cured, first = dict.fromkeys(costs), set[str](), list[layers.StoredLayer]()

    def left(layer: layers.StoredLayer) -> float:
        moving = [by_tensor[name] for name in layer.activations if name not in cured]
        return _share(sum(moving) + costs[layer].weights, total)

    def breaks(layer: layers.StoredLayer) -> bool:
        return not math.isfinite(costs[layer].cost)

    while waiting and len(first) < worst:
        layer = max(waiting, key=lambda one: (breaks(one), left(one)))
        costs[layer] = replace(costs[layer], left=left(layer))
        cured |= set(layer.touched) if widened(layer) else set()
        first.append(layer)
        del waiting[layer]
    for layer in waiting:
        costs[layer] = replace(costs[layer], left=left(layer))
    return [*first, *sorted(waiting, key=lambda one: (not breaks(one), -costs[one].left))]


def _check(
    board: _Board,
    advised: Sequence[layers.StoredLayer],
    costs: dict[layers.StoredLayer, layers.LayerCost],
    told: Listener,
    work: Work,
) -> float:
    """Measure what the proposals for the worst layers win back together; gives the whole model's error."""
    told.step("check the worst", len(advised) + 1)
    left_on, asked = set(board.tensors), [ProbeQuestion(0, board.tensors, _CHECKED)]
    for number, layer in enumerate(advised, 1):
        left_on -= _relieved(layer, costs[layer].remedies[0].kind)
        asked.append(ProbeQuestion(number, tuple(sorted(left_on)), _CHECKED))
    errors = board.answers("together", asked, work)
    whole = next(errors)
    for done, layer in enumerate(advised):
        left = next(errors)
        costs[layer] = replace(costs[layer], won_back=_won(whole, left))
        told.advance(done + 2)
    return whole


def _won(whole: float, left: float) -> float:
    """The share of an error that is gone; all or nothing where it was infinite."""
    if math.isfinite(whole):
        return 1 - left / whole if whole > 0 else 0.0
    return float(math.isfinite(left))


def _relieved(layer: layers.StoredLayer, kind: layers.RemedyKind) -> set[str]:
    """Tensors whose error a remedy takes away: all of it with 16 bits (48 dB less), at most for weights."""
    if kind is layers.RemedyKind.A16W8:
        return set(layer.touched)
    return {*layer.weights, *(layer.activations if kind is layers.RemedyKind.EXCLUDE else ())}


def _doubts(recipe: Recipe, state: State) -> Iterator[str]:
    if recipe.effort != "none":
        yield f"measured after calibration alone; effort {recipe.effort} makes most layers cost less"
    if len(state.params) < len(state.plan.tensors):
        yield "tensors that are not stored in integers were left in float"
