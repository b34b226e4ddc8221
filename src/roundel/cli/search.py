"""`roundel search`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from roundel.cli.options import (
    DataChoice,
    Exclude,
    Json,
    Model,
    Preset,
    RecipeFile,
    Set,
    WorkChoice,
    chosen_recipe,
    recipe_changes,
    takes_data,
    takes_executor,
)

_EPILOG = """[bold]Examples[/]

roundel search model.onnx --data calib/ --space weights.method=minmax,mse --space calibration.margin=1.0..2.0

roundel search model.onnx --data calib/ --space preset=xint8,a8w8,a16w8 --also size --study my.db -o best.onnx

roundel search model.onnx --data calib/ --space space.yaml --trials 50 --study my.db   (killed? run it again)
"""
_JUDGE = "Judging"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(takes_executor(takes_data(search)))


def search(
    model: Model,
    data: DataChoice,
    work: WorkChoice,
    space: Annotated[
        list[str],
        typer.Option(
            help="FIELD=a,b,c or FIELD=low..high[:log] of a recipe, preset=a,b, or a YAML file of them.",
            show_default=False,
        ),
    ],
    trials: Annotated[int, typer.Option(help="How many in all, those of earlier runs among them.")] = 20,
    study: Annotated[
        Path | None,
        typer.Option(help="SQLite file of the study: a later run goes on with it.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the best model there.", show_default=False),
    ] = None,
    preset: Preset = None,
    recipe: RecipeFile = None,
    save_recipe: Annotated[
        Path | None, typer.Option(help="Write the best recipe there.", show_default=False)
    ] = None,
    eval_data: Annotated[
        Path | None,
        typer.Option(
            help="Data to judge by; without it a quarter of --data is held out.",
            rich_help_panel=_JUDGE,
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Of what judges; see `roundel evaluate`.", rich_help_panel=_JUDGE, show_default=False
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="sqnr (the default without labels), top1, top5, agreement, fidelity, cosine, or your own.",
            rich_help_panel=_JUDGE,
            show_default=False,
        ),
    ] = None,
    lower_is_better: Annotated[
        bool,
        typer.Option("--lower-is-better", help="Your own metric is an error.", rich_help_panel=_JUDGE),
    ] = False,
    also: Annotated[
        str | None,
        typer.Option(help="Further objectives: size, time, npu.", rich_help_panel=_JUDGE, show_default=False),
    ] = None,
    sampler: Annotated[str, typer.Option(help="tpe or random.")] = "tpe",
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="The NPU it is for: phx, hpt, stx, krk …", show_default=False)
    ] = None,
    exclude: Exclude = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Search recipe values for the best model, in a study that a later run goes on with (needs Optuna)."""
    from roundel.model.files import check_writable, write_text
    from roundel.recipe.load import dump_yaml
    from roundel.report.console import ProgressListener, terminal
    from roundel.report.judged import show_study
    from roundel.trials.search import search as run
    from roundel.trials.study import Trial

    if save_recipe is not None:
        check_writable(save_recipe)
    kind: Any = sampler

    def heard(trial: Trial) -> None:
        values = ", ".join(f"{value:.5g}" for value in trial.values) or f"refused, {trial.reason}"
        terminal(stderr=True).print(f"trial {trial.number}: {values}", markup=False, highlight=False)

    found = run(
        model,
        output,
        data=data.required(),
        space=space,
        trials=trials,
        study=study,
        recipe=chosen_recipe(preset, recipe),
        eval_data=eval_data,
        labels=labels,
        metric=metric,
        lower_is_better=lower_is_better,
        also=[name.strip() for name in (also or "").split(",") if name.strip()],
        sampler=kind,
        seed=seed,
        device=device,
        exclude=exclude or (),
        changes=recipe_changes(settings, data=data.preprocessing),
        executor=work["executor"],
        listener=None if as_json else ProgressListener(),
        on_trial=None if as_json else heard,
    )
    if save_recipe is not None and found.recipe is not None:
        write_text(save_recipe, dump_yaml(found.recipe))
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1) + "\n")
    else:
        show_study(terminal(), found.to_dict())
