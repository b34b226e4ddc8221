"""Boxes against boxes: mean average precision by COCO's rules, and the F1 of two models' boxes.

Average precision takes the boxes of all images in the order of their scores. Each one matches the free true
box of its class that it overlaps most, if by at least the threshold. Precision, made to fall with recall, is
read at 101 recalls; the mean over these, ten thresholds from 0.5 to 0.95 and all classes is mAP50-95. A box
on a crowd counts neither for nor against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

THRESHOLDS: Floats = np.linspace(0.5, 0.95, 10)
_RECALLS: Floats = np.linspace(0.0, 1.0, 101)
_SURE = 0.25  # scores above it make the boxes that somebody would draw


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a model found in one image.

    Attributes:
        classes: of each box.
        scores: likewise.
        corners: [N, 4]: left, top, right, bottom.
    """

    classes: Integers
    scores: Floats
    corners: Floats

    def ranked(self, above: float = -np.inf) -> Found:
        """The boxes whose score is above a number, the highest first."""
        order = np.argsort(-self.scores, kind="stable")
        order = order[self.scores[order] > above]
        return Found(self.classes[order], self.scores[order], self.corners[order])


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What there is in one image.

    Attributes:
        classes: of each box.
        corners: [N, 4]: left, top, right, bottom.
        crowd: whether it is around many things that nobody told apart.
    """

    classes: Integers
    corners: Floats
    crowd: Booleans


def overlaps(boxes: Floats, others: Floats, crowd: Booleans | None = None) -> Floats:
    """Intersection over union of each box with each other: [boxes, others].

    Args:
        boxes: [N, 4].
        others: [M, 4].
        crowd: which of the others are crowds: for them it is the share of the box that lies inside.
    """
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared: Floats = np.clip(high - low, 0, None).prod(2)
    area, other_area = (np.clip(b[:, 2:] - b[:, :2], 0, None).prod(1) for b in (boxes, others))
    whole = area[:, None] + other_area[None] - shared
    if crowd is not None:
        whole = np.where(crowd[None], area[:, None], whole)
    shares: Floats = np.divide(shared, whole, out=np.zeros_like(shared), where=whole > 0)
    return shares


def mean_average_precision(images: Sequence[tuple[Found, Truth]]) -> dict[str, float]:
    """mAP50-95 and mAP50 over the classes of which there is a true box; empty where there is none.

    Args:
        images: what was found and what there is, in the same pixels.
    """
    ranked = [(found.ranked(), truth) for found, truth in images]
    told = [truth.classes[~truth.crowd] for _, truth in ranked]
    every, counts = np.unique(np.concatenate(told), return_counts=True) if told else ((), ())
    if not len(every):
        return {}
    matched = [_matched(found, truth) for found, truth in ranked]
    classes = np.concatenate([found.classes for found, _ in ranked])
    scores = np.concatenate([found.scores for found, _ in ranked])
    hits, ignored = (np.concatenate(parts, axis=1) for parts in zip(*matched, strict=True))
    order = np.argsort(-scores, kind="stable")
    table = np.empty((len(every), len(THRESHOLDS)))
    for row, (label, count) in enumerate(zip(every, counts, strict=True)):
        own = order[classes[order] == label]
        table[row] = [
            _average_precision(hit[judged], int(count))
            for hit, judged in zip(hits[:, own], ~ignored[:, own], strict=True)
        ]
    return {"mAP50-95": float(table.mean()), "mAP50": float(table[:, 0].mean())}


def box_f1(images: Sequence[tuple[Found, Found]]) -> float:
    """F1 of two models' sure boxes: a pair is of one class and overlaps by half; 1 where neither has any.

    Args:
        images: what a model found, and what its reference did.
    """
    pairs, boxes = 0, 0
    for found, wanted in images:
        own, other = found.ranked(_SURE), wanted.ranked(_SURE)
        truth = Truth(other.classes, other.corners, np.zeros(len(other.classes), np.bool_))
        pairs += int(_matched(own, truth)[0][0].sum())
        boxes += len(own.classes) + len(other.classes)
    return 2 * pairs / boxes if boxes else 1.0


def _matched(found: Found, truth: Truth) -> tuple[Booleans, Booleans]:
    """Which boxes, in the order of their scores, are right at each threshold, and which lie on a crowd."""
    hits = np.zeros((len(THRESHOLDS), len(found.classes)), np.bool_)
    ignored = np.zeros_like(hits)
    if not len(truth.classes):
        return hits, ignored
    overlap = overlaps(found.corners, truth.corners, truth.crowd)
    overlap[found.classes[:, None] != truth.classes[None]] = 0.0
    free = np.repeat(~truth.crowd[None], len(THRESHOLDS), axis=0)
    every = np.arange(len(THRESHOLDS))
    for place, row in enumerate(overlap):
        if row.max() < THRESHOLDS[0]:
            continue
        enough = row >= THRESHOLDS[:, None]
        near = np.where(free & enough, row, -1.0)
        best = near.shape[1] - 1 - near[:, ::-1].argmax(1)  # the last of equal ones, as COCO's own code
        taken = near[every, best] >= 0
        hits[:, place] = taken
        free[every[taken], best[taken]] = False
        ignored[:, place] = ~taken & (enough & truth.crowd).any(1)
    return hits, ignored


def _average_precision(hits: Booleans, count: int) -> float:
    """Of one class at one threshold: `hits` in the order of the scores, `count` true boxes."""
    if not len(hits):
        return 0.0
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    falling = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(right / count, _RECALLS, side="left")
    return float(np.append(falling, 0.0)[places].mean())
