"""Statistics on disk: one .npz of plain arrays with a JSON header, never pickle."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.calibrate.collect import Collected
from roundel.calibrate.observers import OBSERVERS, Observer, StatKind
from roundel.errors import DataError, OutputError

_VERSION = 1
_HEADER = "header"
# What numpy, zipfile (RuntimeError: encrypted), zlib and json raise for content that is not ours.
_UNREADABLE = (
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """What a statistics file holds.

    Attributes:
        stats: the observer of each tensor.
        samples_seen: number of samples they come from.
        model_key: fingerprint of the model that ran.
        data_key: digest of the samples.
    """

    stats: dict[str, Observer]
    samples_seen: int
    model_key: str
    data_key: str


def save_statistics(path: Path | str, collected: Collected, model_key: str) -> None:
    """Write the statistics, replacing the file in one step.

    Raises:
        OutputError: the file cannot be written.
    """
    header = {
        "version": _VERSION,
        "model_key": model_key,
        "data_key": collected.data_digest,
        "samples_seen": collected.samples_seen,
        "tensors": [[name, observer.kind.value] for name, observer in collected.stats.items()],
    }
    arrays: dict[str, NDArray[Any]] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for number, observer in enumerate(collected.stats.values()):
        # Tensor names may hold slashes and dots; inside the archive a number stands for each.
        arrays |= {f"{number}.{key}": array for key, array in observer.state().items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    _replace(Path(path), buffer.getvalue())


def load_statistics(path: Path | str) -> Statistics:
    """Read a statistics file.

    Raises:
        DataError: the file is missing, damaged, or of another version.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(archive[_HEADER].tobytes())
            if header["version"] != _VERSION:
                raise DataError(
                    "The statistics file has another version.",
                    where=path,
                    observed=header["version"],
                    expected=_VERSION,
                    hint="Delete it; it will be written anew.",
                )
            stats = {
                str(name): _observer(archive, number, StatKind(kind))
                for number, (name, kind) in enumerate(header["tensors"])
            }
            return Statistics(
                stats, int(header["samples_seen"]), str(header["model_key"]), str(header["data_key"])
            )
    except _UNREADABLE as error:
        raise DataError(
            "The statistics file cannot be read.",
            where=path,
            observed=f"{type(error).__name__}: {error}",
            hint="Delete it; it will be written anew.",
        ) from error


def _observer(archive: Any, number: int, kind: StatKind) -> Observer:
    prefix = f"{number}."
    state = {key.removeprefix(prefix): archive[key] for key in archive.files if key.startswith(prefix)}
    return OBSERVERS[kind].from_state(state)


def _replace(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError("The statistics file cannot be written.", where=path, observed=error) from error
