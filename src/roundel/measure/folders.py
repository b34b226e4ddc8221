"""Two folders of results, file by file: arrays and pictures, and how much alike two of a name are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roundel.data.arrayfiles import Header, load_npy
from roundel.data.folders import files_below
from roundel.errors import DataError, OutputError
from roundel.numerics.metrics import decibels
from roundel.plain import Card, counted, csv_text, listed, to_plain
from roundel.types import Array, Doubles, Listener, heard_by

if TYPE_CHECKING:
    from PIL.Image import Image

_COLOURS = (1, 3, 4)
_LEAST_SIDE = 5  # a smaller plane is a table of numbers, whatever its rank


def planes(array: Array) -> Array | None:
    """(planes, height, width) of an array that holds pictures; None for one that does not.

    Rank 3 and up: the last two axes are height and width, or the two before a last axis of 1, 3 or 4
    colours. A matrix is rows of numbers, not a picture: models give [batch, classes].
    """
    if array.ndim < 3 or array.dtype.kind not in "fiub":
        return None
    first = array.ndim > 2 and array.shape[-3] in _COLOURS
    if array.shape[-1] in _COLOURS and not first:
        array = np.moveaxis(array, -1, -3)
    height, width = array.shape[-2:]
    if min(height, width) < _LEAST_SIDE:
        return None
    return array.reshape(-1, height, width)


def to_picture(array: Array, what: str) -> Image:
    """One picture: floats in 0..1 become 0..255, integers stay; what lies outside is cut off.

    Raises:
        OutputError: the array is not one grey or colour picture.
    """
    import PIL.Image

    stack = planes(array)
    if stack is None or len(stack) not in (1, 3):
        raise OutputError(
            "An output is not a picture.",
            where=what,
            observed=f"{array.dtype} array of shape {list(array.shape)}",
            expected="[1, C, H, W], [1, H, W, C] or [H, W, C] with 1 or 3 colours",
            hint="Save arrays instead: leave out --images.",
        )
    if stack.dtype.kind == "f":
        stack = np.rint(np.nan_to_num(stack) * 255)
    pixels = np.clip(stack, 0, 255).astype(np.uint8)
    return PIL.Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1))


_SIDE, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03
_OFFSETS = np.arange(_SIDE) - _SIDE // 2
_KERNEL = np.exp(-(_OFFSETS**2) / (2 * _SIGMA**2))
_KERNEL /= _KERNEL.sum()


@dataclass(frozen=True, slots=True)
class Similarity:
    """One pair of results.

    Attributes:
        cosine: of the angle between them, as long vectors.
        l2: length of their difference.
        psnr_db: peak signal to noise; infinite when equal.
        ssim: structural similarity, 1 when equal; None for results that are not pictures.
    """

    cosine: float
    l2: float
    psnr_db: float
    ssim: float | None


def similarity(baseline: Array, other: Array) -> Similarity:
    """Compare two arrays of one shape.

    The peak of 8-bit images is 255. Of other arrays it is the baseline's largest magnitude for PSNR, and the
    width of the baseline's range for SSIM.
    """
    a, b = np.asarray(baseline, np.float64), np.asarray(other, np.float64)
    pixels = baseline.dtype == np.uint8
    difference = a - b
    squares = float(np.vdot(difference, difference))
    peak = 255.0 if pixels else float(np.abs(a).max()) if a.size else 0.0
    span = 255.0 if pixels else float(np.ptp(a)) if a.size else 0.0
    psnr_db = decibels(peak**2 * a.size, squares)
    return Similarity(_cosine(a, b), math.sqrt(squares), psnr_db, ssim(a, b, span))


def _cosine(a: Doubles, b: Doubles) -> float:
    norm = float(np.linalg.norm(a.ravel()) * np.linalg.norm(b.ravel()))
    if norm == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return max(-1.0, min(1.0, float(np.vdot(a, b)) / norm))


def ssim(a: Doubles, b: Doubles, span: float) -> float | None:
    """Structural similarity, the mean over all planes and places where the window fits.

    Args:
        a: one picture, or a stack of them.
        b: the other.
        span: width of the range of values (255 for pixels).

    Returns:
        None when the arrays are not pictures or smaller than the window.
    """
    first, second = planes(a), planes(b)
    if first is None or second is None or min(first.shape[1:]) < _SIDE:
        return None
    if span == 0:
        return 1.0 if np.array_equal(a, b) else 0.0
    c1, c2 = (_K1 * span) ** 2, (_K2 * span) ** 2
    values = []
    for x, y in zip(first, second, strict=True):
        mean_x, mean_y = _blur(x), _blur(y)
        var_x, var_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
        covariance = _blur(x * y) - mean_x * mean_y
        top = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
        values.append(top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2)))
    return float(np.mean(values))


def _blur(plane: Doubles) -> Doubles:
    """The Gaussian mean around every place where the window fits, first down, then across."""
    height, width = plane.shape[0] - _SIDE + 1, plane.shape[1] - _SIDE + 1
    rows = sum(weight * plane[i : i + height] for i, weight in enumerate(_KERNEL))
    return np.asarray(sum(weight * rows[:, i : i + width] for i, weight in enumerate(_KERNEL)))


SUFFIXES = (".jpg", ".jpeg", ".png", ".npy")
_WORST = {"cosine": min, "l2": max, "psnr_db": min, "ssim": min}
_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class FileScore:
    """One pair of files.

    Attributes:
        name: of the baseline file, relative to its folder.
        similarity: of the two.
    """

    name: str
    similarity: Similarity


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric over all files.

    Attributes:
        mean: over the files that have it.
        worst: of these.
        worst_file: where that is.
    """

    mean: float
    worst: float
    worst_file: str


