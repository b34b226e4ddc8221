"""What a run writes must not cover what it reads: refused before any work, whatever the option's name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from roundel.data.folders import ARRAY_SUFFIXES, IMAGE_SUFFIXES, files_below
from roundel.errors import OutputError
from roundel.model.files import MOST_STRUCTURE, check_writable, external_values, same_file
from roundel.recipe.load import record_path, tail_path

_NO_MODELS = frozenset({".json", ".yaml", ".yml", ".csv", ".txt", ".py", *ARRAY_SUFFIXES, *IMAGE_SUFFIXES})


def model_targets(output: str | Path | None) -> dict[str, Path | None]:
    """What a run with this output may write: the model, and beside it its record and its tail.

    Raises:
        OutputError: both would have one name.
    """
    if output is None:
        return {}
    target = Path(output)
    if record_path(target) == target:
        raise OutputError(
            "The output's name is that of its record.",
            where=target,
            expected="a name that does not end in .json, for example model.a8w8.onnx",
        )
    beside = {"output's record": record_path(target), "output's tail": tail_path(target)}
    return {"output": target, **beside}


def refuse_overwriting(targets: Mapping[str, str | Path | None], sources: Mapping[str, object]) -> None:
    """Fail before any work where a file that is to be written is one that is read, or cannot be written.

    Args:
        targets: files to write, by what they are; None for those that nobody asked for.
        sources: what is read, by what it is: paths of files and of folders of data, lists of them, and
            objects of any other kind, which nothing can overwrite. Of a model, external data count, too.

    Raises:
        OutputError: a target is a source or another target, or its place cannot be written.
    """
    written = [(what, Path(target)) for what, target in targets.items() if target is not None]
    weights = cache(_external_files)  # a model's structure is read once, for all that is written
    for place, (what, target) in enumerate(written):
        for other, earlier in written[:place]:
            if same_file(target, earlier):
                raise _refusal(what, target, other)
        for source_name, source in sources.items():
            for other, path in _files(source_name, source):
                _refuse(what, target, other, path, weights)
        check_writable(target)


def metric_file(metric: object) -> Path | None:
    """The file of a metric that is given as 'file.py:function'."""
    return Path(metric.rpartition(":")[0]) if isinstance(metric, str) and ":" in metric else None


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Every tensor, in subgraphs, functions and attributes, too, whose values lie in another file."""
    yield from (tensor for _, tensor in external_values(model))
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for node in (node for body in bodies for node in body.all_nodes()):
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                yield attribute.value


def _files(name: str, source: object) -> Iterator[tuple[str, Path]]:
    """A source's files, by what they are."""
    if isinstance(source, ir.Model):
        yield from ((f"{name}'s external data", Path(t.path)) for t in external_tensors(source))
    for item in source if isinstance(source, list | tuple) else (source,):
        if isinstance(item, str | os.PathLike):
            yield name, Path(item)


def _refuse(
    what: str, target: Path, other: str, source: Path, weights: Callable[[Path, int], set[Path]]
) -> None:
    there, read = _kind(target), _kind(source)
    if read is None:
        return
    if same_file(target, source):
        raise _refusal(what, target, other)
    if there is None:  # nothing is there that could be lost
        return
    if stat.S_ISREG(read.st_mode):
        if any(same_file(target, data) for data in weights(source, read.st_size)):
            raise _refusal(what, target, f"{other}'s external data")
    elif target.suffix.lower() in ARRAY_SUFFIXES | IMAGE_SUFFIXES:
        for file in files_below(source):
            if same_file(target, source / file):
                raise _refusal(what, target, f"{other}: {file} in {source}")


def _kind(path: Path) -> os.stat_result | None:
    """What is there; nothing under a name that is none: labels may be 're:…', a model 'package:factory'."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _external_files(path: Path, size: int) -> set[Path]:
    """Of a model; nothing for any other file, about which its reader has better words."""
    if path.suffix.lower() in _NO_MODELS or size > MOST_STRUCTURE:
        return set()
    try:
        model = ir.load(path.absolute(), format="protobuf")
    except (DecodeError, ir.serde.SerdeError, OSError, ValueError, TypeError, AttributeError):
        return set()
    return {Path(tensor.path) for tensor in external_tensors(model)}


def _refusal(what: str, target: Path, other: str) -> OutputError:
    return OutputError(
        f"The {what} would overwrite the {other}.", where=target, hint="Choose another output path."
    )
