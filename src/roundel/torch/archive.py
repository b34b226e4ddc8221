"""Files of torch.export (.pt2), read without running what a stranger may have put into them.

torch.export.load unpickles what it finds and evaluates the sizes in the file as Python expressions. So the
archive is looked through first: pickles may hold tensors only, sizes must be plain arithmetic. While torch
reads it, its own reader for tensors is the only one, also where torch would fall back to Python's pickle.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from roundel.errors import ModelError

# The names of today, and those of archives up to torch 2.7, which torch still reads.
_PICKLED = re.compile(r"data/(weights|constants|sample_inputs)/[^/]+\.pt|serialized_[^/]+\.pt")
_TENSORS_ONLY = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
_PAYLOADS = re.compile(r"data/(weights|constants)/[^/]+\.json")
_OBJECTS = ("custom_obj_", "opaque_obj_")
# Sizes as torch writes them: symbols, numbers, and the functions of its own arithmetic.
_FUNCTIONS = frozenset(
    (
        *("Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Mod", "PythonMod", "Max", "Min"),
        *("FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "FloatTrueDiv", "PowByNatural", "FloatPow"),
        *("CeilToInt", "FloorToInt", "RoundToInt", "TruncToInt", "ToFloat", "Identity", "ModularIndexing"),
        *("Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan"),
        *("Eq", "Ne", "Gt", "Ge", "Lt", "Le", "And", "Or", "Not", "Where", "Piecewise", "ExprCondPair"),
        *("LShift", "RShift"),
    )
)
_NAMES = frozenset({"oo", "int_oo", "true", "false"})
_SYMBOL = re.compile(r"z?[suf]{1,2}\d+")
_QUOTED = re.compile(r"[A-Za-z_]\w*|[+-]?\d+(\.\d*)?(e[+-]?\d+)?")
_HARMLESS = (
    *(ast.Expression, ast.Load, ast.Compare, ast.cmpop),
    *(ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop),
)


def load_program(path: Path) -> Any:
    """The torch.export.ExportedProgram of a file.

    Raises:
        ModelError: the file is missing, damaged, or holds more than tensors and a graph.
    """
    if not path.is_file():
        raise ModelError("The model file does not exist.", where=path, hint="Check the path.")
    try:
        with zipfile.ZipFile(path) as archive:
            _look_through(archive, path)
        with _tensors_only():
            return torch.export.load(path)
    except ModelError:
        raise
    # Deliberately broad: torch raises whatever its reader meets in a damaged file.
    except Exception as error:
        raise ModelError(
            "The file is not a program that torch.export can load.",
            where=path,
            observed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            expected="a file written by torch.export.save, by this version of torch or an older one",
        ) from error


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Meanwhile torch.load builds tensors and nothing else, whatever its caller asks for."""
    before = {name: os.environ.get(name) for name in _TENSORS_ONLY}
    os.environ.update(_TENSORS_ONLY)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _look_through(archive: zipfile.ZipFile, path: Path) -> None:
    entries = {name.split("/", 1)[-1]: name for name in archive.namelist()}
    twice = [name for name, count in Counter(archive.namelist()).items() if count > 1]
    if twice or len(entries) != len(archive.namelist()):
        raise _refused(path, "two entries of one name")
    pickled = {entry for entry in entries if _PICKLED.fullmatch(entry)}
    for entry, name in entries.items():
        if not entry.endswith(".json"):
            continue
        tree = json.loads(archive.read(name))
        for text in _sizes(tree):
            if not _is_arithmetic(text):
                raise _refused(f"{path}, {entry}", f"the size {text[:80]!r}")
        if _PAYLOADS.fullmatch(entry):
            pickled |= _pickled_payloads(tree, entry, f"{path}, {entry}")
    for entry in sorted(pickled):
        if entry not in entries:
            raise _refused(f"{path}, {entry}", "an entry that is not there")
        _check_pickle(archive.read(entries[entry]), f"{path}, {entry}")


def _pickled_payloads(tree: Any, entry: str, where: str) -> set[str]:
    folder = entry.rsplit("/", 1)[0]
    found = set()
    for payload in tree.get("config", {}).values():
        name = str(payload.get("path_name"))
        if "/" in name or name.startswith(_OBJECTS):
            raise _refused(where, f"'{name}', which is no tensor")
        if payload.get("use_pickle"):
            found.add(f"{folder}/{name}")
    return found


def _check_pickle(content: bytes, where: str) -> None:
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    # Deliberately broad: what torch's own safe reader does not take, whatever the reason, is not read.
    except Exception as error:
        raise _refused(where, f"a pickle with more than tensors ({type(error).__name__})") from error


def _is_arithmetic(text: str) -> bool:
    """Whether an expression does no more than compute with sizes; torch would evaluate it as Python."""
    try:
        parts = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError):
        return False
    called = {id(part.func) for part in parts if isinstance(part, ast.Call)}
    quoted = {id(a) for p in parts if isinstance(p, ast.Call) and _quotes(p.func) for a in p.args}
    for part in parts:
        if isinstance(part, ast.Name):
            known = part.id in _FUNCTIONS if id(part) in called else _is_name(part.id)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            known = id(part) in quoted and _QUOTED.fullmatch(part.value) is not None
        elif isinstance(part, ast.Call | ast.keyword | ast.Constant):
            known = True
        else:
            known = isinstance(part, _HARMLESS)
        if not known:
            return False
    return True


def _quotes(function: ast.expr) -> bool:
    """Other functions would evaluate a string, too."""
    return isinstance(function, ast.Name) and function.id in ("Symbol", "Float")


def _is_name(word: str) -> bool:
    return word in _NAMES or _SYMBOL.fullmatch(word) is not None


def _sizes(tree: Any) -> Iterator[str]:
    """Every text that torch would evaluate, however deep it lies."""
    if isinstance(tree, dict) and "expr_str" in tree:
        yield str(tree["expr_str"])
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _sizes(value)


def _refused(where: object, observed: str) -> ModelError:
    return ModelError(
        "The file holds what could run as code when it is loaded.",
        where=where,
        observed=observed,
        expected="tensors, and sizes in plain arithmetic, as torch.export.save writes them",
        hint="If you trust it: roundel.quantize(torch.export.load(PATH), …) in Python.",
    )
