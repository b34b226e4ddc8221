"""What a run has done so far, on disk: files of plain arrays with a digest, never a pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.errors import DataError, OutputError, RecipeError
from roundel.types import Array, Arrays
from roundel.version import VERSION


def as_array(tree: Any) -> NDArray[np.uint8]:
    """Plain values as bytes; infinities and NaN survive."""
    return np.frombuffer(json.dumps(tree).encode(), np.uint8)


def as_tree(array: Array) -> Any:
    """The inverse of `as_array`."""
    return json.loads(array.tobytes())


_MAGIC = b"roundel checkpoint 1\n"
_DIGEST = 32
_LENGTH = 8
_MOST_BYTES = 1 << 36  # of the arrays of one file; a damaged header asks for no more
_PLAIN = "biuf"
_UNREADABLE = (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, zlib.error)


def write_checkpoint(path: Path, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Replace a file in one step that survives a crash of the machine.

    Raises:
        OutputError: it cannot be written.
    """
    content = _packed(header, arrays)
    # One name, so that what a killed run leaves behind is overwritten and not collected.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(_MAGIC + hashlib.blake2b(content, digest_size=_DIGEST).digest())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise OutputError(
            "The checkpoint cannot be written.", where=path, observed=error.strerror or error
        ) from error


def read_checkpoint(path: Path) -> tuple[dict[str, Any], Arrays]:
    """The header and the arrays of a file that `write_checkpoint` wrote.

    Raises:
        DataError: it is damaged, or something else.
    """
    try:
        content = path.read_bytes()
        start = len(_MAGIC) + _DIGEST
        if content[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin as a checkpoint of this version does")
        if hashlib.blake2b(content[start:], digest_size=_DIGEST).digest() != content[len(_MAGIC) : start]:
            raise ValueError("its digest is not that of its content")
        return _unpacked(content[start:])
    except _UNREADABLE as error:
        raise DataError(
            "The checkpoint cannot be read.",
            where=path,
            observed=" ".join(str(error).split())[:200],
            hint="Delete it to start again.",
        ) from error


def _packed(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    listed = [_described(name, np.asarray(array)) for name, array in arrays.items()]
    words = json.dumps({"header": dict(header), "arrays": [line for line, _ in listed]}).encode()
    # Counts of histograms are mostly zeros: the lowest level already takes most of it away.
    body = zlib.compress(b"".join(data for _, data in listed), 1)
    return len(words).to_bytes(_LENGTH, "little") + words + body


def _described(name: str, array: Array) -> tuple[list[Any], bytes]:
    if array.dtype.kind in "OUST":
        words = [w.decode("utf-8", "surrogateescape") if isinstance(w, bytes) else str(w) for w in array.flat]
        return [name, "text", list(array.shape), words], b""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [name, array.dtype.name, list(array.shape), None], np.ascontiguousarray(little).tobytes()


def _unpacked(content: bytes) -> tuple[dict[str, Any], Arrays]:
    start = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    tree = json.loads(content[_LENGTH:start])
    header, listed = dict(tree["header"]), list(tree["arrays"])
    wanted = sum(_bytes(kind, shape) for _, kind, shape, _ in listed)
    if wanted > _MOST_BYTES:
        raise ValueError(f"its arrays would take {wanted} bytes")
    unpack = zlib.decompressobj()
    body = unpack.decompress(content[start:], wanted + 1)
    if len(body) != wanted:
        raise ValueError("its arrays are longer or shorter than its header says")
    arrays: Arrays = {}
    place = 0
    for name, kind, shape, words in listed:
        if kind == "text":
            arrays[str(name)] = np.array(words, dtype=object).reshape(shape)
            continue
        size = _bytes(kind, shape)
        flat = np.frombuffer(body, _dtype(kind), count=math.prod(shape), offset=place)
        arrays[str(name)] = flat.reshape(shape).copy()
        place += size
    return header, arrays


def _dtype(kind: str) -> np.dtype[Any]:
    dtype = np.dtype(kind)  # onnx-ir has taught numpy bfloat16 and its like by name
    return dtype.newbyteorder("<") if dtype.kind in _PLAIN and dtype.itemsize > 1 else dtype


def _bytes(kind: str, shape: list[int]) -> int:
    if any(not isinstance(side, int) or side < 0 for side in shape):
        raise ValueError("an array has no shape")
    return 0 if kind == "text" else math.prod(shape) * np.dtype(kind).itemsize


def _sync_folder(folder: Path) -> None:
    """The new name, too, must be on disk; systems without folder handles do that by themselves."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


SUFFIX = ".ckpt"


@dataclass(frozen=True, slots=True)
class Store:
    """Where a run writes down what is done.

    Attributes:
        folder: for its files.
        resume: whether to go on from what an earlier run left there.
    """

    folder: Path
    resume: bool = False

    def memory(self, step: str, key: Mapping[str, str]) -> Memory:
        """What is known about one step.

        Args:
            step: its name, which begins the names of its files.
            key: digests of everything that decides its results, each under its name for people.
        """
        import onnxruntime

        versions = {
            "version of Roundel": VERSION,
            "version of ONNX Runtime": str(onnxruntime.__version__),
            "version of numpy": np.__version__,
        }
        return Memory(self, step, {**versions, **key})


@dataclass(frozen=True, slots=True)
class Memory:
    """The finished parts of one step.

    Attributes:
        store: where they are.
        step: its name.
        key: what decides the results.
    """

    store: Store
    step: str
    key: Mapping[str, str]

    def load(self, part: int | str, digest: str = "") -> Arrays | None:
        """What was saved about a part; None where nothing was, or where the run does not resume.

        Args:
            part: its number or name.
            digest: of what the part worked on.

        Raises:
            DataError: the file is damaged, or of another run.
        """
        path = self._path(part)
        if not self.store.resume or not path.exists():
            return None
        header, arrays = read_checkpoint(path)
        _check_key(path, header.get("key"), {**self.key, "set of samples": digest})
        return arrays

    def save(self, part: int | str, arrays: Arrays, digest: str = "") -> None:
        """Write a part down.

        Raises:
            OutputError: it cannot be written.
        """
        write_checkpoint(self._path(part), {"key": {**self.key, "set of samples": digest}}, arrays)

    def _path(self, part: int | str) -> Path:
        name = f"{part:06d}" if isinstance(part, int) else part
        return self.store.folder / f"{self.step}-{name}{SUFFIX}"


def open_store(place: str | Path | None, *, resume: bool) -> Store | None:
    """The folder for a run's checkpoints, made where there is none; None where nobody asked.

    Without `resume`, checkpoints of earlier runs there are removed; nothing else is.

    Raises:
        RecipeError: there is nothing to resume from.
        OutputError: the folder cannot be used.
    """
    if place is None:
        if resume:
            raise RecipeError(
                "There is nothing to resume from.",
                expected="a checkpoint: the folder that the earlier run was given",
                hint="Pass checkpoint=… (command line: --checkpoint DIR).",
            )
        return None
    folder = Path(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in () if resume else sorted(folder.glob(f"*{SUFFIX}")):
            _remove(path)
        for path in folder.glob(f".*{SUFFIX}.partial"):
            path.unlink()
    except OSError as error:
        raise OutputError(
            "The checkpoint's folder cannot be used.",
            where=folder,
            observed=error.strerror or error,
            expected="a folder that can be written to",
        ) from error
    return Store(folder, resume)


def _check_key(path: Path, found: object, wanted: Mapping[str, str]) -> None:
    """Refuse what another run has written.

    Raises:
        DataError: a part of the key differs.
    """
    known: Mapping[str, Any] = found if isinstance(found, dict) else {}
    other = [part for part, digest in wanted.items() if known.get(part) != digest]
    if other:
        raise DataError(
            "The checkpoint belongs to another run.",
            where=path,
            observed=f"another {other[0]}",
            expected="the same model, recipe, samples and versions",
            hint="Give the options of that run, delete the checkpoint, or run without resuming.",
        )


def _remove(path: Path) -> None:
    """A file that begins as a checkpoint does may be removed; nothing else may."""
    try:
        with path.open("rb") as file:
            ours = file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        ours = False
    if not ours:
        raise OutputError(
            "The checkpoint would overwrite a file that is not a checkpoint.",
            where=path,
            hint="Choose another folder, or delete the file.",
        )
    path.unlink()
