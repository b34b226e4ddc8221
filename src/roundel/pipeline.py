"""The whole run on one page: prepare, try on a few samples, plan, collect, resolve, try, write, gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from roundel.data import Samples
from roundel.forecasting import Forecast, run_budget
from roundel.improve.finetune import check_tuning
from roundel.improve.steps import GRAPH_STEPS, PLAN_STEPS, STATE_STEPS, keep_if_better, take_few, too_few
from roundel.model.memory import older_objects_spared, parse_size, within
from roundel.model.structure import blaming
from roundel.numerics.rounding import one_blas_thread
from roundel.options import DataWords, chosen_recipe, cutting, fixing, recipe_changes, takes_data_words
from roundel.outputs import model_targets, refuse_overwriting
from roundel.qdq.weight_only import check_kernel
from roundel.recipe.load import RecipeSource, load_recipe
from roundel.reporting import require_data, write_report
from roundel.result import Asked, Judging, QuantizeResult, as_onnx, choose_execution, gate
from roundel.rules.phoenix import refuse_batch
from roundel.rules.report import cut_for_device, for_device, for_effort
from roundel.stages import collect, open_data, plan, prepare, resolve, write
from roundel.state import Context, State
from roundel.targets.npu import device_named
from roundel.torch import Exported
from roundel.types import Listener, Silent
from roundel.work.checkpoints import open_store
from roundel.work.executors import Executor, Work


@takes_data_words
def quantize(
    model: Any,
    output: str | Path | None = None,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    data: object = None,
    stats: str | Path | None = None,
    effort: str | None = None,
    goal: str | float | None = None,
    device: str | None = None,
    device_exec: str | None = None,
    cut_head: bool = False,
    max_memory: str | int | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_subgraph: Sequence[str] = (),
    fix_inputs: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    half_weights: bool = False,
    strip_functions: bool = False,
    eval_data: object = None,
    labels: object = None,
    task: str = "classification",
    report: str | Path | None = None,
    example_inputs: object = None,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    on_forecast: Callable[[Forecast], None] | None = None,
    **words: Unpack[DataWords],
) -> QuantizeResult:
    """Quantize a float model.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model; or of PyTorch: a module, a torch.export
            program, a .pt2 file, or 'package.module:factory'. It is never changed.
        output: the file to write; a record `NAME.json` appears beside it. None keeps all in memory.
        preset: a preset's name in any case; a8w8 when neither this nor a recipe is given.
        recipe: a recipe file, a mapping, a Recipe, or a preset's name.
        data: calibration data: ONNX Runtime's CalibrationDataReader, any iterable of dicts or arrays, a
            DataLoader, a folder of images or .npy files, or `roundel.RandomData()`.
        samples: use at most this many samples.
        stats: a statistics file to reuse, or to write when it does not fit this model and data.
        mean: of images: subtracted, one number or one for each channel, in units of the scaled image.
        std: of images: divides, likewise.
        scale: of images: unit (pixels / 255) or raw.
        resize: of images: the short side, or (height, width).
        crop: of images: centre crop, a side or (height, width).
        layout: of images: nchw or nhwc; read from the model's input when not given.
        bgr: of images: blue first.
        letterbox: of images: keep the aspect, with grey around to fill the model's size.
        effort: none (calibration only), fast or high; the recipe's own when not given.
        goal: the SQNR that each output should reach, such as '20dB': with less, tensors that spoil it get 16
            bits where the format has them, and `.record.reached` says whether that was enough.
        device: the NPU it is for (phx, stx, krk …): what helps placement there and is exact is applied, and
            what is left is listed in the record's notes.
        device_exec: where calibration and fine-tuning run: cpu, cuda (an error where it is missing), or auto,
            which takes a GPU if there is one; the record says what was chosen.
        cut_head: end the model at its last layers, before Reshape, Transpose and Concat on the way to the
            output: the rest becomes NAME.tail.onnx, in float, which `deploy` and the measuring functions run
            behind it. For phx and hpt that happens by itself where nothing would be placed otherwise.
        max_memory: the most memory that this process may take: '2G', '512M' or bytes. With less, the same
            result comes from more passes and from temporary files. Each worker may take as much.
        exclude: nodes that stay float: names, globs, 're:REGEX' or 'op:TYPE'.
        include: only these are quantized; same words.
        exclude_subgraph: keep in float all between tensors: 'a,b->c,d'.
        fix_inputs: inputs that become constants, by name: a number or an array; an If that depends on them
            alone gives way to the branch it takes.
        changes: recipe values that differ from the recipe's own, nested as in the file or with dots:
            `{"weights.type": "int8"}`.
        half_weights: BF16 and FP16: constants in 16 bits, same numbers.
        strip_functions: leave out the bodies of AMD's operators.
        eval_data: also judge both models on these data, prepared as the calibration data are: accuracy before
            and after, with the interval of the change.
        labels: of these data, as `roundel.evaluate` takes them; without, the rows that keep their answer.
        task: of these data: classification or detection.
        report: also write one HTML page about the result there, as `roundel.write_report` does.
        example_inputs: PyTorch: a tensor, a tuple of arguments, a dict by parameter name, or a list of such
            examples. The first is traced; on all of them the export must equal the module.
        dynamic_batch: PyTorch: leave the first dimension of all inputs open.
        dynamic_shapes: PyTorch: open dimensions in torch.export's notation.
        executor: where calibration runs, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done: each shard of the samples, each layer of the rest.
        resume: go on from the checkpoint where there is one; the file is that of a run without a break.
        listener: told about progress.
        on_forecast: hears what the run is expected to take, before it begins.

    Raises:
        RoundelError: something in the model, the data or the recipe is wrong; nothing was written.
    """
    told, chosen = listener or Silent(), chosen_recipe(preset, recipe)
    flags = {"half_weights": half_weights, "strip_functions": strip_functions}
    tree = recipe_changes(
        cutting(fixing(changes, fix_inputs), asked=cut_head),
        words,
        exclude,
        include,
        exclude_subgraph,
        effort=effort,
        goal=goal,
        output=flags,
    )
    read = model.path if isinstance(model, Exported) else model
    refuse_overwriting(
        {**model_targets(output), "statistics file": stats, "report": report},
        {
            "input model": read,
            "calibration data": data,
            "recipe": chosen,
            "evaluation data": eval_data,
            "labels": labels,
        },
    )
    judging = Judging.of(eval_data, labels, task)
    if report is not None:
        require_data(report, data)
    with ExitStack() as cleanup:
        cleanup.callback(told.close)
        cleanup.enter_context(older_objects_spared())
        settings = for_effort(for_device(load_recipe(chosen, tree), device))
        execution = choose_execution(device_exec, settings)
        check_tuning(execution.recipe)
        check_kernel(execution.recipe)
        limit = None if max_memory is None else parse_size(max_memory)
        work = Work(executor, open_store(checkpoint, resume=resume), execution.calibration)
        told.step("load and prepare")
        source, exported = as_onnx(model, example_inputs, dynamic_batch, dynamic_shapes)
        cleanup.enter_context(blaming(source))
        state = prepare(source, cut_for_device(source, execution.recipe, device))
        if device is not None:
            refuse_batch(state.model.graph, device_named(device))
        state = replace(state, notes=(*execution.notes, *(exported.notes if exported else ()), *state.notes))
        opened = None if data is None else open_data(state.model, state.recipe.data, data, state.fixed)
        budget = run_budget(state.model, state.recipe, opened, limit, on_forecast)
        cleanup.enter_context(within(budget))
        target = None if output is None else Path(output)
        request = Asked(source, exported, target, device, state, judging, told)
        result = gate(_quantized(state, opened, stats, Context(told, work)), request, cleanup)
    if report is not None:
        write_report(report, source, result, data, device=device, listener=listener)
    return result


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
    state = context.kept["calibrated"] = too_few(resolve(state))
    for step in STATE_STEPS:
        state = keep_if_better(step, state, context)
    context.told.step("write")
    state = write(state)
    context.told.step("verify")
    return state
