"""One file of arrays with a header, which is read whole or not at all.

    magic | digest of all that follows | length of the header | header (JSON) | arrays, compressed

The digest finds what was cut short or changed; a kill between two writes leaves a `.partial` file that nobody
reads. No part of it is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.errors import DataError, OutputError
from roundel.types import Arrays

_MAGIC = b"roundel checkpoint 1\n"
_DIGEST = 32
_LENGTH = 8
_MOST_BYTES = 1 << 36  # of the arrays of one file; a damaged header asks for no more
_PLAIN = "biuf"
_UNREADABLE = (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, zlib.error)


def write(path: Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
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


def read(path: Path) -> tuple[dict[str, Any], Arrays]:
    """The header and the arrays of a file that `write` wrote.

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


def is_checkpoint(path: Path) -> bool:
    """Whether a file begins as ours do."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _packed(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    listed = [_described(name, np.asarray(array)) for name, array in arrays.items()]
    words = json.dumps({"header": dict(header), "arrays": [line for line, _ in listed]}).encode()
    # Counts of histograms are mostly zeros: the lowest level already takes most of it away.
    body = zlib.compress(b"".join(data for _, data in listed), 1)
    return len(words).to_bytes(_LENGTH, "little") + words + body


def _described(name: str, array: NDArray[Any]) -> tuple[list[Any], bytes]:
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
