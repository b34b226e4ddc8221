"""A folder of calibration data: what is in it, and in which order it is read."""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePath

from roundel.data import arrayfiles
from roundel.data.arrays import named_inputs
from roundel.data.images import ImagePlan
from roundel.data.samples import Item, Source
from roundel.errors import DataError, did_you_mean
from roundel.plain import listed
from roundel.types import Array, InputSpec

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(path: PurePath) -> tuple[object, ...]:
    """A sort key that compares runs of digits as numbers, part by part of the path."""
    parts = tuple(
        tuple(
            (0, int(piece), "") if piece.isdigit() else (1, 0, piece)
            for piece in _DIGITS.split(part.casefold())
        )
        for part in path.parts
    )
    # The plain text last, so that names that differ only in case or in leading zeros keep one order.
    return (parts, str(path))


IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif"})
ARRAY_SUFFIXES = frozenset({".npy", ".npz"})
_DECODERS = 2
_LOOK_AHEAD = 4


def files_below(folder: Path) -> list[Path]:
    """All visible files below a folder, relative to it, in natural order; follows links, but no cycles."""
    found: list[Path] = []
    visited: set[str] = set()
    for here, folders, files in os.walk(folder, followlinks=True):
        real = str(Path(here).resolve())
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        found.extend((Path(here) / name).relative_to(folder) for name in files if not name.startswith("."))
    return sorted(found, key=natural_key)


def holds_images(folder: Path, files: Sequence[Path]) -> bool:
    """Whether the folder is one of images (True) or of arrays (False).

    Raises:
        DataError: when it is both or neither.
    """
    kinds = Counter(path.suffix.lower() for path in files)
    images = sum(kinds[suffix] for suffix in IMAGE_SUFFIXES)
    arrays = sum(kinds[suffix] for suffix in ARRAY_SUFFIXES)
    usable = ", ".join(sorted(IMAGE_SUFFIXES | ARRAY_SUFFIXES))
    if images and arrays:
        raise DataError(
            "The folder mixes images and arrays",
            where=folder,
            observed=f"{images} image files and {arrays} array files",
            expected="only images, or only .npy and .npz files",
            hint="Put the files that are the calibration data into a folder of their own.",
        )
    if not images and not arrays:
        seen = ", ".join(f"{count} x {suffix or '(no suffix)'}" for suffix, count in kinds.most_common(8))
        raise DataError(
            "The folder holds no calibration data",
            where=folder,
            observed=seen or "no files",
            expected=f"files that end in {usable}",
        )
    return images > 0


