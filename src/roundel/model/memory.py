"""How much memory a run may take, and what follows from it.

Nothing here decides a number in the result: with less memory the same work is done in smaller pieces, or from
files instead of from memory.
"""

from __future__ import annotations

import gc
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from roundel.errors import RecipeError
from roundel.model.graph import attribute_int, is_constant, weight_bytes
from roundel.targets.operators import LAYERS

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Budget:
    """What may lie in memory at once, in bytes.

    Attributes:
        live: activations that are fetched from all runs in flight; more run in several passes.
        held: arrays of one kind that are kept for later (samples, layer outputs); more go to a file.
        lean: weights beyond which sessions run from the mapped file, without copies of their own: slower.
        returns: whether freed blocks go back to the system at once: slower, too.
    """

    live: int = 800_000_000
    held: int = 64_000_000
    lean: int = 1_000_000_000
    returns: bool = False


_DEFAULT = Budget()
_CURRENT: ContextVar[Budget] = ContextVar("roundel_memory_budget", default=_DEFAULT)


def budget() -> Budget:
    """What the run that is going on may take."""
    return _CURRENT.get()


@contextmanager
def within(given: Budget) -> Iterator[None]:
    """Run the block with another budget; other threads keep theirs."""
    token = _CURRENT.set(given)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def parse_size(text: str | int) -> int:
    """Bytes from '2G', '512M', '1.5GiB' or a number.

    Raises:
        RecipeError: it is none of these.
    """
    found = _SIZE.fullmatch(str(text))
    if found is None:
        raise RecipeError(
            "A size of memory cannot be read.", observed=text, expected="for example 2G, 512M or 1.5GiB"
        )
    number, unit, binary = found.groups()
    if binary and not unit:
        raise RecipeError("A size of memory cannot be read.", observed=text, expected="2G or 2GiB")
    return round(float(number) * (_BINARY if binary else _UNITS)[unit.lower()])


def show_size(count: float) -> str:
    """Bytes in words that `parse_size` reads back, rounded up."""
    for unit, factor in (("G", 10**9), ("M", 10**6)):
        if count >= factor:
            tenths = -int(-count * 10 // factor)
            return f"{tenths // 10}.{tenths % 10}{unit}"
    return f"{-int(-count // 1000)}k"


@contextmanager
def older_objects_spared() -> Iterator[None]:
    """What was there before the run (modules, the caller's data) is not searched for garbage during it."""
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """No search for garbage while graphs are built: it reads every node again and again, and finds none."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model in numbers; sizes in bytes.

    Attributes:
        nodes: how many.
        weights: all initializers.
        largest_weight: the largest of them.
        mapped: those that lie in files of their own.
        inputs: one sample.
        activations: every computed tensor of one sample.
        largest_activation: the largest of them.
        peak: the most of them that a run needs at once.
        macs: multiply-accumulates of one sample.
        solving: what choosing the rounding of the largest layer takes.
    """

    nodes: int
    weights: int
    largest_weight: int
    mapped: int
    inputs: int
    activations: int
    largest_activation: int
    peak: int
    macs: int
    solving: int


def footprint(model: ir.Model) -> Footprint:
    """One walk over the graph; an open dimension counts as 1, an unknown shape as that of the first input."""
    graph = model.graph
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        sizes[str(value.name)] = _bytes(value, 0)
    fed = sum(sizes.values())
    last = {v: node for node in graph for v in node.inputs if v is not None and not is_constant(v)}
    live = peak = sum(sizes.values())
    macs, solving = 0, 0
    made: dict[str, int] = {}
    for node in graph:
        given = next((sizes.get(str(v.name), 0) for v in node.inputs if v is not None), 0)
        for value in node.outputs:
            sizes[str(value.name)] = made[str(value.name)] = _bytes(value, given)
            live += sizes[str(value.name)]
        peak = max(peak, live)
        ending = {v for v in node.inputs if v is not None and last.get(v) is node}
        live -= sum(sizes.get(str(v.name), 0) for v in ending)
        work, rows = _work(node, made)
        macs, solving = macs + work, max(solving, rows)
    constants = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
    return Footprint(
        nodes=len(graph),
        weights=weight_bytes(model),
        largest_weight=max((tensor.nbytes for tensor in constants), default=0),
        mapped=sum(tensor.nbytes for tensor in constants if isinstance(tensor, ir.ExternalTensor)),
        inputs=fed,
        activations=sum(made.values()),
        largest_activation=max(made.values(), default=0),
        peak=peak,
        macs=macs,
        solving=solving,
    )


_ROWS = 1024  # that are summed up at once when a layer is solved


def _work(node: ir.Node, made: Mapping[str, int]) -> tuple[int, int]:
    """Multiplications of a layer, and bytes of what its rounding is chosen from."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type not in LAYERS or weight is None:
        return 0, 0
    dims = [d for d in weight.shape or () if isinstance(d, int)]
    if len(dims) < 2:
        return 0, 0
    outputs = made.get(str(node.outputs[0].name), 0) // 4
    groups = attribute_int(node, "group", 1) if node.op_type.startswith("Conv") else 1
    inner = dims[0] if node.op_type in ("MatMul", "Gemm") else math.prod(dims[1:])
    if node.op_type == "Gemm" and attribute_int(node, "transB", 0):
        inner = dims[1]
    return outputs * inner, 8 * groups * inner * (2 * _ROWS + 4 * inner)


def _bytes(value: ir.Value, unknown: int) -> int:
    if value.shape is None:
        return unknown
    try:
        item = 4 if value.dtype is None else math.ceil(value.dtype.itemsize)
    except TypeError:  # text has no size of its own
        item = 16
    return item * math.prod(d if isinstance(d, int) and d > 0 else 1 for d in value.shape)


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
