"""True boxes: COCO's instances, or boxes by file name; and what they make of the boxes that models find."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx_ir as ir

from roundel.data.images import ImagePlan
from roundel.errors import DataError
from roundel.measure.average_precision import Found, Integers, Truth, box_f1, mean_average_precision
from roundel.measure.detection import NMS_IOU, BoxReader, found_in
from roundel.plain import listed
from roundel.types import Array, Arrays

_FORMS = (
    "COCO's instances {images: [{id, file_name}], annotations: [{image_id, category_id, bbox: [left, top,"
    " width, height]}], categories: [{id}]} in pixels, or {file name: [{category_id, box: [left, top, right,"
    " bottom]}]} in parts of the image, 0..1"
)
BOX_METRICS = {"map": "mAP50-95", "boxf1": "box F1"}
"""Names of the metrics that judge boxes, and what `DetectionScores` calls them."""
Images = tuple[Path, ImagePlan]
_INSTANCES = frozenset({"images", "annotations", "categories"})
_FARTHEST = 2.0
# COCO numbers 91 kinds of things and has boxes of 80 of them.
_UNUSED = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
_COCO = [number for number in range(1, 91) if number not in _UNUSED]


@dataclass(frozen=True, slots=True)
class _Box:
    category: int
    corners: tuple[float, ...]
    crowd: bool = False


class BoxLabels:
    """The true boxes of every image.

    Args:
        source: a JSON file, or what it would hold.

    Raises:
        DataError: it is of neither form.
    """

    def __init__(self, source: object) -> None:
        self._where = str(Path(source)) if isinstance(source, str | Path) else "the labels"
        tree = _parsed(Path(source)) if isinstance(source, str | Path) else source
        if not isinstance(tree, Mapping):
            raise self._odd(f"a {type(tree).__name__} at the top")
        lacking = _INSTANCES - tree.keys()
        self._relative = lacking == _INSTANCES
        if lacking and not self._relative:
            raise self._odd(f"{listed(list(tree), 3)}, and no {', '.join(sorted(lacking))}")
        self._categories: list[int] = []
        try:
            self._boxes = self._simple(tree) if self._relative else self._instances(tree)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._odd(f"{type(error).__name__}: {error}") from error
        self.numbers = {box.category for boxes in self._boxes.values() for box in boxes}

    def of(self, origin: str, width: int, height: int) -> Truth:
        """The boxes in an image, in its pixels.

        Args:
            origin: the image's file.
            width, height: of the image.

        Raises:
            DataError: nothing is known of this image.
        """
        path = PurePosixPath(Path(origin).as_posix())
        boxes = next((self._boxes[k] for k in (str(path), path.name) if k in self._boxes), None)
        if boxes is None:
            raise DataError(
                "An image has no entry in the labels.",
                where=origin,
                observed=f"{len(self._boxes)} images in {self._where}: {listed(list(self._boxes), 2)}",
                expected="its file name, with an empty list where it shows nothing",
            )
        corners = np.array([box.corners for box in boxes], np.float64).reshape(-1, 4)
        if self._relative:
            corners = corners * [width, height, width, height]
        classes = np.array([box.category for box in boxes], np.int64)
        return Truth(classes, corners, np.array([box.crowd for box in boxes], np.bool_))

    def class_numbers(self, classes: int) -> Integers:
        """The label's number for each of a model's classes.

        As many as there are categories: these in their order. Numbers from 0 on: as they are. 80 classes:
        COCO's. 91: with a background, as they are. Else they begin with 1.

        Raises:
            DataError: the labels have more classes than the model.
        """
        numbers = list(range(1, classes + 1))
        if len(self._categories) == classes:
            numbers = self._categories
        elif 0 in self.numbers or classes == len(_COCO) + len(_UNUSED) + 1:
            numbers = list(range(classes))
        elif classes == len(_COCO):
            numbers = _COCO
        unknown = sorted(self.numbers - set(numbers))
        if unknown:
            raise DataError(
                "The labels have classes that the model does not have.",
                where=self._where,
                observed=f"category_id {listed(unknown, 5)}",
                expected=f"those of a model with {classes} classes: {numbers[0]} to {numbers[-1]}",
            )
        return np.array(numbers, np.int64)

    def _simple(self, tree: Mapping[Any, Any]) -> dict[str, list[_Box]]:
        found = {
            Path(str(name)).as_posix(): [_Box(int(e["category_id"]), _four(e["box"])) for e in entries]
            for name, entries in tree.items()
        }
        # Boxes may reach a little beyond the edge; those in pixels reach farther.
        far = [n for n, boxes in found.items() for b in boxes if max(map(abs, b.corners)) > _FARTHEST]
        if far:
            raise ValueError(f"a box of '{far[0]}' is not in 0..1")
        return found

    def _instances(self, tree: Mapping[Any, Any]) -> dict[str, list[_Box]]:
        names = {image["id"]: Path(image["file_name"]).as_posix() for image in tree["images"]}
        found: dict[str, list[_Box]] = {name: [] for name in names.values()}
        self._categories = sorted(int(category["id"]) for category in tree["categories"])
        for entry in tree["annotations"]:
            left, top, width, height = _four(entry["bbox"])
            corners = (left, top, left + width, top + height)
            box = _Box(int(entry["category_id"]), corners, bool(entry.get("iscrowd", 0)))
            found[names[entry["image_id"]]].append(box)
        return found

    def _odd(self, observed: str) -> DataError:
        return DataError(
            "The labels are not boxes in a form that is known.",
            where=self._where,
            observed=observed,
            expected=_FORMS,
        )


class DetectionScores:
    """What the boxes of several models are worth: mAP with labels, and F1 against the first model's.

    Args:
        labels: None without any.
        images: for each model, as `Samples.images` has it.

    Raises:
        DataError: the data are no files that labels could be about.
    """

    def __init__(self, labels: BoxLabels | None, images: Sequence[Images | None]) -> None:
        self._labels, self._images = labels, [image for image in images if image is not None]
        if labels is not None and not self._images:
            raise DataError(
                "Boxes are known by their image's file, and the data are no image files.",
                expected="--data with a folder of images",
            )
        self._truths: list[Truth] = []
        self._found: list[list[Found]] = []

    def add(self, origin: str, kept: Sequence[Mapping[str, Array]]) -> None:
        """Count one item of the data.

        Args:
            origin: its file.
            kept: what each model's `BoxReader` read.
        """
        if not self._images:  # nothing to map back to: all models take the same arrays
            self._found += map(list, zip(*map(found_in, kept), strict=True))
            return
        import PIL.Image

        with PIL.Image.open(self._images[0][0] / origin) as image:
            width, height = image.size
        if self._labels is not None:
            self._truths.append(self._labels.of(origin, width, height))
        row = []
        for read, (_, plan) in zip(kept, self._images, strict=True):
            (found,) = found_in(read)
            corners = plan.place(width, height).to_original(found.corners)
            classes = found.classes
            if self._labels is not None:
                classes = self._labels.class_numbers(int(read["counts"][1]))[classes]
            row.append(Found(classes, found.scores, np.clip(corners, 0, [width, height, width, height])))
        self._found.append(row)

    @property
    def count(self) -> int:
        """How many images were counted."""
        return len(self._found)

    def of_models(self) -> list[dict[str, float]]:
        """What each model has reached, by name.

        Raises:
            DataError: there is no true box in these images.
        """
        every: list[dict[str, float]] = []
        for number, found in enumerate(zip(*self._found, strict=True)):
            scores: dict[str, float] = {}
            if self._labels is not None:
                scores |= mean_average_precision(list(zip(found, self._truths, strict=True)))
                if not scores:
                    raise DataError("The labels have no box in any of these images.", expected="at least one")
            if number:
                first = [row[0] for row in self._found]
                scores["box F1"] = box_f1(list(zip(found, first, strict=True)))
            every.append(scores)
        return every


class BoxRuler:
    """Judges models by their boxes in the same images, the float model first.

    Args:
        model: the float model.
        labels: as `BoxLabels` takes them; None without any.
        images: as `Samples.images` has it.
        decoder: as `BoxReader` takes it.
    """

    def __init__(
        self, model: ir.Model, labels: object, images: Images | None, decoder: str | None = None
    ) -> None:
        self._reader = BoxReader.of(model, decoder, NMS_IOU)
        self._labels = None if labels is None else BoxLabels(labels)
        self._images = images
        self._wanted: list[tuple[str, Arrays]] = []

    def read(self, sample: Arrays, outputs: Arrays) -> Arrays:
        """What a model found in a sample."""
        return self._reader.read(sample, outputs)

    def expect(self, origin: str, read: Arrays) -> None:
        """What the float model found in the next sample, which came from this file."""
        self._wanted.append((origin, read))

    def value(self, name: str, reads: Sequence[Arrays]) -> float:
        """What the metric map or boxf1 says of a model.

        Args:
            name: of the metric.
            reads: what the model found in all samples.
        """
        found = DetectionScores(self._labels, [self._images] * 2)
        for (origin, wanted), read in zip(self._wanted, reads, strict=True):
            found.add(origin, [wanted, read])
        return found.of_models()[1][BOX_METRICS[name]]


def _four(numbers: Any) -> tuple[float, ...]:
    found = tuple(float(number) for number in numbers)
    if len(found) != 4 or not all(np.isfinite(found)):
        raise ValueError(f"a box has four numbers, not {numbers}")
    return found


def _parsed(path: Path) -> Any:
    if not path.is_file():
        raise DataError("The labels file does not exist.", where=path, expected=_FORMS)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            "The labels file is not JSON.", where=path, observed=error, expected=_FORMS
        ) from error
