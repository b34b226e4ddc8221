"""Sources that live in the caller's program: readers, arrays, iterables, data loaders."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundel.data.arrays import Array, is_array, to_array
from roundel.data.batching import fixed_batch
from roundel.data.naming import by_name
from roundel.data.samples import Item, Source
from roundel.data.stacking import Stack, common_count, stack_of
from roundel.errors import DataError
from roundel.types import InputSpec


def reader_source(reader: Any, inputs: Sequence[InputSpec]) -> Source:
    """Wrap an ONNX Runtime `CalibrationDataReader`, recognised by its `get_next()`.

    A reader with `rewind()` can be read again; another one once.
    """
    rewind: Callable[[], object] | None = getattr(reader, "rewind", None)
    passes = 0

    def items() -> Generator[Item, None, None]:
        nonlocal passes
        passes += 1
        # Not before the first pass: the reader stands at its start, and its rewind() may be costly.
        if passes > 1 and rewind is not None:
            rewind()
        while (value := reader.get_next()) is not None:
            yield Item(value)

    return _one_run_each(
        Source(f"reader {type(reader).__name__}", items, count=_length(reader), repeatable=callable(rewind)),
        inputs,
    )


def iterable_source(data: Iterable[object], inputs: Sequence[InputSpec]) -> Source:
    """Wrap any iterable of samples; it is never turned into a list."""
    # An iterator is its own iter(): it stands somewhere and cannot go back.
    once = hasattr(data, "__next__")
    kind = f"{'iterator' if once else 'iterable'} {type(data).__name__}"

    def items() -> Generator[Item, None, None]:
        for value in data:
            yield Item(value)

    source = Source(kind, items, count=_length(data), repeatable=not once)
    # A data loader has batches of its own, so its length says little about a model with a fixed batch.
    return _one_run_each(source, inputs) if isinstance(data, list | tuple) else source


def _one_run_each(source: Source, inputs: Sequence[InputSpec]) -> Source:
    batch = fixed_batch(inputs)
    if batch is None or source.count is None:
        return source
    return Source(
        source.kind,
        source.items,
        count=source.count,
        rows=source.count * batch,
        repeatable=source.repeatable,
        facts=source.facts,
    )


def _length(data: Any) -> int | None:
    if not hasattr(data, "__len__"):
        return None
    try:
        return len(data)
    except (NotImplementedError, TypeError, AttributeError):
        # ONNX Runtime's base reader and torch's loader over a stream define __len__ only to refuse.
        return None


def are_stacked(data: object, inputs: Sequence[InputSpec]) -> bool:
    """Whether `data` is whole arrays (array, mapping, or one array per input), not an iterable of samples."""
    if is_array(data) or isinstance(data, Mapping):
        return True
    several = isinstance(data, list | tuple) and len(data) == len(inputs) > 1
    return several and all(is_array(part) for part in data)  # type: ignore[attr-defined]


def stacked_source(data: object, inputs: Sequence[InputSpec]) -> Source:
    """Arrays whose first axis are the samples: one array, a mapping, or one array per input."""
    notes: dict[str, None] = {}
    parts = by_name(data, inputs, "the data", notes)
    stacks: list[_Rows] = []
    for spec in inputs:
        array = to_array(parts[spec.name], f"the data for input '{spec.name}'")
        stacks.append(_Rows(array, stack_of(array.shape, spec, "the data")))
    count = common_count([(spec.name, rows.stack) for spec, rows in zip(inputs, stacks, strict=True)])

    def items() -> Generator[Item, None, None]:
        for index in range(count):
            yield Item({spec.name: rows.at(index) for spec, rows in zip(inputs, stacks, strict=True)})

    facts: dict[str, object] = {"dropped": list(notes)} if notes else {}
    whole = all(rows.stack.count is None for rows in stacks)
    return Source("arrays", items, count=count, rows=fixed_batch(inputs) if whole else count, facts=facts)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    array: Array
    stack: Stack

    def at(self, index: int) -> Array:
        if self.stack.count is None:
            return self.array
        return self.array[index : index + 1] if self.stack.keep_axis else self.array[index]


def refuse(data: object) -> DataError:
    """The error for something that is no data source."""
    return DataError(
        "This is not a source of calibration data",
        observed=f"an object of type {type(data).__name__}",
        expected=(
            "a reader with get_next(), arrays, an iterable of samples, or the path of a folder or file"
        ),
    )
