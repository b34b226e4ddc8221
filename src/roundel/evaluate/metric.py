"""A user's own metric, by the name of its function."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roundel.errors import RecipeError, did_you_mean

Metric = Callable[[list[Any], list[Any] | None], Any]

_FORM = "module:function or file.py:function"


def load_metric(text: str) -> tuple[str, Metric]:
    """The name and the function that 'module:function' or 'file.py:function' means.

    The function is called once for each model with two lists: the model's outputs, one entry for each sample
    (an array, or a dictionary of arrays where the model has several outputs), and the labels of each sample's
    rows (None when there are none). It returns a number, or a dictionary of numbers.

    Raises:
        RecipeError: there is no such function.
    """
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name:
        raise RecipeError("The metric's name is not complete.", observed=text, expected=_FORM)
    module = _from_file(Path(home)) if home.endswith(".py") else _from_name(home)
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(
            f"There is no function '{name}' there.", where=home, hint=did_you_mean(name, dir(module))
        )
    return name, function


def scores(name: str, function: Metric, outputs: list[Any], labels: list[Any] | None) -> dict[str, float]:
    """What the metric says, by name.

    Raises:
        RecipeError: the metric fails, or gives something else than numbers.
    """
    try:
        result = function(outputs, labels)
    except Exception as error:
        # Deliberately broad: the user's own code runs here and may raise anything.
        raise RecipeError(
            "The metric failed.", where=name, observed=f"{type(error).__name__}: {error}"
        ) from error
    named = dict(result) if isinstance(result, Mapping) else {name: result}
    try:
        found = {str(key): float(value) for key, value in named.items()}
    except (TypeError, ValueError) as error:
        raise RecipeError(
            "The metric gave no number.", where=name, observed=repr(result)[:200], expected="a number"
        ) from error
    if not all(math.isfinite(value) for value in found.values()):
        raise RecipeError("The metric is not finite.", where=name, observed=found)
    return found


def _from_name(name: str) -> Any:
    # As `python -m` does: a module beside the user is found before installed ones.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            "The metric's module cannot be imported.", where=name, observed=error, expected=_FORM
        ) from error


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise RecipeError("The metric's file does not exist.", where=path, expected=_FORM)
    spec = importlib.util.spec_from_file_location(f"roundel_metric_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Deliberately broad: the user's own code runs here and may raise anything.
        raise RecipeError(
            "The metric's file cannot be run.", where=path, observed=f"{type(error).__name__}: {error}"
        ) from error
    return module
