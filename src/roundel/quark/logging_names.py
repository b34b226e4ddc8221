"""The loggers that scripts take from the package; here they are Python's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class ScreenLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger by name; nothing is configured, the script decides."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})


def log_errors(function: Function) -> Function:
    """The function itself: errors are raised, which is where they are seen."""
    return function
