"""From a detector's outputs to boxes: SSD, YOLOv5, YOLOX and YOLOv8, and what is left after suppression.

The outputs' shapes show which of them it is, since strides of 8, 16 and 32 make one count of cells only.

ssd: scores [N, boxes, classes] and boxes [N, boxes, 4] or [N, boxes, 1, 4], top, left, bottom, right in 0..1.
yolov5: [N, 3 x cells, 5 + classes], each centre and size in pixels, objectness, classes.
yolox: [N, cells, 5 + classes], likewise, but in strides: the centre from its cell's corner, and the logarithm
of the size. Where the graph has an Exp, it has done this itself, and left yolov5's form.
yolov8, also YOLO11: [N, 4 + classes, cells], centre and size in pixels, classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.errors import DataError, RecipeError
from roundel.measure.average_precision import Floats, Found, overlaps
from roundel.model.graph import producer
from roundel.types import Array, Arrays

DECODERS = ("ssd", "yolov5", "yolox", "yolov8")
NMS_IOU = 0.6

_STRIDES = (8, 16, 32)
_ANCHORS = 3
_LOWEST = 0.01  # scores that are looked at
_MOST = 100  # boxes of an image
_CANDIDATES = 30_000  # before suppression, the best: a broken model finds something in every cell
# What hands values on as they are.
_CARRIERS = (
    *("Cast", "Concat", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"),
    *("QuantizeLinear", "DequantizeLinear"),
)
Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BoxReader:
    """Reads boxes from the outputs of a model; it travels to workers.

    Attributes:
        decoder: one of DECODERS; None: as the shapes say.
        nms_iou: of two boxes of one class that overlap by more, the one of the lower score goes.
        sized: whether the graph computes an Exp, which a YOLOX without a decoder has left to its reader.
        background: whether the first class of an SSD is none of the things: its scores are a softmax.
    """

    decoder: str | None
    nms_iou: float
    sized: bool
    background: bool

    KEPT: ClassVar = ("boxes", "counts")

    @classmethod
    def of(cls, model: ir.Model, decoder: str | None, nms_iou: float) -> BoxReader:
        """For a model and those that are quantized from it.

        Raises:
            RecipeError: there is no such decoder, or the overlap is none.
        """
        if decoder is not None and decoder not in DECODERS:
            raise RecipeError.unknown(
                f"There is no decoder '{decoder}'.", decoder, DECODERS, where="--decoder"
            )
        if not 0 < nms_iou <= 1:
            raise RecipeError(
                "The overlap is not one.", where="--nms-iou", observed=nms_iou, expected="above 0, at most 1"
            )
        sized = any(node.op_type == "Exp" for node in model.graph.all_nodes())
        return cls(decoder, nms_iou, sized, any(_is_softmax(out) for out in model.graph.outputs))

    def read(self, sample: Arrays, outputs: Arrays) -> Arrays:
        """The boxes that each row of a sample leads to, in pixels of the input, as `found_in` takes them.

        Args:
            sample: the model's inputs.
            outputs: all of them.

        Raises:
            DataError: the outputs are not those of the decoder, or of none.
        """
        size = _input_size(sample)
        name, used = self._chosen(outputs, size)
        tables: list[Floats] = []
        classes = 0
        for row, arrays in enumerate(zip(*used, strict=True)):
            corners, scores = self._decoded(name, [np.asarray(a, np.float64) for a in arrays], size)
            found = _strongest(corners, scores, self.nms_iou)
            classes = scores.shape[1]
            rows = np.full((len(found.classes), 1), row)
            tables.append(np.hstack([rows, found.classes[:, None], found.scores[:, None], found.corners]))
        return {"boxes": np.concatenate(tables), "counts": np.array([len(tables), classes], np.int64)}

    def _chosen(self, outputs: Arrays, size: Size) -> tuple[str, tuple[Array, ...]]:
        """The decoder, and the outputs that it reads."""
        readings = list(_readings(outputs, size, sized=self.sized))
        for name, used, _ in (r for r in readings if r[2] or r[0] == self.decoder):
            if self.decoder in (None, name):
                return name, used
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        cells = _cells(size)
        raise DataError(
            "The outputs are those of no detector that is known."
            if self.decoder is None
            else f"The outputs are not those of the decoder {self.decoder}.",
            where=f"an input of {size[0]}x{size[1]} (height x width)",
            observed=shapes,
            expected=f"ssd: [N, B, classes] and [N, B, 4]; yolov5: [N, {_ANCHORS * cells}, 5 + classes];"
            f" yolox: [N, {cells}, 5 + classes]; yolov8: [N, 4 + classes, {cells}]",
            hint="Name the decoder where the grid is another one: --decoder " + "|".join(DECODERS),
        )

    def _decoded(self, name: str, arrays: list[Floats], size: Size) -> tuple[Floats, Floats]:
        """Corners [N, 4] in pixels and scores [N, classes] of one row."""
        if name == "ssd":
            scores, boxes = arrays
            height, width = size
            corners = boxes.reshape(-1, 4)[:, [1, 0, 3, 2]] * [width, height, width, height]
            return corners, scores[:, 1:] if self.background else scores
        table = arrays[0].T if name == "yolov8" else arrays[0]
        centre, extent, rest = table[:, :2], table[:, 2:4], table[:, 4:]
        if name == "yolox":
            places, strides = _grid(size)
            centre = (centre + places) * strides
            # What a broken model says overflows; such a box overlaps nothing.
            extent = np.exp(np.minimum(extent, 50.0)) * strides
        scores = rest if name == "yolov8" else rest[:, :1] * rest[:, 1:]
        return np.hstack([centre - extent / 2, centre + extent / 2]), scores


def found_in(kept: Mapping[str, Array]) -> list[Found]:
    """What `BoxReader.read` read, a row of the sample each."""
    table = kept["boxes"]
    rows = (table[table[:, 0] == row] for row in range(int(kept["counts"][0])))
    return [Found(part[:, 1].astype(np.int64), part[:, 2], part[:, 3:]) for part in rows]


def _readings(outputs: Arrays, size: Size, *, sized: bool) -> Iterator[tuple[str, tuple[Array, ...], bool]]:
    """What the outputs may be: decoder, what it reads, and whether the count of cells says so, too."""
    for _, boxes in sorted(outputs.items(), key=lambda pair: "box" not in pair[0].casefold()):
        if boxes.shape[-1:] == (4,) and (boxes.ndim == 3 or (boxes.ndim == 4 and boxes.shape[2] == 1)):
            for scores in outputs.values():
                if scores is not boxes and scores.ndim == 3 and scores.shape[:2] == boxes.shape[:2]:
                    yield "ssd", (scores, boxes), True
    cells = _cells(size)
    for array in outputs.values():
        if array.ndim != 3:
            continue
        _, rows, columns = array.shape
        if 4 < rows < columns:
            yield "yolov8", (array,), columns == cells
        if 5 < columns < rows:
            yield "yolov5", (array,), rows == _ANCHORS * cells or (rows == cells and sized)
            if rows == cells:
                yield "yolox", (array,), not sized


def _cells(size: Size) -> int:
    return sum((size[0] // stride) * (size[1] // stride) for stride in _STRIDES)


def _grid(size: Size) -> tuple[Floats, Floats]:
    """Each cell's column and row, and its stride: fine ones first, row by row."""
    places, strides = [], []
    for stride in _STRIDES:
        rows, columns = np.indices((size[0] // stride, size[1] // stride)).reshape(2, -1)
        places.append(np.stack([columns, rows], axis=1))
        strides.append(np.full((len(rows), 1), stride))
    return np.concatenate(places).astype(np.float64), np.concatenate(strides).astype(np.float64)


def _input_size(sample: Arrays) -> Size:
    """Height and width of the image that a model takes."""
    shapes = [array.shape for array in sample.values() if array.ndim == 4]
    if len(shapes) != 1:
        raise DataError(
            "A detector takes one image.",
            observed=", ".join(f"{name} {list(array.shape)}" for name, array in sample.items()),
            expected="one input of rank 4",
        )
    _, one, two, three = shapes[0]
    return (two, three) if one in (1, 3) else (one, two)


def _strongest(corners: Floats, scores: Floats, nms_iou: float) -> Found:
    """The boxes that are left when, class by class, those that overlap a better one are gone."""
    boxes, classes = np.nonzero(scores > _LOWEST)
    values: NDArray[np.float64] = scores[boxes, classes]
    order = np.argsort(-values, kind="stable")[:_CANDIDATES]
    corners, classes, values = corners[boxes[order]], classes[order], values[order]
    alive, kept = np.ones(len(order), np.bool_), list[int]()
    for place in range(len(order)):
        if not alive[place]:
            continue
        kept.append(place)
        if len(kept) == _MOST:
            break
        near = overlaps(corners[place : place + 1], corners)[0] > nms_iou
        alive &= ~near | (classes != classes[place])
    return Found(classes[kept].astype(np.int64), values[kept], corners[kept])


def _is_softmax(value: ir.Value | None) -> bool:
    """Whether a value is a softmax, moved and stored at most."""
    while (node := producer(value, *_CARRIERS)) is not None:
        value = node.inputs[0]
    return producer(value, "Softmax") is not None