@dataclass(frozen=True, slots=True, repr=False)
class FolderScores(Card):
    """All pairs of two folders.

    Attributes:
        baseline: the float model's results.
        quantized: the quantized model's results.
        files: in natural order of their names.
        metrics: by metric name (cosine, l2, psnr_db, ssim); a metric that no file has is left out.
    """

    baseline: str
    quantized: str
    files: tuple[FileScore, ...]
    metrics: Mapping[str, Summary]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinite numbers become strings, since JSON has none."""
        return {**to_plain(self), "files": [{"name": f.name, **to_plain(f.similarity)} for f in self.files]}

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        title = {"folders": f"{counted(len(self.files), 'file')} of {self.baseline} and {self.quantized}"}
        return title | {
            ", ".join(self.metrics): ", ".join(f"{m.mean:.6g}" for m in self.metrics.values()),
            "worst": ", ".join(f"{m.worst:.6g}" for m in self.metrics.values()),
        }

    def to_csv(self) -> str:
        """One line for each file, after a heading."""
        return csv_text([{"file": file.name, **to_plain(file.similarity)} for file in self.files])


def evaluate_folders(
    baseline: str | Path, quantized: str | Path, *, listener: Listener | None = None
) -> FolderScores:
    """Compare two folders of results, matched by file name.

    Args:
        baseline: results of the float model: .jpg, .png or .npy files, in sub-folders or not.
        quantized: results of the quantized model, under the same names.
        listener: told about progress.

    Raises:
        DataError: a folder is missing or empty, a file has no partner, or two partners do not fit together.
    """
    folders = Path(baseline), Path(quantized)
    pairs = _pairs(*folders)
    scores = []
    with heard_by(listener) as told:
        told.step("evaluate", len(pairs))
        for done, (one, other) in enumerate(pairs, start=1):
            score = similarity(*_loaded(folders[0] / one, folders[1] / other))
            scores.append(FileScore(one.as_posix(), score))
            told.advance(done)
    return FolderScores(str(baseline), str(quantized), tuple(scores), _summaries(scores))


def _pairs(baseline: Path, quantized: Path) -> list[tuple[Path, Path]]:
    """Partners by name; a name may differ in its ending (a.png and a.jpg) where that leaves no choice."""
    ours, theirs = _results(baseline), _results(quantized)
    exact = {path: path for path in ours if path in set(theirs)}
    left = [path for path in theirs if path not in exact]
    by_stem: dict[Path, list[Path]] = {}
    for path in left:
        by_stem.setdefault(path.with_suffix(""), []).append(path)
    lonely, taken = [], set(exact)
    for path in (path for path in ours if path not in exact):
        candidates = by_stem.get(path.with_suffix(""), [])
        if len(candidates) != 1 or candidates[0] in taken:
            lonely.append(path)
            continue
        exact[path] = candidates[0]
        taken.add(candidates[0])
    extra = [path for path in left if path not in taken]
    if lonely or extra:
        raise DataError(
            "The folders do not hold the same results: files have no partner.",
            where=f"{baseline} and {quantized}",
            observed="; ".join(
                f"only in {folder}: {listed([path.as_posix() for path in paths], _SHOWN_NAMES)}"
                for folder, paths in ((baseline, lonely), (quantized, extra))
                if paths
            ),
            expected="the same file names in both folders",
            hint="Run both models over the same data, each into an empty folder.",
        )
    return [(path, exact[path]) for path in ours]


def _results(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(
            "The results folder does not exist.", where=folder, hint="`roundel infer` writes one."
        )
    found = [path for path in files_below(folder) if path.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError(
            "The results folder holds no results.",
            where=folder,
            expected="files that end in " + ", ".join(SUFFIXES),
            hint="`roundel infer MODEL --data DIR --out DIR` writes them.",
        )
    return found


def _loaded(one: Path, other: Path) -> tuple[Array, Array]:
    arrays, others = (path.suffix.lower() == ".npy" for path in (one, other))
    if arrays != others:
        raise DataError(
            "An array and an image cannot be compared.", where=one, observed=f"its partner is {other}"
        )
    a, b = (_array(one), _array(other)) if arrays else _images(one, other)
    if a.shape != b.shape:
        raise DataError(
            "Two results of one name have different shapes.",
            where=one,
            observed=f"{list(a.shape)} and {list(b.shape)}",
            expected="the same shape",
        )
    return a, b


def _array(path: Path) -> Array:
    def check(header: Header) -> None:
        if header.dtype.kind not in "fiub":
            raise DataError("A result is not an array of numbers.", where=path, observed=header)

    array = load_npy(path, check)
    if not np.isfinite(array).all():
        raise DataError(
            "A result holds values that are not finite.",
            where=path,
            observed=f"{int(np.count_nonzero(~np.isfinite(array)))} of {array.size}",
        )
    # 8 bits mean pixels only in image files.
    return array.astype(np.float64) if array.dtype.kind != "f" else array


def _images(one: Path, other: Path) -> tuple[Array, Array]:
    import PIL.Image

    loaded = []
    for path in (one, other):
        try:
            with PIL.Image.open(path) as image:
                image.load()
                loaded.append(image.copy())
        except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
            raise DataError("An image cannot be read.", where=path, observed=error) from error
    grey = all(image.mode in ("L", "1") for image in loaded)
    first, second = (np.asarray(image.convert("L" if grey else "RGB")) for image in loaded)
    return first, second


def _summaries(scores: Sequence[FileScore]) -> dict[str, Summary]:
    found = {}
    for name, worst in _WORST.items():
        values = [(v, s.name) for s in scores if (v := getattr(s.similarity, name)) is not None]
        if values:
            value, file = worst(values, key=lambda pair: pair[0])
            found[name] = Summary(math.fsum(v for v, _ in values) / len(values), value, file)
    return found
