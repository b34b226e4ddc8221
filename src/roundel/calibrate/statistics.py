"""Statistics on disk: one .npz of plain arrays with a JSON header, never pickle."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roundel.calibrate.collect import Collected
from roundel.calibrate.observers import OBSERVERS, Observer, StatKind
from roundel.data.arrayfiles import load_npz, npz_headers
from roundel.errors import DataError, OutputError
from roundel.types import Array

_VERSION = 1
_MAX_BYTES = 4_000_000_000
_HEADER = "header"
# What numpy, zipfile (RuntimeError: encrypted), zlib and json raise for content that is not ours.
_UNREADABLE = (
    AttributeError,
    IndexError,
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
    arrays: dict[str, Array] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
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
        arrays = _arrays(Path(path))
        header = json.loads(arrays[_HEADER].tobytes())
        if header["version"] != _VERSION:
            raise DataError(
                "The statistics file has another version.",
                where=path,
                observed=header["version"],
                expected=_VERSION,
                hint="Give another file name: the statistics are gathered again and written there.",
            )
        stats = {
            str(name): _observer(arrays, number, StatKind(kind))
            for number, (name, kind) in enumerate(header["tensors"])
        }
        return Statistics(
            stats, int(header["samples_seen"]), str(header["model_key"]), str(header["data_key"])
        )
    except _UNREADABLE as error:
        raise DataError(
            "This is not a statistics file, or a damaged one.",
            where=path,
            observed=f"{type(error).__name__}: {error}",
            expected="a file that an earlier run wrote",
            hint="Give another file name: the statistics are gathered again and written there.",
        ) from error


def _arrays(path: Path) -> dict[str, Array]:
    """What the archive holds, once its headers say that it is numbers, and not too many of them."""
    try:
        headers = npz_headers(path)
        needed = sum(header.nbytes for header in headers.values())
        if needed > _MAX_BYTES:
            raise ValueError(f"it unpacks to {needed} bytes")
        return load_npz(path, list(headers))
    except DataError as error:
        raise ValueError(error.observed) from error


def _observer(arrays: Mapping[str, Array], number: int, kind: StatKind) -> Observer:
    prefix = f"{number}."
    state = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
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
