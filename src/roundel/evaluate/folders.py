"""Two folders of results, file by file: JPG, PNG and NPY, matched by name."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.data.arrayfiles import Header, load_npy
from roundel.data.folders import files_below
from roundel.errors import DataError
from roundel.evaluate.similarity import Similarity, similarity
from roundel.report.listener import Listener, Silent

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


@dataclass(frozen=True, slots=True)
class FolderScores:
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
        return {
            "baseline": self.baseline,
            "quantized": self.quantized,
            "metrics": {
                name: {"mean": _plain(m.mean), "worst": _plain(m.worst), "worst_file": m.worst_file}
                for name, m in self.metrics.items()
            },
            "files": [{"name": f.name, **_values(f.similarity)} for f in self.files],
        }

    def to_csv(self) -> str:
        """One line for each file, after a heading."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [field.name for field in fields(Similarity)]
        writer.writerow(["file", *names])
        for file in self.files:
            values = _values(file.similarity)
            writer.writerow([file.name, *("" if values[n] is None else values[n] for n in names)])
        return text.getvalue()


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
    told = listener or Silent()
    folders = Path(baseline), Path(quantized)
    pairs = _pairs(*folders)
    scores = []
    told.step("evaluate", len(pairs))
    try:
        for done, (one, other) in enumerate(pairs, start=1):
            score = similarity(*_loaded(folders[0] / one, folders[1] / other))
            scores.append(FileScore(one.as_posix(), score))
            told.advance(done)
    finally:
        told.close()
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
    for path in ours:
        candidates = by_stem.get(path.with_suffix(""), [])
        if path in exact:
            continue
        if len(candidates) == 1 and candidates[0] not in taken:
            exact[path] = candidates[0]
            taken.add(candidates[0])
        else:
            lonely.append(path)
    extra = [path for path in left if path not in taken]
    if lonely or extra:
        raise DataError(
            "The folders do not hold the same results: files have no partner.",
            where=f"{baseline} and {quantized}",
            observed="; ".join(
                f"only in {folder}: {_listed(paths)}"
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


def _listed(paths: Sequence[Path]) -> str:
    more = len(paths) - _SHOWN_NAMES
    names = ", ".join(path.as_posix() for path in paths[:_SHOWN_NAMES])
    return names + (f" and {more} more" if more > 0 else "")


def _loaded(one: Path, other: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    if (one.suffix.lower() == ".npy") != (other.suffix.lower() == ".npy"):
        raise DataError(
            "An array and an image cannot be compared.", where=one, observed=f"its partner is {other}"
        )
    if one.suffix.lower() == ".npy":
        a, b = _array(one), _array(other)
    else:
        a, b = _images(one, other)
    if a.shape != b.shape:
        raise DataError(
            "Two results of one name have different shapes.",
            where=one,
            observed=f"{list(a.shape)} and {list(b.shape)}",
            expected="the same shape",
        )
    return a, b


def _array(path: Path) -> NDArray[Any]:
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


def _images(one: Path, other: Path) -> tuple[NDArray[Any], NDArray[Any]]:
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


def _values(score: Similarity) -> dict[str, Any]:
    return {field.name: _plain(getattr(score, field.name)) for field in fields(Similarity)}


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
