"""What a run will take, before it starts: time, memory and disk, from the graph and one timed sample.

The factors below were measured on convolutional networks and stacks of MatMul; docs/scale.md has forecasts
beside what the runs then took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import onnx_ir as ir

from roundel.calibrate.runner import run_session
from roundel.data import Samples
from roundel.errors import RecipeError
from roundel.improve.moments import parts_of
from roundel.improve.targets import rows_of
from roundel.model.layers import read_layer
from roundel.model.memory import Budget, Footprint, footprint, parse_size, show_size, within
from roundel.model.session import give_memory_back, open_session, save_heap
from roundel.model.structure import ModelSource
from roundel.options import DataWords, chosen_recipe, fixing, recipe_changes, takes_data_words
from roundel.recipe.load import RecipeSource, load_recipe
from roundel.recipe.settings import Recipe
from roundel.stages import most_samples, open_data, prepare
from roundel.types import Scheme
from roundel.work.executors import usable_cores

_STARTED = 150_000_000  # Python with ONNX Runtime, where the system does not tell
_MARGIN = 80_000_000  # libraries that are loaded on the way, and free pieces of the heap
_NODE = 140_000  # bytes of a node in all the graphs that are alive at once
_COPIES = 2.0  # of the weights, in ONNX Runtime's own layouts; one more where codes are unfolded
_HEAPS = 1.7
_TARGETS = 400_000_000  # outputs of layers that the rounding is chosen by, at most
_RATE = 2e10  # multiply-accumulates in a second, before a sample was timed
_NODE_SECONDS = 2e-5  # of one node in one run
_ELEMENT_SECONDS = 7e-9  # of one core, to observe one element
_START_SECONDS, _SETUP_SECONDS = 0.15, 1e-3  # of a run, and of each node: plan, write, check, load
# Of the improving steps, fitted to 27 public models in two formats with 8 and 100 samples (docs/scale.md).
_LAYER_SECONDS = 0.03  # of a layer that is rounded
_RUNS, _RUNS_A_SAMPLE = 170, 1.7  # forward passes: ranges and judging; those that the rounding learns from
_PRODUCT_SECONDS, _CHOICE_SECONDS = 1.8e-11, 8.5e-10
_SQUARE = 30  # products of inputs, of which the factorization takes as long as a choice
_TUNING = 3  # forward passes of an iteration of fine-tuning over all layers: both ways of 2 samples
_LONG_SECONDS, _MOMENT_SECONDS = 15.0, 3.0
_TIMED = 5  # passes


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run is expected to take.

    Attributes:
        seconds: wall time; that of one sample where their number is not known.
        each: seconds of one sample more.
        memory: bytes at its peak, the program itself included, pages of mapped files not.
        least: the least that `max_memory` may be.
        disk: bytes of the file to be written.
        temporary: bytes of temporary files on the way.
        samples: how many it was made for; None where nobody knows.
        timed: whether a sample was run for it.
    """

    seconds: float
    each: float
    memory: int
    least: int
    disk: int
    temporary: int
    samples: int | None
    timed: bool

    @property
    def long(self) -> bool:
        """Whether somebody who waits would like to know."""
        return self.seconds > _LONG_SECONDS

    def __str__(self) -> str:
        time = f"about {_duration(self.seconds)}"
        if self.samples is None:
            time += f" and {self.each:.2g} s for each sample"
        elif self.samples:
            time += f" for {self.samples} samples"
        parts = [time, f"{show_size(self.memory)} of memory", f"a file of {show_size(self.disk)}"]
        if self.temporary:
            parts.append(f"{show_size(self.temporary)} of temporary files")
        return ", ".join(parts)