def image_folder_source(folder: Path, files: Sequence[Path], plan: ImagePlan, wanted: int | None) -> Source:
    """A folder of images, in class sub-folders or not.

    Args:
        folder: the folder.
        files: the files in it, relative to it.
        plan: how an image becomes model input.
        wanted: how many images are needed at most. Fewer than there are: evenly spaced over the sorted names,
            because the first hundred of a sorted data set are often all of one class.
    """
    pictures = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    facts: dict[str, object] = {"path": str(folder), "files": len(pictures), "preprocessing": plan.describe()}
    if plan.options.scale is None and plan.options.mean is None and plan.options.std is None:
        facts["preprocessing_chosen_by"] = "default: set mean and std as in training if the model needs them"
    if wanted is not None and wanted < len(pictures):
        pictures = [pictures[index * len(pictures) // wanted] for index in range(wanted)]
        facts["selection"] = f"{wanted} files, evenly spaced over the sorted names"

    def items() -> Generator[Item, None, None]:
        return decode_ahead(pictures, lambda path: plan.read(folder / path))

    count, readable = len(pictures), (folder, pictures, plan.read)
    source = Source("image folder", items, count=count, rows=count, facts=facts, files=readable)
    return replace(source, images=(folder, plan))


def decode_ahead(paths: Iterable[Path], read: Callable[[Path], Array]) -> Generator[Item, None, None]:
    """Read files in order on a few threads, a few files ahead of the consumer and never more."""
    with ThreadPoolExecutor(_DECODERS, thread_name_prefix="roundel-images") as pool:
        ahead: deque[tuple[Path, Future[Array]]] = deque()
        try:
            for path in paths:
                ahead.append((path, pool.submit(read, path)))
                if len(ahead) >= _LOOK_AHEAD:
                    yield _next(ahead)
            while ahead:
                yield _next(ahead)
        finally:
            for _, future in ahead:
                future.cancel()


def _next(ahead: deque[tuple[Path, Future[Array]]]) -> Item:
    path, future = ahead.popleft()
    return Item(future.result(), str(path))


def array_folder_source(folder: Path, files: Sequence[Path], inputs: Sequence[InputSpec]) -> Source:
    """A folder of .npy and .npz files: one sample (or batch) per file, or a sub-folder of .npy per input.

    Raises:
        DataError: when several inputs are not each provided for.
    """
    if any(path.suffix.lower() == ".npy" for path in files):
        groups = _folders_by_input(files, inputs)
        if groups is not None:
            inside = sum(len(group) for group in groups.values())
            total = sum(path.suffix.lower() in ARRAY_SUFFIXES for path in files)
            return _paired_source(folder, groups, inputs, ignored=total - inside)
        if len(inputs) > 1:
            raise _unpaired(folder, files, inputs)
    arrays = [path for path in files if path.suffix.lower() in ARRAY_SUFFIXES]

    def items() -> Generator[Item, None, None]:
        for path in arrays:
            yield Item(_load_sample(folder / path, inputs), str(path))

    facts: dict[str, object] = {"path": str(folder), "files": len(arrays)}
    rows = _rows_of(folder / arrays[0], len(arrays), inputs)
    return Source("array folder", items, count=len(arrays), rows=rows, facts=facts)


def _rows_of(first: Path, count: int, inputs: Sequence[InputSpec]) -> int | None:
    """Rows in `count` files that are like the first one: an estimate for progress, from one header."""
    if first.suffix.lower() != ".npy":
        return None
    shape, rank = arrayfiles.npy_header(first).shape, len(inputs[0].shape or ())
    return count * shape[0] if rank and len(shape) == rank else count


def _load_sample(path: Path, inputs: Sequence[InputSpec]) -> object:
    if path.suffix.lower() == ".npy":
        return _load_for(path, inputs[0], inputs)
    headers = arrayfiles.npz_headers(path)
    chosen = arrayfiles.pick_arrays(headers, inputs, str(path))
    for spec in inputs:
        arrayfiles.check_sample(headers[chosen[spec.name]], spec, str(path), inputs)
    arrays = arrayfiles.load_npz(path, chosen.values())
    return {name: arrays[array] for name, array in chosen.items()}


def _load_for(path: Path, spec: InputSpec, inputs: Sequence[InputSpec]) -> Array:
    return arrayfiles.load_npy(path, lambda h: arrayfiles.check_sample(h, spec, str(path), inputs))


def folder_name(input_name: str) -> str:
    """An input name as a sub-folder: characters that file systems refuse become an underscore."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", input_name)


def _folders_by_input(
    files: Sequence[Path], inputs: Sequence[InputSpec]
) -> dict[str, dict[str, Path]] | None:
    groups: dict[str, dict[str, Path]] = {}
    for spec in inputs:
        for name in (spec.name, folder_name(spec.name)):
            base = Path(name)
            inside = [p for p in files if p.suffix.lower() == ".npy" and p.is_relative_to(base)]
            if inside:
                groups[spec.name] = {str(p.relative_to(base).with_suffix("")): p for p in inside}
                break
    return groups if len(groups) == len(inputs) else None


def _unpaired(folder: Path, files: Sequence[Path], inputs: Sequence[InputSpec]) -> DataError:
    present = sorted({path.parts[0] for path in files if len(path.parts) > 1})
    wanted = [folder_name(spec.name) for spec in inputs]
    absent = [name for name in wanted if name not in present]
    return DataError(
        "The folder does not have one sub-folder per model input",
        where=folder,
        observed="sub-folders " + ", ".join(f"'{n}'" for n in present) if present else "no sub-folders",
        expected="sub-folders " + ", ".join(f"'{n}'" for n in wanted) + f" for {named_inputs(inputs)}",
        hint=(did_you_mean(absent[0], present) if absent else None)
        or "Or use .npz files with one array per input.",
    )


def _paired_source(
    folder: Path, groups: dict[str, dict[str, Path]], inputs: Sequence[InputSpec], *, ignored: int
) -> Source:
    stems = list(groups[inputs[0].name])
    for first, second in [(inputs[0], spec) for spec in inputs[1:]]:
        for one, other in ((first, second), (second, first)):
            lonely = [stem for stem in groups[one.name] if stem not in groups[other.name]]
            if lonely:
                raise DataError(
                    f"A sample of input '{one.name}' has no partner for input '{other.name}'",
                    where=folder,
                    observed=listed([groups[one.name][stem] for stem in lonely], 1),
                    expected=f"{folder_name(other.name)}/{lonely[0]}.npy beside it",
                    hint="Files are paired by name across the sub-folders; remove or add the missing ones.",
                )

    def items() -> Generator[Item, None, None]:
        for stem in stems:
            paths = {spec.name: groups[spec.name][stem] for spec in inputs}
            value = {spec.name: _load_for(folder / paths[spec.name], spec, inputs) for spec in inputs}
            yield Item(value, stem if len(inputs) > 1 else str(paths[inputs[0].name]))

    facts: dict[str, object] = {"path": str(folder), "files": len(stems) * len(inputs)}
    if ignored:
        facts["ignored_files"] = ignored
    rows = _rows_of(folder / groups[inputs[0].name][stems[0]], len(stems), inputs)
    return Source("array folder", items, count=len(stems), rows=rows, facts=facts)
