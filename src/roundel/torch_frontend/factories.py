"""`module:factory`: a callable in a Python module that makes the network."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from roundel.errors import ModelError, did_you_mean

_NAME = re.compile(r"(?P<home>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):(?P<factory>[A-Za-z_]\w*)")


def is_factory(text: str) -> bool:
    """Whether the text names a factory: `package.module:factory` or `folder/file.py:factory`."""
    return _NAME.fullmatch(text) is not None


def build(text: str) -> tuple[Any, object]:
    """The module that the factory makes, and example inputs where it gives them as well.

    Only the module that is named is imported, with the current folder among the places to look in.

    Raises:
        ModelError: there is no such module or factory, or what it gives is no module.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise ModelError("This names no factory.", where=text, expected="package.module:factory")
    home = _imported(match["home"], text)
    factory = getattr(home, match["factory"], None)
    if factory is None:
        raise ModelError(
            "The module has no such factory.",
            where=text,
            hint=did_you_mean(match["factory"], vars(home)) or f"Define {match['factory']}() there.",
        )
    made = factory() if callable(factory) and not isinstance(factory, torch.nn.Module) else factory
    network, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(network, torch.nn.Module):
        raise ModelError(
            "The factory gives no module.",
            where=text,
            observed=f"an object of type {type(network).__name__}",
            expected="an nn.Module, or a pair of an nn.Module and its example inputs",
        )
    return network, example


def _imported(home: str, text: str) -> ModuleType:
    if home.endswith(".py"):
        path = Path(home)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise ModelError("The Python file does not exist.", where=text, observed=path)
        module = importlib.util.module_from_spec(spec)
        # Pickled parts and dataclasses of the file look their module up by name.
        sys.modules.setdefault(path.stem, module)
        with _importable(path.parent):
            spec.loader.exec_module(module)
        return module
    with _importable(Path.cwd()):
        try:
            return importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name is None or not (home == error.name or home.startswith(f"{error.name}.")):
                raise  # a package that the user's module itself misses: Python's own message is the best
            raise ModelError(
                "There is no such Python module.",
                where=text,
                observed=f"no module named '{error.name}'",
                hint="Run this in the folder that holds it, or give the file: path/to/file.py:factory.",
            ) from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = os.fspath(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
