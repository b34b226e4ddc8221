"""The whole run on one page: prepare, try on a few samples, plan, collect, resolve, try, write, gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundel.data import Samples
from roundel.forecasting import Forecast, run_budget
from roundel.improve.finetune import check_tuning
from roundel.improve.steps import GRAPH_STEPS, PLAN_STEPS, STATE_STEPS, keep_if_better, take_few, too_few
from roundel.model.memory import parse_size, within
from roundel.model.structure import blaming
from roundel.numerics.rounding import one_blas_thread
from roundel.qdq.weight_only import check_kernel
from roundel.recipe.load import RecipeSource, load_recipe
from roundel.request import as_onnx, changed, checked_output, choose_execution
from roundel.result import Asked, QuantizeResult, gate
from roundel.rules.report import for_device, for_effort
from roundel.stages import collect, open_data, plan, prepare, resolve, write
from roundel.state import Context, State
from roundel.types import Listener, Silent
from roundel.work.checkpoints import open_store
from roundel.work.executors import Executor, Work


def quantize(
    model: Any,
    output: str | Path | None = None,
    *,
    recipe: RecipeSource = "a8w8",
    data: object = None,
    samples: int | None = None,
    exclude: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    stats: str | Path | None = None,
    device: str | None = None,
    effort: str | None = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    device_exec: str | None = None,
    max_memory: str | int | None = None,
    on_forecast: Callable[[Forecast], None] | None = None,
    example_inputs: object = None,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
    listener: Listener | None = None,
) -> QuantizeResult:
    """Quantize a float model.

    The arguments are those of `roundel.quantize`; what that has words of its own for (images,
    `include` …) is in `changes` here.

    Raises:
        RoundelError: something in the model, the data or the recipe is wrong; nothing was written.
    """
    told = listener or Silent()
    with ExitStack() as cleanup:
        cleanup.callback(told.close)
        settings = load_recipe(recipe, changed(changes, samples, exclude, effort))
        settings = for_effort(for_device(settings, device))
        target = checked_output(output, model, recipe, data, stats)
        chosen = choose_execution(device_exec, settings)
        check_tuning(chosen.recipe)
        check_kernel(chosen.recipe)
        limit = None if max_memory is None else parse_size(max_memory)
        work = Work(executor, open_store(checkpoint, resume=resume), chosen.calibration)
        told.step("load and prepare")
        source, exported = as_onnx(model, example_inputs, dynamic_batch, dynamic_shapes)
        cleanup.enter_context(blaming(source))
        state = prepare(source, chosen.recipe)
        state = replace(state, notes=(*chosen.notes, *(exported.notes if exported else ()), *state.notes))
        opened = None if data is None else open_data(state.model, state.recipe.data, data)
        budget = run_budget(state.model, state.recipe, opened, limit, on_forecast)
        cleanup.enter_context(within(budget))
        request = Asked(source, exported, target, device, state)
        return gate(_quantized(state, opened, stats, Context(told, work)), request, cleanup)


@one_blas_thread()  # sums of products keep their order, whatever the threads
def _quantized(state: State, data: Samples | None, stats: str | Path | None, context: Context) -> State:
    """The way of the data. What is tried stays only where an error on unseen samples falls."""
    state = take_few(state, data)
    for step in GRAPH_STEPS:
        state = keep_if_better(step, state, context)
    context.told.step("plan")
    state = collect(plan(state), data, context, stats=stats)
    for step in PLAN_STEPS:
        state = keep_if_better(step, state, context)
    state = too_few(resolve(state))
    for step in STATE_STEPS:
        state = keep_if_better(step, state, context)
    context.told.step("write")
    state = write(state)
    context.told.step("verify")
    return state
