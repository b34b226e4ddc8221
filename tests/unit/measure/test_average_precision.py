"""Average precision: small cases by hand, and random boxes beside COCO's own code where it is installed."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

from roundel.measure.average_precision import Found, Truth, box_f1, mean_average_precision, overlaps

SQUARE = (0.0, 0.0, 10.0, 10.0)
HALF = (0.0, 0.0, 10.0, 5.0)  # overlaps the square by 0.5
FAR = (50.0, 50.0, 60.0, 60.0)
Boxes = list[tuple[float, float, float, float]]


def found(boxes: Boxes, scores: list[float], classes: list[int] | None = None) -> Found:
    labels = np.array(classes or [1] * len(boxes), np.int64)
    return Found(labels, np.array(scores), np.array(boxes, np.float64).reshape(-1, 4))


def truth(boxes: Boxes, classes: list[int] | None = None, crowd: list[bool] | None = None) -> Truth:
    labels = np.array(classes or [1] * len(boxes), np.int64)
    crowds = np.array(crowd or [False] * len(boxes), np.bool_)
    return Truth(labels, np.array(boxes, np.float64).reshape(-1, 4), crowds)


def test_overlaps_of_boxes_and_crowds() -> None:
    boxes, others = np.array([SQUARE, HALF]), np.array([SQUARE, FAR])
    np.testing.assert_allclose(overlaps(boxes, others), [[1, 0], [0.5, 0]])
    np.testing.assert_allclose(overlaps(boxes, others, np.array([True, False])), [[1, 0], [1, 0]])
    nothing = np.zeros((1, 4))
    assert overlaps(nothing, nothing) == 0


@pytest.mark.parametrize(
    ("images", "wanted", "at_half"),
    [
        ([(found([SQUARE], [0.9]), truth([SQUARE]))], 1.0, 1.0),
        ([(found([], []), truth([SQUARE]))], 0.0, 0.0),
        # Right at the first of ten thresholds.
        ([(found([HALF], [0.9]), truth([SQUARE]))], 0.1, 1.0),
        # One of two boxes: precision 1 at the 51 recalls up to a half.
        ([(found([SQUARE], [0.9]), truth([SQUARE, FAR]))], 51 / 101, 51 / 101),
        # A wrong box before the right one: precision a half at every recall; after it, nothing is lost.
        ([(found([FAR, SQUARE], [0.9, 0.8]), truth([SQUARE]))], 0.5, 0.5),
        ([(found([FAR, SQUARE], [0.7, 0.8]), truth([SQUARE]))], 1.0, 1.0),
        # Of two boxes on one thing, the second is wrong.
        ([(found([SQUARE, SQUARE, FAR], [0.9, 0.8, 0.7]), truth([SQUARE, FAR]))],)
        + ((51 + 50 * 2 / 3) / 101,) * 2,
        # Of another class: the class that is not there counts for nothing, the missing one is 0.
        ([(found([SQUARE], [0.9], [2]), truth([SQUARE]))], 0.0, 0.0),
        # Classes are averaged, images are not.
        ([(found([SQUARE], [0.9]), truth([SQUARE, FAR], [1, 2]))], 0.5, 0.5),
        ([(found([SQUARE], [0.9]), truth([SQUARE])), (found([FAR], [0.95]), truth([]))], 0.5, 0.5),
        # A box inside of a crowd counts neither for nor against; a crowd is not looked for.
        (
            [(found([HALF, FAR], [0.9, 0.8]), truth([SQUARE, FAR], crowd=[True, False]))],
            1.0,
            1.0,
        ),
    ],
)
def test_by_hand(images: Any, wanted: float, at_half: float) -> None:
    scores = mean_average_precision(images)
    assert scores["mAP50-95"] == pytest.approx(wanted, abs=1e-12)
    assert scores["mAP50"] == pytest.approx(at_half, abs=1e-12)


def test_without_a_true_box_there_is_no_score() -> None:
    assert mean_average_precision([]) == {}
    assert mean_average_precision([(found([SQUARE], [0.9]), truth([SQUARE], crowd=[True]))]) == {}


def test_f1_of_two_models() -> None:
    wanted = found([SQUARE, FAR], [0.9, 0.8])
    assert box_f1([(wanted, wanted)]) == 1.0
    assert box_f1([(found([SQUARE], [0.3]), wanted)]) == pytest.approx(2 / 3)
    assert box_f1([(found([SQUARE, FAR], [0.9, 0.25]), wanted)]) == pytest.approx(2 / 3)  # not sure
    assert box_f1([(found([SQUARE], [0.9], [2]), wanted)]) == 0.0
    assert box_f1([(found([], []), found([SQUARE], [0.2]))]) == 1.0


def random_images(seed: int, count: int = 16) -> list[tuple[Found, Truth]]:
    """True boxes, and others near them, some of another class; scores are coarse, so that there are ties."""
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        true, guesses = int(rng.integers(0, 10)), int(rng.integers(0, 50))
        corner, size = rng.uniform(0, 200, (true, 2)), rng.uniform(5, 100, (true, 2))
        labels = rng.integers(1, 6, true)
        near = rng.integers(0, max(true, 1), guesses)
        start, extent, seen = (
            (a[near] if true else b)
            for a, b in (
                (corner, rng.uniform(0, 200, (guesses, 2))),
                (size, rng.uniform(5, 100, (guesses, 2))),
                (labels, rng.integers(1, 7, guesses)),
            )
        )
        start = start + rng.normal(0, 6, (guesses, 2))
        extent = np.abs(extent * rng.normal(1, 0.15, (guesses, 2)))
        seen = np.where(rng.random(guesses) < 0.8, seen, rng.integers(1, 7, guesses))
        scores = rng.integers(0, 40, guesses) / 40
        images.append(
            (
                Found(seen, scores, np.hstack([start, start + extent])),
                Truth(labels, np.hstack([corner, corner + size]), rng.random(true) < 0.15),
            )
        )
    return images


def as_coco(images: list[tuple[Found, Truth]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same as COCO's instances and results."""

    def wide(corners: Any) -> list[float]:
        left, top, right, bottom = corners.tolist()
        return [left, top, right - left, bottom - top]

    every = [
        {
            "image_id": n,
            "category_id": int(c),
            "bbox": wide(b),
            "iscrowd": int(w),
            "area": float(wide(b)[2] * wide(b)[3]),
        }
        for n, (_, t) in enumerate(images, 1)
        for c, b, w in zip(t.classes, t.corners, t.crowd, strict=True)
    ]
    told = {
        "info": {},
        "images": [{"id": n, "width": 300, "height": 300} for n in range(1, len(images) + 1)],
        "annotations": [{"id": n, **entry} for n, entry in enumerate(every, 1)],
        "categories": [{"id": number, "name": str(number)} for number in range(1, 7)],
    }
    results = [
        {"image_id": n, "category_id": int(c), "bbox": wide(b), "score": float(s)}
        for n, (f, _) in enumerate(images, 1)
        for c, s, b in zip(f.classes, f.scores, f.corners, strict=True)
    ]
    return told, results


def peer() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        faster = pytest.importorskip(
            "faster_coco_eval", reason="neither pycocotools nor faster-coco-eval is here"
        )
        return faster.COCO, faster.COCOeval_faster
    return COCO, COCOeval


@pytest.mark.parametrize("seed", range(6))
def test_equals_cocos_own_code(seed: int) -> None:
    coco, evaluation = peer()
    images = random_images(seed)
    told, results = as_coco(images)
    with contextlib.redirect_stdout(io.StringIO()):
        true = coco()
        true.dataset = told
        true.createIndex()
        judge = evaluation(true, true.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    scores = mean_average_precision(images)
    assert scores["mAP50-95"] == pytest.approx(judge.stats[0], abs=1e-6)
    assert scores["mAP50"] == pytest.approx(judge.stats[1], abs=1e-6)
    assert 0.05 < scores["mAP50-95"] < 0.95
