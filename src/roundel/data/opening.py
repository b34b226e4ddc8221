"""The front door of the room: any data in, checked samples out."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

from roundel.data.arrayfiles import npy_source, npz_source
from roundel.data.arrays import listed
from roundel.data.folders import (
    ARRAY_SUFFIXES,
    IMAGE_SUFFIXES,
    array_folder_source,
    files_below,
    holds_images,
    image_folder_source,
    images_wanted,
)
from roundel.data.images import ImagePreprocess, plan_images
from roundel.data.samples import Item, Samples, Source
from roundel.data.sources import (
    RandomSpec,
    are_stacked,
    iterable_source,
    random_source,
    reader_source,
    stacked_source,
)
from roundel.errors import DataError, did_you_mean
from roundel.types import InputSpec


def open_samples(
    data: object,
    inputs: Sequence[InputSpec],
    *,
    limit: int | None = None,
    images: ImagePreprocess | None = None,
    random: RandomSpec | None = None,
) -> Samples:
    """Open calibration data of any supported kind.

    Args:
        data: a reader with `get_next()` (ONNX Runtime's `CalibrationDataReader`); an array, a dict of arrays
            or one array per input, samples along the first axis; any iterable of samples (dicts, tuples,
            arrays; a torch DataLoader); the path of a folder of images or of .npy/.npz files, or of one such
            file. None with `random`.
        inputs: the model's inputs, which every sample is checked against.
        limit: the largest number of samples (runs of the model).
        images: how pixels become model input: for image files, and for uint8 arrays from any other source.
        random: asks for random samples instead of data.

    Raises:
        DataError: when the data are missing, of no known kind, or do not fit the model. What can be seen
            without reading samples is raised here, the rest during iteration.
    """
    if not inputs:
        return Samples(_no_inputs(data), inputs, limit=limit)
    if random is not None:
        return Samples(_only_random(data, images, random, inputs), inputs, limit=limit)
    if isinstance(data, str | os.PathLike):
        return _open_path(Path(data), inputs, limit, images)
    return _planned(_in_memory(data, inputs), inputs, limit, images)


def _no_inputs(data: object) -> Source:
    """A model that reads nothing runs once, on nothing."""
    if data is not None:
        raise DataError(
            "The model has no inputs to feed",
            observed="no inputs",
            expected="at least one input, or no data",
            hint="Leave the data out.",
        )

    def items() -> Generator[Item, None, None]:
        yield Item({})

    return Source("nothing: the model has no inputs", items, count=1)


def _only_random(
    data: object, images: ImagePreprocess | None, random: RandomSpec, inputs: Sequence[InputSpec]
) -> Source:
    if data is not None or images is not None:
        raise DataError(
            "Random samples were asked for together with data or image preprocessing",
            observed="both",
            expected="either calibration data or random samples",
        )
    return random_source(random, inputs)


def _in_memory(data: object, inputs: Sequence[InputSpec]) -> Source:
    if data is None:
        raise DataError(
            "There are no calibration data",
            observed="None",
            expected="data for " + listed(inputs),
            hint="Pass a folder, arrays, a reader or an iterable; ask for random samples only for a trial.",
        )
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


def _open_path(
    path: Path, inputs: Sequence[InputSpec], limit: int | None, images: ImagePreprocess | None
) -> Samples:
    path = path.expanduser()
    if not path.exists():
        raise _missing(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        folder, files = path, files_below(path)
    elif suffix in ARRAY_SUFFIXES:
        source = npy_source(path, inputs) if suffix == ".npy" else npz_source(path, inputs)
        return _planned(source, inputs, limit, images)
    elif suffix in IMAGE_SUFFIXES:
        folder, files = path.parent, [Path(path.name)]
    else:
        raise DataError(
            "The file is of no kind that holds calibration data",
            where=path,
            observed=suffix or "no suffix",
            expected=", ".join(sorted(ARRAY_SUFFIXES | IMAGE_SUFFIXES)) + ", or a folder of them",
        )
    if holds_images(folder, files):
        if len(inputs) > 1:
            raise DataError(
                "Image files cannot feed a model with several inputs",
                where=path,
                observed="images",
                expected="arrays for " + listed(inputs),
                hint="Use .npz files with one array per input, or yield dicts from a generator.",
            )
        image_plan = plan_images(images or ImagePreprocess(), inputs)
        found = image_folder_source(folder, files, image_plan, images_wanted(limit, inputs))
        # No plan for the Samples: the source has preprocessed the images already, on its threads.
        return Samples(found, inputs, limit=limit)
    return _planned(array_folder_source(folder, files, inputs), inputs, limit, images)


def _planned(
    source: Source, inputs: Sequence[InputSpec], limit: int | None, images: ImagePreprocess | None
) -> Samples:
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
