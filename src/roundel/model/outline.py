"""What a model file holds, told from the lengths of its parts: no weight is read, whatever its size."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

# Field numbers of onnx.proto.
_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}  # kinds of field, and bytes of those of fixed size
_REFERENCE = 4096  # a tensor that only names its file is smaller


@dataclass(frozen=True, slots=True)
class Outline:
    """A model from outside.

    Attributes:
        functions: whether it has functions of its own.
        weight_bytes: of its initializers, those in other files included.
        nodes: how many, bodies of nodes not counted.
    """

    functions: bool
    weight_bytes: int
    nodes: int


def outline_of(path: Path) -> Outline:
    """Walk over the file's two outer levels; what cannot be read, or is no model, has an empty outline."""
    functions, total, nodes = False, 0, 0
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for number, start, end in _fields(data, 0, len(data)):
                functions |= number == _MODEL_FUNCTIONS
                if number == _MODEL_GRAPH:
                    for inner, first, last in _fields(data, start, end):
                        nodes += inner == _GRAPH_NODE
                        total += _tensor_bytes(data, first, last) if inner == _GRAPH_INITIALIZER else 0
    except (OSError, ValueError):
        return Outline(False, 0, 0)  # whoever reads it next says what is wrong
    return Outline(functions, total, nodes)


def _tensor_bytes(data: mmap.mmap, start: int, end: int) -> int:
    if end - start > _REFERENCE:
        return end - start
    try:
        tensor = onnx.TensorProto.FromString(data[start:end])
    except DecodeError as error:
        raise ValueError("not a tensor") from error
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return end - start
    stated = [int(entry.value) for entry in tensor.external_data if entry.key == "length"]
    return stated[0] if stated else 4 * math.prod(tensor.dims)


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, first byte, end) of each field with a length, in the message from `start` to `end`."""
    while start < end:
        key, start = _varint(data, start)
        kind = key & 7
        if kind == _VARINT:
            _, start = _varint(data, start)
            continue
        if kind == _BYTES:
            length, start = _varint(data, start)
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise ValueError("not a protobuf message")
        if start + length > end:
            raise ValueError("a field is longer than its message")
        yield key >> 3, start, start + length
        start += length


def _varint(data: mmap.mmap, start: int) -> tuple[int, int]:
    """The number at `start`, and where it ends."""
    value = 0
    for index in range(10):
        if start + index >= len(data):
            raise ValueError("the file ends inside a number")
        byte = data[start + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, start + index + 1
    raise ValueError("a number is too long")
