"""What is done so far, in one file of plain arrays that is replaced in one step."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.algorithms.finetune_report import FinetuneReport
from roundel.calibrate.state import QuantState
from roundel.data.hashing import SampleDigest
from roundel.errors import DataError, OutputError
from roundel.model.graph import fingerprint
from roundel.recipe import Recipe
from roundel.types import QParams, QType, Sample
from roundel.version import VERSION

_VERSION = 2
_HEADER = "header"
_FILE = "finetune.npz"
# These change neither what is learned nor what it is learned from.
_BESIDE_THE_POINT = {"name", "title", "output", "verify"}
# What numpy, zipfile, zlib and json raise for content that is not ours.
_UNREADABLE = (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error)
Changes = dict[str, tuple[NDArray[Any], QParams | None]]  # codes with their format, or real numbers


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a run writes down what is done.

    Attributes:
        path: the file.
        resume: whether to go on from what an earlier run left there.
    """

    path: Path
    resume: bool = False


def checkpoint_at(place: str | Path, *, resume: bool) -> Checkpoint:
    """A checkpoint in a folder, which is made where there is none, or in a file that ends in .npz.

    Raises:
        OutputError: it cannot be written there, or what is there is something else.
    """
    path = Path(place)
    path = path if path.suffix == ".npz" and not path.is_dir() else path / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            "The checkpoint's folder cannot be made.", where=path.parent, observed=error.strerror
        ) from error
    if path.exists() and not resume:
        _refuse_strangers(path)
    return Checkpoint(path, resume)


def _refuse_strangers(path: Path) -> None:
    """A checkpoint may be replaced; nothing else may."""
    try:
        with np.load(path, allow_pickle=False) as file:
            ours = "key" in json.loads(bytes(file[_HEADER]))
    except _UNREADABLE:
        ours = False
    if not ours:
        raise OutputError(
            "The checkpoint would overwrite a file that is not a checkpoint.",
            where=path,
            hint="Choose another place, or delete the file.",
        )


@dataclass(slots=True)
class Progress:
    """Layers that are done, what was reported about them, and the constants that changed."""

    reports: list[FinetuneReport] = field(default_factory=list)
    changes: Changes = field(default_factory=dict)


def run_key(model: ir.Model, state: QuantState, samples: Sequence[Sample], recipe: Recipe) -> dict[str, str]:
    """Digests of everything that decides the result, each under its name for people."""
    seen = SampleDigest()
    for sample in samples:
        seen.update(sample)
    settings = recipe.model_dump_json(exclude=_BESIDE_THE_POINT)
    return {
        "version of Roundel": VERSION,
        "model": fingerprint(model),
        "recipe": hashlib.blake2b(settings.encode(), digest_size=16).hexdigest(),
        "set of samples": seen.hexdigest(),
        "calibration": _state_digest(state),
    }


def _state_digest(state: QuantState) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, params in sorted(state.params.items()):
        digest.update(f"{name} {params.qtype} {params.axis}".encode())
        digest.update(params.scale.tobytes() + params.zero_point.tobytes())
    for table in (state.float_scales, state.values, state.codes):
        for name, array in sorted(table.items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def save(path: Path, key: Mapping[str, str], progress: Progress) -> None:
    """Replace the checkpoint.

    Raises:
        OutputError: it cannot be written.
    """
    names = list(progress.changes)
    formats = [[p.qtype.value, p.axis] if p else [None, None] for _, p in progress.changes.values()]
    header = {
        "version": _VERSION,
        "key": dict(key),
        "reports": [asdict(report) for report in progress.reports],
        "tensors": [[name, *kind] for name, kind in zip(names, formats, strict=True)],
    }
    arrays: dict[str, NDArray[Any]] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for number, (codes, params) in enumerate(progress.changes.values()):
        arrays[f"{number}.codes"] = codes
        if params is not None:
            arrays |= {f"{number}.scale": params.scale, f"{number}.zero": params.zero_point}
    # One name, so that what a killed run leaves behind is overwritten and not collected.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        partial.replace(path)
    except OSError as error:
        raise OutputError("The checkpoint cannot be written.", where=path, observed=error) from error


def load(path: Path, key: Mapping[str, str]) -> Progress:
    """Read a checkpoint; an empty progress where there is none.

    Raises:
        DataError: it is damaged, or of another run.
    """
    if not path.exists():
        return Progress()
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(bytes(file[_HEADER]))
            version, found = header["version"], dict(header["key"])
            reports = [FinetuneReport(**report) for report in header["reports"]]
            changes: Changes = {}
            for number, (name, kind, axis) in enumerate(header["tensors"]):
                params = None
                if kind is not None:
                    scale, zero = file[f"{number}.scale"], file[f"{number}.zero"]
                    params = QParams(scale, zero, QType(kind), axis)
                changes[name] = (file[f"{number}.codes"], params)
    except _UNREADABLE as error:
        raise DataError(
            "The checkpoint cannot be read.",
            where=path,
            observed=" ".join(str(error).split())[:200],
            hint="Delete it to start again.",
        ) from error
    other = [part for part, digest in key.items() if found.get(part) != digest]
    if version != _VERSION or other:
        raise DataError(
            "The checkpoint belongs to another run.",
            where=path,
            observed=f"another {other[0] if other else 'version of the file'}",
            expected="the same model, recipe, samples and version of Roundel",
            hint="Give the options of that run, delete the checkpoint, or run without resuming.",
        )
    return Progress(reports, changes)
