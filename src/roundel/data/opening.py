"""Any data in, checked samples out: sources in the caller's program, random ones, and the front door."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from roundel.data import arrays, folders
from roundel.data.arrayfiles import npy_source, npz_source, stacked
from roundel.data.images import plan_images
from roundel.data.samples import Item, Samples, Source
from roundel.errors import DataError, did_you_mean
from roundel.recipe.settings import Data
from roundel.types import Array, InputSpec


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

    kind = f"reader {type(reader).__name__}"
    return _one_run_each(Source(kind, items, _length(reader), repeatable=callable(rewind)), inputs)


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
    batch = arrays.fixed_batch(inputs)
    return source if batch is None or source.count is None else replace(source, rows=source.count * batch)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (NotImplementedError, TypeError, AttributeError):
        # ONNX Runtime's base reader and torch's loader over a stream define __len__ only to refuse.
        return None


def are_stacked(data: object, inputs: Sequence[InputSpec]) -> bool:
    """Whether `data` is whole arrays (array, mapping, or one array per input), not an iterable of samples."""
    if arrays.is_array(data) or isinstance(data, Mapping):
        return True
    several = isinstance(data, list | tuple) and len(data) == len(inputs) > 1
    return several and all(arrays.is_array(part) for part in data)  # type: ignore[attr-defined]


def stacked_source(data: object, inputs: Sequence[InputSpec]) -> Source:
    """Arrays whose first axis are the samples: one array, a mapping, or one array per input."""
    notes: dict[str, None] = {}
    parts = arrays.by_name(data, inputs, "the data", notes)
    given = {
        spec.name: arrays.to_array(parts[spec.name], f"the data for input '{spec.name}'") for spec in inputs
    }
    stacks = {spec.name: arrays.stack_of(given[spec.name].shape, spec, "the data") for spec in inputs}
    count = arrays.common_count(stacks)

    def items() -> Generator[Item, None, None]:
        for index in range(count):
            yield Item({name: stack.at(given[name], index) for name, stack in stacks.items()})

    return stacked("arrays", items, stacks, inputs, {"dropped": list(notes)} if notes else {})


_IMAGE_SIDE = 224
_SEQUENCE_LENGTH = 16
_TOKENS = 100


@dataclass(frozen=True, slots=True)
class RandomSpec:
    """A request for random samples.

    Floats are uniform in [0, 1), as scaled pixels are; uint8 in [0, 256); other integers in [0, 100), which
    are valid ids in most vocabularies, or below the rows of a smaller table; booleans are fair. Open
    dimensions: batch 1; in an image-like input (rank 4) 3 channels and 224 pixels; 16 for the second axis of
    a rank-2 input; 1 otherwise. The same symbolic dimension has the same size everywhere.

    Args:
        count: number of samples.
        seed: the same seed gives the same samples on every machine and in every pass.
        ranges: (low, high) by input name, high excluded for integers.
        shapes: full shape by input name.
    """

    count: int = 10
    seed: int = 0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    shapes: Mapping[str, arrays.Shape] = field(default_factory=dict)

    def within(self, rows: Mapping[str, int]) -> RandomSpec:
        """The same, with ids that exist in tables of so many rows, by the input that looks them up."""
        small = {name: (0, size) for name, size in rows.items() if size < _TOKENS}
        return replace(self, ranges={**small, **self.ranges})


def random_source(spec: RandomSpec, inputs: Sequence[InputSpec]) -> Source:
    """Random samples for the given inputs.

    Raises:
        DataError: when the request names an unknown input, has an empty range, or an input cannot be filled.
    """
    _check(spec, inputs)
    shapes = _shapes(spec, inputs)

    def items() -> Generator[Item, None, None]:
        for index in range(spec.count):
            # A generator per sample: sample k is the same whatever the limit, and passes repeat.
            rng = np.random.default_rng([spec.seed, index])
            yield Item({i.name: _draw(rng, i, shapes[i.name], spec.ranges.get(i.name)) for i in inputs})

    facts: dict[str, object] = {"random": True, "seed": spec.seed}
    facts["shapes"] = {name: list(shape) for name, shape in shapes.items()}
    if spec.ranges:
        facts["ranges"] = {name: list(bounds) for name, bounds in spec.ranges.items()}
    rows = spec.count * (arrays.fixed_batch(inputs) or 1)
    return Source("random data", items, count=spec.count, rows=rows, facts=facts)


def _check(spec: RandomSpec, inputs: Sequence[InputSpec]) -> None:
    names = [i.name for i in inputs]
    if spec.count < 1:
        raise DataError(
            "The number of random samples is too small", observed=spec.count, expected="1 or more"
        )
    for name in (*spec.ranges, *spec.shapes):
        if name not in names:
            raise DataError(
                f"Random data were asked for input '{name}', which the model does not have",
                observed=f"'{name}'",
                expected=", ".join(f"'{n}'" for n in names),
                hint=did_you_mean(name, names),
            )
    for name, (low, high) in spec.ranges.items():
        if not low < high:
            raise DataError(
                f"The random range of input '{name}' is empty",
                observed=f"[{low}, {high})",
                expected="low < high",
            )


def _shapes(spec: RandomSpec, inputs: Sequence[InputSpec]) -> dict[str, arrays.Shape]:
    symbols: dict[str, int] = {}
    shapes: dict[str, arrays.Shape] = {}
    for i in inputs:
        if i.name in spec.shapes:
            shapes[i.name] = tuple(spec.shapes[i.name])
            for dim, size in zip(i.shape or (), shapes[i.name], strict=False):
                if isinstance(dim, str):
                    symbols.setdefault(dim, size)
    for i in inputs:
        if i.name in shapes:
            continue
        if i.shape is None:
            raise DataError(
                "Random data need a shape",
                where=f"input '{i.name}'",
                observed=str(i),
                hint="Give it in `shapes`.",
            )
        sizes: list[int] = []
        for axis, dim in enumerate(i.shape):
            size = dim if isinstance(dim, int) else symbols.get(dim or "", _open_size(i.shape, axis))
            if isinstance(dim, str):
                symbols.setdefault(dim, size)
            sizes.append(size)
        shapes[i.name] = tuple(sizes)
    return shapes


def _open_size(shape: tuple[int | str | None, ...], axis: int) -> int:
    if axis == 0:
        return 1
    if len(shape) == 2:
        return _SEQUENCE_LENGTH
    if len(shape) != 4:
        return 1
    channels_last = shape[3] in (1, 3) and shape[1] not in (1, 3)
    if channels_last:
        return _IMAGE_SIDE
    if axis == 1:
        return 3
    # A fixed channel count that no image has (attention caches: heads) is no picture.
    return _IMAGE_SIDE if not isinstance(shape[1], int) or shape[1] in (1, 3) else 1


def _draw(
    rng: np.random.Generator, spec: InputSpec, shape: arrays.Shape, bounds: tuple[float, float] | None
) -> Array:
    if arrays.is_float(spec.dtype):
        low, high = bounds or (0.0, 1.0)
        return rng.uniform(low, high, shape).astype(spec.dtype)
    if spec.dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if spec.dtype.kind in "iu":
        low, high = bounds or (0, 256 if spec.dtype == np.uint8 else _TOKENS)
        return rng.integers(int(low), int(high), shape, dtype=np.int64)
    raise DataError(
        "Random data cannot be made for this input",
        where=f"input '{spec.name}'",
        observed=str(spec),
        expected="a float, integer or boolean input",
    )


def open_samples(
    data: object,
    inputs: Sequence[InputSpec],
    *,
    limit: int | None = None,
    images: Data | None = None,
) -> Samples:
    """Open calibration data of any supported kind.

    Args:
        data: a reader with `get_next()` (ONNX Runtime's `CalibrationDataReader`); an array, a dict of arrays
            or one array per input, samples along the first axis; any iterable of samples (dicts, tuples,
            arrays; a torch DataLoader); the path of a folder of images or of .npy/.npz files, or of one such
            file; or a `RandomSpec`.
        inputs: the model's inputs, which every sample is checked against.
        limit: the largest number of samples (runs of the model).
        images: how pixels become model input: for image files, and for uint8 arrays from any other source.

    Raises:
        DataError: when the data are missing, of no known kind, or do not fit the model. What can be seen
            without reading samples is raised here, the rest during iteration.
    """
    if not inputs:
        return Samples(_no_inputs(data), inputs, limit=limit)
    if isinstance(data, str | os.PathLike):
        return _open_path(Path(data), inputs, limit, images)
    if isinstance(data, RandomSpec) and images is not None:
        raise DataError(
            "Random samples were asked for together with data or image preprocessing",
            observed="both",
            expected="either calibration data or random samples",
        )
    return _planned(_in_memory(data, inputs), inputs, limit, images)


def _no_inputs(data: object) -> Source:
    """A model that reads nothing runs once, on nothing."""
    if data is not None and not isinstance(data, RandomSpec):
        raise DataError(
            "The model has no inputs to feed",
            observed="no inputs",
            expected="at least one input, or no data",
            hint="Leave the data out.",
        )

    def items() -> Generator[Item, None, None]:
        yield Item({})

    return Source("nothing: the model has no inputs", items, count=1)


def _in_memory(data: object, inputs: Sequence[InputSpec]) -> Source:
    if data is None:
        raise DataError(
            "There are no calibration data",
            observed="None",
            expected="data for " + arrays.named_inputs(inputs),
            hint="Pass a folder, arrays, a reader or an iterable; ask for random samples only for a trial.",
        )
    if isinstance(data, RandomSpec):
        return random_source(data, inputs)
    if callable(getattr(data, "get_next", None)):
        return reader_source(data, inputs)
    if are_stacked(data, inputs):
        return stacked_source(data, inputs)
    if isinstance(data, Iterable) and not isinstance(data, bytes | bytearray):
        return iterable_source(data, inputs)
    raise DataError(
        "This is not a source of calibration data",
        observed=f"an object of type {type(data).__name__}",
        expected="a reader with get_next(), arrays, an iterable of samples, or the path of a folder or file",
    )


def _open_path(path: Path, inputs: Sequence[InputSpec], limit: int | None, images: Data | None) -> Samples:
    path = path.expanduser()
    if not path.exists():
        raise _missing(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        folder, files = path, folders.files_below(path)
    elif suffix in folders.ARRAY_SUFFIXES:
        source = npy_source(path, inputs) if suffix == ".npy" else npz_source(path, inputs)
        return _planned(source, inputs, limit, images)
    elif suffix in folders.IMAGE_SUFFIXES:
        folder, files = path.parent, [Path(path.name)]
    else:
        raise DataError(
            "The file is of no kind that holds calibration data",
            where=path,
            observed=suffix or "no suffix",
            expected=", ".join(sorted(folders.ARRAY_SUFFIXES | folders.IMAGE_SUFFIXES))
            + ", or a folder of them",
        )
    if folders.holds_images(folder, files):
        if len(inputs) > 1:
            raise DataError(
                "Image files cannot feed a model with several inputs",
                where=path,
                observed="images",
                expected="arrays for " + arrays.named_inputs(inputs),
                hint="Use .npz files with one array per input, or yield dicts from a generator.",
            )
        image_plan = plan_images(images or Data(), inputs)
        wanted = None if limit is None else limit * (arrays.fixed_batch(inputs) or 1)
        found = folders.image_folder_source(folder, files, image_plan, wanted)
        # No plan for the Samples: the source has preprocessed the images already, on its threads.
        return Samples(found, inputs, limit=limit)
    return _planned(folders.array_folder_source(folder, files, inputs), inputs, limit, images)


def _planned(source: Source, inputs: Sequence[InputSpec], limit: int | None, images: Data | None) -> Samples:
    """Arrays, of which uint8 ones may be pixels."""
    return Samples(source, inputs, limit=limit, plan=plan_images(images, inputs) if images else None)


def _missing(path: Path) -> DataError:
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    return DataError(
        "The calibration data do not exist",
        where=path,
        observed=f"no file or folder '{path.name}' in {parent}" if parent.is_dir() else f"no folder {parent}",
        expected="a folder of images or arrays, or an .npy or .npz file",
        hint=did_you_mean(path.name, names),
    )
