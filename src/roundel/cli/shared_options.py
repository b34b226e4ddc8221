"""Options that several commands share: one function declares them, one decorator adds them to a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any


def with_options(
    command: Callable[..., None],
    options: Callable[..., object],
    parameter: str,
    leave_out: Collection[str] = (),
) -> Callable[..., None]:
    """Give a command the options that a function declares; what that makes of them reaches it as a parameter.

    Args:
        command: of typer; it has the parameter.
        options: its signature is shown to typer, and it is called with the user's words.
        parameter: of the command, for the result.
        leave_out: options that this command does not offer; they keep their defaults.
    """
    offered = inspect.signature(options, eval_str=True).parameters
    shared = {name: option for name, option in offered.items() if name not in leave_out}
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**words: Any) -> None:
        choice = options(**{name: words.pop(name) for name in shared})
        command(**words, **{parameter: choice})

    parameters = [p for p in own.parameters.values() if p.name != parameter]
    merged = [*parameters, *shared.values()]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in merged]
    )
    run.__annotations__ = {p.name: p.annotation for p in merged}
    return run