def _forecast(
    model: ir.Model, facts: Footprint, recipe: Recipe, samples: Samples | None, given: Budget
) -> Forecast:
    """A sample is run only where the graph alone promises more than a moment."""
    count = samples.count if samples is not None else 0
    one, work = facts.macs / _RATE + facts.nodes * _NODE_SECONDS, _rounding(model)
    rough = _seconds(facts, work, recipe, 1 if count is None else count, one)
    timed = samples is not None and rough > _MOMENT_SECONDS
    if timed and samples is not None:
        with within(given):
            one = forward_seconds(model, samples)
    several, more = (_seconds(facts, work, recipe, number, one) for number in (count or 0, (count or 0) + 1))
    return Forecast(
        seconds=more if count is None else several,
        each=more - several,
        memory=_memory(facts, recipe, given),
        least=_memory(facts, recipe, _tightest(facts)),
        disk=_file_bytes(facts, recipe),
        temporary=_temporary(model, facts, recipe, count, given),
        samples=count,
        timed=timed,
    )


def _budget(facts: Footprint, recipe: Recipe, limit: int | None) -> Budget:
    """How a run shares out the memory that it may take.

    Raises:
        RecipeError: it is too little for anything.
    """
    usual = Budget(returns=limit is not None)
    if limit is None or _memory(facts, recipe, usual) <= limit:
        return usual
    tight = _tightest(facts)
    least = _memory(facts, recipe, tight)
    if limit < least:
        raise RecipeError(
            "This run needs more memory than it may take.",
            where="max_memory",
            observed=show_size(limit),
            expected=f"{show_size(least)} or more",
            hint="Allow more, or let the weights lie in a file of their own (-s output.external_data=true).",
        )
    roomy = replace(tight, lean=usual.lean)
    base = roomy if _memory(facts, recipe, roomy) <= limit else tight
    left = limit - _memory(facts, recipe, base)
    # What is kept (samples, outputs, layer values, targets of the rounding) comes in four kinds.
    return replace(base, live=base.live + left // 2, held=base.held + left // 8)


def _tightest(facts: Footprint) -> Budget:
    """One tensor at a time, everything else in files."""
    return Budget(live=max(facts.largest_activation, 1), held=0, lean=0, returns=True)


def _memory(facts: Footprint, recipe: Recipe, given: Budget) -> int:
    """Bytes at the peak under a budget."""
    lean = facts.weights > given.lean
    out = _file_bytes(facts, recipe)
    if lean:
        # Serialising takes the file's size twice, unless its weights go to a file one by one.
        whole = 0 if recipe.output.external_data else 2 * out
        weights = facts.weights - facts.mapped + max(whole, 4 * facts.largest_weight)
    else:
        weights = int(_COPIES * facts.weights) + out
    observed = steps = 0
    if recipe.mode == "static" and recipe.calibration.method != "minmax":
        observed = min(given.live, facts.activations * usable_cores())
        # Without a limit, freed blocks stay in the heaps of the threads that observe.
        observed = observed if given.returns else int(_HEAPS * observed)
    if recipe.mode == "static" and recipe.effort != "none":
        steps = 4 * given.held + facts.solving + 2 * facts.peak
    running = facts.peak + max(observed, steps) + facts.nodes * _NODE
    return _resident() + _MARGIN + weights + running


@dataclass(frozen=True, slots=True)
class _Rounding:
    """What choosing the codes of all layers takes.

    Attributes:
        layers: how many.
        products: of two inputs, for each row that is looked at.
        choices: multiplications behind those.
    """

    layers: int
    products: int
    choices: float


def _rounding(model: ir.Model) -> _Rounding:
    layers, products, choices = 0, 0, 0.0
    for layer in filter(None, map(read_layer, model.graph)):
        groups, outputs, inputs, kernel = layer.blocks(layer.stored).shape
        size = inputs * kernel
        part = -(-size // parts_of(size))
        layers, products = layers + 1, products + groups * size * part
        choices += groups * size * part * (outputs + part / _SQUARE)
    return _Rounding(layers, products, choices)


def _seconds(facts: Footprint, work: _Rounding, recipe: Recipe, count: int, one: float) -> float:
    total = _START_SECONDS + facts.nodes * _SETUP_SECONDS + recipe.verify.samples * one
    if recipe.mode != "static":
        return total + count * one
    minmax = recipe.calibration.method == "minmax"
    observing = 0.0 if minmax else facts.activations / 4 * _ELEMENT_SECONDS
    total += count * (one + observing / usable_cores())
    if recipe.effort != "none":
        learned = min(count, recipe.improve.samples)
        total += work.layers * _LAYER_SECONDS + (_RUNS + _RUNS_A_SAMPLE * learned) * one
        total += rows_of(learned) * work.products * _PRODUCT_SECONDS + work.choices * _CHOICE_SECONDS
    if recipe.finetuning != "none":
        tuning = recipe.improve.finetune
        total += tuning.iterations * (_TUNING * one * tuning.batch_size / 2)
    return total


def forward_seconds(model: ir.Model, samples: Samples) -> float:
    """Seconds of one forward pass; the sample is not lost to the run.

    The first pass of a session takes longer than those behind it, and what else runs only ever adds time.
    """
    sample = samples.first(1)[0]
    session = open_session(model)
    names = [out.name for out in session.get_outputs()]
    took: list[float] = []
    while not took or (len(took) < _TIMED and sum(took) < _MOMENT_SECONDS):
        start = time.perf_counter()
        run_session(session, names, sample, 0)
        took.append(time.perf_counter() - start)
    seconds = min(took)
    del session
    give_memory_back()
    return seconds


def _file_bytes(facts: Footprint, recipe: Recipe) -> int:
    """Of the file to be written."""
    bits = 32
    if recipe.mode == "weight_only":
        bits = recipe.weight_only.bits
    elif isinstance(scheme := recipe.weights.scheme, Scheme):
        bits = 8 * scheme.qtype.dtype.itemsize
    elif recipe.output.half_weights:
        bits = 16
    return facts.weights * bits // 32 + 600 * facts.nodes


def _temporary(model: ir.Model, facts: Footprint, recipe: Recipe, count: int | None, given: Budget) -> int:
    """What goes to temporary files beyond what is held in memory."""
    if recipe.mode != "static" or recipe.effort == "none":
        kept = min(recipe.verify.samples, count or recipe.verify.samples)
        return max(0, kept * facts.inputs - given.held)
    kept = most_samples(recipe, model)
    kept = kept if count is None else min(kept, count)
    parts = (kept * facts.inputs, kept * facts.peak // 2, min(_TARGETS, kept * facts.activations // 4))
    return sum(max(0, part - given.held) for part in parts)


def _resident() -> int:
    """Bytes that this process has in memory now."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return _STARTED
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    # Mapped files (libraries apart, which the margin covers) are the system's to drop.
    return int(fields["RssAnon"].split()[0]) * 1024 if "RssAnon" in fields else _STARTED


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def run_budget(
    model: ir.Model,
    recipe: Recipe,
    samples: Samples | None,
    limit: int | None,
    on_forecast: Callable[[Forecast], None] | None = None,
) -> Budget:
    """How a run shares out the memory that it may take; whoever asked is told the forecast before it begins.

    Args:
        model: the prepared float model.
        recipe: what is to be done.
        samples: the data; None where the recipe needs none.
        limit: `max_memory`, in bytes.
        on_forecast: hears what the run is expected to take.

    Raises:
        RecipeError: the limit is too low; the message names the least that would do.
    """
    facts = footprint(model)
    chosen = _budget(facts, recipe, limit)
    if limit is not None:
        save_heap()
    if on_forecast is not None:
        on_forecast(_forecast(model, facts, recipe, samples, chosen))
    return chosen


@takes_data_words
def forecast(
    model: ModelSource,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    data: object = None,
    effort: str | None = None,
    max_memory: str | int | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_subgraph: Sequence[str] = (),
    fix_inputs: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    **words: Unpack[DataWords],
) -> Forecast:
    """What `roundel.quantize` with the same arguments would take; of the data, at most one sample is run.

    Raises:
        RoundelError: the model, the data or the recipe is wrong, or the memory too little.
    """
    tree = recipe_changes(
        fixing(changes, fix_inputs), words, exclude, include, exclude_subgraph, effort=effort
    )
    settings = load_recipe(chosen_recipe(preset, recipe), tree)
    ready = prepare(model, settings)
    opened = None if data is None else open_data(ready.model, settings.data, data, ready.fixed)
    facts = footprint(ready.model)
    given = _budget(facts, settings, None if max_memory is None else parse_size(max_memory))
    return _forecast(ready.model, facts, settings, opened, given)
