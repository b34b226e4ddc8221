"""What is done so far, in one file of plain arrays that is replaced in one step."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
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

_VERSION = 1
_HEADER = "header"
# What numpy, zipfile, zlib and json raise for content that is not ours.
_UNREADABLE = (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error)
Changes = dict[str, tuple[NDArray[Any], QParams]]


@dataclass(slots=True)
class Progress:
    """Layers that are done, what was reported about them, and the constants that changed."""

    reports: list[FinetuneReport] = field(default_factory=list)
    changes: Changes = field(default_factory=dict)


def run_key(model: ir.Model, state: QuantState, samples: Sequence[Sample], recipe: Recipe) -> str:
    """A digest of everything that decides the result."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(fingerprint(model).encode())
    digest.update(recipe.model_dump_json().encode())
    seen = SampleDigest()
    for sample in samples:
        seen.update(sample)
    digest.update(seen.hexdigest().encode())
    for name, params in sorted(state.params.items()):
        digest.update(f"{name} {params.qtype} {params.axis}".encode())
        digest.update(params.scale.tobytes() + params.zero_point.tobytes())
    for table in (state.values, state.codes):
        for name, array in sorted(table.items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def save(path: Path, key: str, progress: Progress) -> None:
    """Replace the checkpoint.

    Raises:
        OutputError: it cannot be written.
    """
    names = list(progress.changes)
    formats = [[p.qtype.value, p.axis] for _, p in progress.changes.values()]
    header = {
        "version": _VERSION,
        "key": key,
        "reports": [asdict(report) for report in progress.reports],
        "tensors": [[name, *kind] for name, kind in zip(names, formats, strict=True)],
    }
    arrays: dict[str, NDArray[Any]] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for number, (codes, params) in enumerate(progress.changes.values()):
        arrays |= {
            f"{number}.codes": codes,
            f"{number}.scale": params.scale,
            f"{number}.zero": params.zero_point,
        }
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError("The checkpoint cannot be written.", where=path, observed=error) from error


def load(path: Path, key: str) -> Progress:
    """Read a checkpoint; an empty progress where there is none.

    Raises:
        DataError: it is damaged, or of another run.
    """
    if not path.exists():
        return Progress()
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(bytes(file[_HEADER]))
            version, found = header["version"], header["key"]
            reports = [FinetuneReport(**report) for report in header["reports"]]
            changes: Changes = {}
            for number, (name, kind, axis) in enumerate(header["tensors"]):
                scale, zero = file[f"{number}.scale"], file[f"{number}.zero"]
                changes[name] = (file[f"{number}.codes"], QParams(scale, zero, QType(kind), axis))
    except _UNREADABLE as error:
        raise DataError(
            "The checkpoint cannot be read.",
            where=path,
            observed=" ".join(str(error).split())[:200],
            hint="Delete it to start again.",
        ) from error
    if (version, found) != (_VERSION, key):
        raise DataError(
            "The checkpoint belongs to another run.",
            where=path,
            expected="the same model, recipe, samples and version of Roundel",
            hint="Delete it, or run without resuming.",
        )
    return Progress(reports, changes)
