"""One hash for a model on disk, whatever its data file is called."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

_PIECE = 1 << 20
_STRUCTURE = 256_000_000  # bytes; a model whose weights lie elsewhere is far smaller


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def model_sha256(path: Path) -> str:
    """SHA-256 of a model's bytes; with weights in another file, of both, the file's name left out.

    The name depends on what lay in the folder when the model was written; the content does not.
    """
    proto = _structure(path)
    names = sorted(_name_data(proto)) if proto is not None else []
    if proto is None or not names:
        return file_sha256(path)
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True))
    for name in names:
        digest.update(file_sha256(path.with_name(name)).encode())
    return digest.hexdigest()


def _structure(path: Path) -> onnx.ModelProto | None:
    if path.stat().st_size > _STRUCTURE:
        return None
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError:
        return None


def _name_data(proto: onnx.ModelProto) -> set[str]:
    """The data files' names, each replaced in the model by its number."""
    numbers: dict[str, int] = {}
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(numbers.setdefault(entry.value, len(numbers)))
    return set(numbers)
