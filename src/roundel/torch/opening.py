"""The front door: whatever of PyTorch is given becomes an ONNX model, and a sentence for the record.

Nothing here imports torch before it is certain that something of torch was given.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir

from roundel.errors import DependencyError, ModelError, RecipeError, did_you_mean

SUFFIX = ".pt2"
_NAME = re.compile(r"(?P<home>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):(?P<factory>[A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """An ONNX model that came from PyTorch.

    Attributes:
        model: the model.
        name: of the module or file.
        path: the file, where there is one.
        notes: how it was made, and how close it is to the module.
    """

    model: ir.Model
    name: str
    path: Path | None
    notes: tuple[str, ...]


def is_torch_source(model: object) -> bool:
    """Whether this is something of PyTorch: a module, a program, a .pt2 file or `module:factory`."""
    if isinstance(model, str | Path):
        return Path(model).suffix == SUFFIX or (":" in str(model) and not Path(model).exists())
    torch: Any = sys.modules.get("torch")
    if torch is None:  # then nobody can have made a module
        return False
    return isinstance(model, torch.nn.Module) or type(model).__name__ == "ExportedProgram"


def opened(
    model: Any,
    example_inputs: object = None,
    *,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
) -> Exported:
    """Export a module, a torch.export program, a .pt2 file, or what `module:factory` makes.

    Args:
        model: any of these; a module is left as it was.
        example_inputs: a tensor, a tuple of arguments, a dict by parameter name, or a list of such examples:
            the first is traced, all are compared. A program and a factory may bring their own.
        dynamic_batch: leave the first dimension of all inputs open.
        dynamic_shapes: open dimensions in torch.export's notation; names may stand for Dim objects.

    Raises:
        DependencyError: torch or onnxscript is not installed.
        ModelError: the model cannot be read or exported, or its export computes something else.
        DataError: the examples are missing or do not fit.
    """
    require_exporter()
    import torch

    from roundel.torch import archive, export

    name = Path(model).name if isinstance(model, str | Path) else type(model).__name__
    path = Path(model) if isinstance(model, str | Path) and Path(model).suffix == SUFFIX else None
    if path is not None:
        model = archive.load_program(path)
    elif isinstance(model, str | Path):
        model, own = _from_factory(str(model))
        example_inputs = own if example_inputs is None else example_inputs
    if isinstance(model, torch.nn.Module):
        examples = export.examples_of(example_inputs)
        made = export.export_module(
            model, examples, dynamic_batch=dynamic_batch, dynamic_shapes=dynamic_shapes
        )
    else:
        if dynamic_batch or dynamic_shapes is not None:
            raise RecipeError(
                "A program that is traced already keeps its shapes.",
                where=name,
                observed="dynamic_batch" if dynamic_batch else "dynamic_shapes",
                hint="Give dynamic_shapes to torch.export.export, or give Roundel the module.",
            )
        given = () if example_inputs is None else export.examples_of(example_inputs)
        made = export.export_program(model, given)
    return Exported(made[0], name, path, made[1])


def require_torch(purpose: str, *more: str) -> None:
    """Raise where torch is not installed, or what else is needed with it.

    Args:
        purpose: what it is needed for, with its verb.
        more: further packages.

    Raises:
        DependencyError: a package is missing.
    """
    missing = [name for name in ("torch", *more) if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"{purpose} packages that are not installed.",
            observed=f"no {' and no '.join(missing)}",
            hint="pip install 'roundel[torch]'",
        )


def require_exporter() -> None:
    """Raise where torch, or what it exports ONNX with, is not installed.

    Raises:
        DependencyError: a package is missing.
    """
    require_torch("Models in PyTorch need", "onnxscript")


def _from_factory(text: str) -> tuple[Any, object]:
    """The module that `package.module:factory` makes, and example inputs where it gives them as well.

    Only the module that is named is imported, with the current folder among the places to look in.

    Raises:
        ModelError: there is no such module or factory, or what it gives is no module.
    """
    import torch

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
