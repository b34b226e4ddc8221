"""Where a command works and what it writes down, for the commands that take long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from roundel.cli.shared_options import with_options
from roundel.errors import RecipeError

if TYPE_CHECKING:
    from roundel.executors import Executor

_PANEL = "Long runs"


class WorkChoice(TypedDict):
    """What the user said, as `roundel.quantize` and its like take it."""

    executor: Executor | None
    checkpoint: Path | None
    resume: bool


def _options(
    executor: Annotated[
        str | None,
        typer.Option(
            help="local (this process, the default), processes, or ray.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many at once; else one to a core.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Of a running Ray cluster; else one starts here.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    shared_files: Annotated[
        bool,
        typer.Option(
            "--shared-files",
            help="The cluster sees this machine's files: workers read the data.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder that holds what is done, shard by shard.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint.", rich_help_panel=_PANEL)
    ] = False,
) -> WorkChoice:
    """The choice that the options make. Only its signature is shown to typer."""
    if executor is None and (workers is not None or address is not None or shared_files):
        raise RecipeError(
            "--workers, --address and --shared-files need an executor.",
            expected="--executor processes or --executor ray, too",
        )
    chosen: Executor | None = None
    if executor is not None:
        from roundel.executors import executor as named

        chosen = named(executor, address=address, workers=workers, shared_files=shared_files)
    return WorkChoice(executor=chosen, checkpoint=checkpoint, resume=resume)


def takes_work(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above; they reach it as its parameter `work`, a `WorkChoice`."""
    return with_options(command, _options, "work")


def takes_executor(command: Callable[..., None]) -> Callable[..., None]:
    """As `takes_work`, for a command that remembers what it has done in a way of its own."""
    return with_options(command, _options, "work", leave_out=("checkpoint", "resume"))
