"""Detection: small models of each kind, judged on pictures; labels, letterbox, and what goes wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import PIL.Image
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import roundel
from roundel.cli.app import app
from roundel.measure.boxes import BoxLabels
from roundel.measure.detection import BoxReader, found_in
from roundel.work.executors import executor

SIDE, CLASSES = 64, 3
CELLS = 64 + 16 + 4
# What all of them find: class, score, left, top, right, bottom in pixels of the 64 x 64 input.
THING, OTHER = (1, 0.9, 8.0, 16.0, 40.0, 48.0), (2, 0.6, 48.0, 4.0, 60.0, 12.0)
DOUBLE = (1, 0.7, 9.0, 17.0, 41.0, 49.0)  # overlaps the thing by 0.88


def constant_model(
    path: Path, outputs: dict[str, np.ndarray], *, softmax: str = "", exp: bool = False
) -> Path:
    """A model that says the same of every picture: constants plus nothing of the picture."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
    ]
    if exp:
        nodes.append(helper.make_node("Exp", ["nothing"], ["one"]))
        nodes.append(helper.make_node("Sub", ["one", "unit"], ["still"]))
    weights = {"zero": np.float32(0), "unit": np.float32(1)}
    for name, array in outputs.items():
        weights[f"{name}.constant"] = array.astype(np.float32)
        inner = f"{name}.logits" if name == softmax else name
        nodes.append(
            helper.make_node("Add", [f"{name}.constant", "still" if exp else "nothing"], [inner], name=name)
        )
        if name == softmax:
            nodes.append(helper.make_node("Softmax", [inner], [name], axis=-1))
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in outputs.items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def table(rows: int, *boxes: tuple[float, ...]) -> np.ndarray:
    """Centre and size, objectness, classes: the boxes in rows 3, 30, 70 of the grid, nothing elsewhere."""
    found = np.zeros((rows, 5 + CLASSES))
    for row, (label, score, left, top, right, bottom) in zip((3, 30, 70), boxes, strict=False):
        found[row, :4] = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
        found[row, 4], found[row, 5 + int(label)] = score, 1.0
    return found


def yolov5(path: Path, *boxes: Any) -> Path:
    return constant_model(path, {"out": table(3 * CELLS, *boxes)[None]})


def yolov8(path: Path, *boxes: Any) -> Path:
    plain = table(CELLS, *boxes)
    return constant_model(path, {"out": np.hstack([plain[:, :4], plain[:, 4:5] * plain[:, 5:]]).T[None]})


def yolox(path: Path, *boxes: Any) -> Path:
    raw, place = table(CELLS, *boxes), 0
    for stride in (8, 16, 32):
        for row in range(SIDE // stride):
            for column in range(SIDE // stride):
                if raw[place, 4]:
                    raw[place, :2] = raw[place, :2] / stride - (column, row)
                    raw[place, 2:4] = [math.log(side / stride) for side in raw[place, 2:4]]
                place += 1
    return constant_model(path, {"out": raw[None]})


def yolox_decoded(path: Path, *boxes: Any) -> Path:
    return constant_model(path, {"out": table(CELLS, *boxes)[None]}, exp=True)


def ssd_outputs(*boxes: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    scores, corners = np.zeros((1, 20, CLASSES)), np.zeros((1, 20, 1, 4))
    for row, (label, score, left, top, right, bottom) in enumerate(boxes):
        scores[0, row, int(label)] = score
        corners[0, row, 0] = np.array([top, left, bottom, right]) / SIDE
    return scores, corners


def ssd(path: Path, *boxes: Any) -> Path:
    scores, corners = ssd_outputs(*boxes)
    return constant_model(path, {"scores": scores, "boxes": corners})


def ssd_softmax(path: Path, *boxes: Any) -> Path:
    """With a background in front, and boxes before the scores."""
    scores, corners = ssd_outputs(*boxes)
    whole = np.concatenate([1 - scores.sum(2, keepdims=True), scores], axis=2)
    return constant_model(
        path, {"boxes": corners[:, :, 0], "scores": np.log(np.maximum(whole, 1e-30))}, softmax="scores"
    )


KINDS: dict[str, Callable[..., Path]] = {
    "yolov5": yolov5,
    "yolov8": yolov8,
    "yolox": yolox,
    "yolox decoded": yolox_decoded,
    "ssd": ssd,
    "ssd softmax": ssd_softmax,
}


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Two pictures, twice as wide as high: a letterbox has 16 rows of grey above and below."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        PIL.Image.new("RGB", (128, 64), (200, 30, 30)).save(folder / name)
    return folder


def stretched(box: tuple[float, ...]) -> list[float]:
    """A box of the input in parts of the picture, when this is stretched."""
    return [value / SIDE for value in box[2:]]


def written(path: Path, tree: object) -> Path:
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_found_and_read(kind: str, wide: Path, tmp_path: Path) -> None:
    model = KINDS[kind](tmp_path / "m.onnx", THING, OTHER, DOUBLE)
    entry = [{"category_id": box[0] + 1, "box": stretched(box)} for box in (THING, OTHER)]
    labels = written(tmp_path / "l.json", {"a.png": entry, "b.png": entry})
    (score,) = roundel.evaluate([model], wide, labels=labels, task="detection")
    assert score.metric["mAP50-95"] == pytest.approx(1.0)  # the double has gone
    assert score.metric["mAP50"] == pytest.approx(1.0)
    assert (score.rows, score.top1, score.agreement) == (2, None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_are_those_that_were_meant(kind: str, tmp_path: Path) -> None:
    predictor = roundel.measure.runner.Predictor(KINDS[kind](tmp_path / "m.onnx", THING, OTHER, DOUBLE))
    sample = {"x": np.zeros((1, 3, SIDE, SIDE), np.float32)}
    outputs = predictor.run(sample, 0)
    (found,) = found_in(BoxReader.of(predictor.model, None, 0.6).read(sample, outputs))
    np.testing.assert_allclose(found.corners, [THING[2:], OTHER[2:]], atol=1e-4)
    np.testing.assert_allclose(found.scores, [0.9, 0.6], atol=1e-6)
    assert found.classes.tolist() == [1, 2]
    (both,) = (
        found_in(BoxReader.of(predictor.model, kind.split()[0], 0.95).read(sample, outputs))
        if (kind != "yolox decoded")
        else found_in(BoxReader.of(predictor.model, "yolov5", 0.95).read(sample, outputs))
    )
    assert both.classes.tolist() == [1, 1, 2]  # a higher overlap keeps the double


def test_at_most_a_hundred_boxes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    outputs = {"boxes": rng.random((1, 900, 4)), "scores": rng.uniform(0.1, 1, (1, 900, 2))}
    reader = BoxReader(None, 1.0, sized=False, background=False)
    (found,) = found_in(reader.read({"x": np.zeros((1, 3, 64, 64))}, outputs))
    assert found.scores.tolist() == sorted(outputs["scores"].ravel(), reverse=True)[:100]


def test_a_letterbox_is_undone(wide: Path, tmp_path: Path) -> None:
    """Left, top, right, bottom of the thing: 8, 16, 40, 48 of 64 are 16, 0, 80, 64 of 128 x 64."""
    model = yolov8(tmp_path / "m.onnx", THING)
    instances = {
        "images": [{"id": n, "file_name": name} for n, name in enumerate(("a.png", "b.png"))],
        "annotations": [{"image_id": n, "category_id": 7, "bbox": [16, 0, 64, 64]} for n in (0, 1)],
        "categories": [{"id": number} for number in (4, 7, 9)],
    }
    words: dict[str, Any] = {"labels": instances, "task": "detection"}
    (score,) = roundel.evaluate([model], wide, letterbox=True, **words)
    assert score.metric["mAP50-95"] == pytest.approx(1.0)
    (score,) = roundel.evaluate([model], wide, **words)
    assert score.metric["mAP50-95"] < 0.5


def test_a_crop_is_undone(wide: Path, tmp_path: Path) -> None:
    model = yolov8(tmp_path / "m.onnx", THING)  # 32 pixels of each side are cut off
    labels = {
        name: [{"category_id": 2, "box": [40 / 128, 0.25, 72 / 128, 0.75]}] for name in ("a.png", "b.png")
    }
    (score,) = roundel.evaluate([model], wide, labels=labels, task="detection", resize=64, crop=64)
    assert score.metric["mAP50-95"] == pytest.approx(1.0)


def test_models_agree_by_their_boxes(wide: Path, tmp_path: Path) -> None:
    models = [yolov8(tmp_path / "1.onnx", THING, OTHER), yolov8(tmp_path / "2.onnx", THING)]
    arrays = np.zeros((3, 3, SIDE, SIDE), np.float32)
    for data in (wide, arrays):
        scores = roundel.evaluate(models, data, task="detection")
        assert "box F1" not in scores[0].metric
        assert scores[1].metric == {"box F1": pytest.approx(2 / 3)}
        assert scores[1].sqnr_db is not None


def test_workers_and_checkpoints_give_the_same(wide: Path, tmp_path: Path) -> None:
    models = [yolov8(tmp_path / "1.onnx", THING, OTHER), yolov8(tmp_path / "2.onnx", THING)]
    labels = {name: [{"category_id": 2, "box": stretched(THING)}] for name in ("a.png", "b.png")}
    words: dict[str, Any] = {"labels": labels, "task": "detection"}
    here = [score.metric for score in roundel.evaluate(models, wide, **words)]
    where = executor("local", workers=1)
    assert [s.metric for s in roundel.evaluate(models, wide, executor=where, **words)] == here
    for _ in range(2):
        again = roundel.evaluate(models, wide, checkpoint=tmp_path / "c", resume=True, **words)
        assert [score.metric for score in again] == here


def test_the_command_line_shows_it(wide: Path, tmp_path: Path) -> None:
    models = [yolov8(tmp_path / "1.onnx", THING, OTHER), yolov8(tmp_path / "2.onnx", THING)]
    entry = [{"category_id": 2, "box": stretched(THING)}]
    labels = written(tmp_path / "l.json", {"a.png": entry, "b.png": entry})
    words = ["evaluate", *models, "--task", "detection", "--data", wide, "--labels", labels]
    run = CliRunner()
    shown = run.invoke(app, [*map(str, words), "--csv", str(tmp_path / "s.csv")])
    assert shown.exit_code == 0
    assert "mAP50-95" in shown.output
    assert "box F1" in (tmp_path / "s.csv").read_text()
    tree = json.loads(run.invoke(app, [*map(str, words), "--decoder", "yolov8", "--json"]).output)
    assert tree["models"][1]["metric"]["mAP50"] == pytest.approx(1.0)


def test_a_budget_of_map(wide: Path, tmp_path: Path) -> None:
    model = ssd(tmp_path / "m.onnx", THING, OTHER)
    entry = [{"category_id": box[0] + 1, "box": stretched(box)} for box in (THING, OTHER)]
    labels = {"a.png": entry, "b.png": entry}
    words: dict[str, Any] = {"data": wide, "eval_data": wide, "rungs": ["a8w8", "a16w8"]}
    found = roundel.auto(model, labels=labels, max_drop="1map", **words)
    assert (found.metric, found.max_drop) == ("map", "1 mAP")
    assert found.reference == pytest.approx(1.0)
    assert found.met
    own = roundel.auto(model, metric="boxf1", max_drop="1 point", **words)
    assert own.reference == 1.0
    with pytest.raises(roundel.DataError, match="decoder yolox"):
        roundel.auto(model, metric="boxf1", decoder="yolox", max_drop="1 point", **words)
    with pytest.raises(roundel.RecipeError, match="no decoder"):
        roundel.auto(model, metric="boxf1", decoder="yolo", max_drop="1 point", **words)
    with pytest.raises(roundel.RecipeError, match="for boxes"):
        roundel.auto(model, decoder="ssd", max_drop="1 point", **words)
    with pytest.raises(roundel.RecipeError, match="another one"):
        roundel.auto(model, metric="top1", max_drop="1map", **words)
    with pytest.raises(roundel.RecipeError, match="needs labels"):
        roundel.auto(model, max_drop="1map", **words)


def test_what_no_decoder_reads_is_an_error(wide: Path, tmp_path: Path) -> None:
    classes = constant_model(tmp_path / "c.onnx", {"out": np.zeros((1, 10))})
    with pytest.raises(roundel.DataError, match="no detector") as raised:
        roundel.evaluate([classes], wide, task="detection")
    assert "out [1, 10]" in str(raised.value)
    assert f"[N, {3 * CELLS}, 5 + classes]" in str(raised.value)
    with pytest.raises(roundel.DataError, match="decoder ssd"):
        roundel.evaluate([yolov8(tmp_path / "m.onnx", THING)], wide, task="detection", decoder="ssd")
    # A grid of other strides is read when its decoder is named.
    odd = constant_model(tmp_path / "o.onnx", {"out": np.zeros((1, 7, 50))})
    with pytest.raises(roundel.DataError, match="no detector"):
        roundel.evaluate([odd], wide, task="detection")
    assert roundel.evaluate([odd], wide, task="detection", decoder="yolov8")[0].rows == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"task": "segmentation"}, "no task"),
        ({"task": "detection", "decoder": "yolo"}, "no decoder"),
        ({"task": "detection", "nms_iou": 0.0}, "overlap"),
        ({"task": "detection", "metric": "m.py:f"}, "metric of its own"),
        ({"decoder": "ssd"}, "another one"),
        ({"nms_iou": 0.5}, "another one"),
    ],
)
def test_options_that_make_no_sense(words: dict[str, Any], message: str, wide: Path, tmp_path: Path) -> None:
    with pytest.raises(roundel.RecipeError, match=message):
        roundel.evaluate([yolov8(tmp_path / "m.onnx", THING)], wide, **words)


@pytest.mark.parametrize(
    ("tree", "observed"),
    [
        ([{"image_id": 1, "bbox": [0, 0, 1, 1], "score": 1}], "a list at the top"),
        ({"images": [], "categories": []}, "no annotations"),
        ({"a.png": 3}, "TypeError"),
        ({"a.png": [{"category_id": 1}]}, "'box'"),
        ({"a.png": [{"category_id": 1, "box": [0, 0, 1]}]}, "four numbers"),
        ({"a.png": [{"category_id": 1, "box": [3, 4, 50, 60]}]}, "not in 0..1"),
        (
            {
                "images": [],
                "annotations": [{"image_id": 5, "category_id": 1, "bbox": [0, 0, 1, 1]}],
                "categories": [],
            },
            "KeyError: 5",
        ),
    ],
)
def test_labels_of_another_form_are_an_error(tree: object, observed: str, tmp_path: Path) -> None:
    path = written(tmp_path / "l.json", tree)
    with pytest.raises(roundel.DataError, match="labels are not boxes") as raised:
        BoxLabels(path)
    assert observed in str(raised.value.observed)
    assert str(path) == raised.value.where
    assert "bbox" in str(raised.value.expected)


def test_labels_that_do_not_fit(wide: Path, tmp_path: Path) -> None:
    model = yolov8(tmp_path / "m.onnx", THING)
    entry = [{"category_id": 2, "box": stretched(THING)}]

    def judged(labels: object, data: object = wide) -> None:
        roundel.evaluate([model], data, labels=labels, task="detection")

    with pytest.raises(roundel.DataError, match="does not exist"):
        judged(tmp_path / "none.json")
    (tmp_path / "t.json").write_text("boxes")
    with pytest.raises(roundel.DataError, match="not JSON"):
        judged(tmp_path / "t.json")
    with pytest.raises(roundel.DataError, match="no entry") as raised:
        judged({"a.png": entry})
    assert raised.value.where == "b.png"
    with pytest.raises(roundel.DataError, match="classes that the model does not have") as raised:
        judged({"a.png": entry, "b.png": [{"category_id": 9, "box": [0, 0, 1, 1]}]})
    assert "category_id 9" in str(raised.value)
    with pytest.raises(roundel.DataError, match="no box in any"):
        judged({"a.png": [], "b.png": []})
    with pytest.raises(roundel.DataError, match="no image files"):
        judged({"a.png": entry}, np.zeros((1, 3, SIDE, SIDE), np.float32))


def test_numbers_of_classes() -> None:
    def numbers(labels: object, classes: int) -> list[int]:
        return list(map(int, BoxLabels(labels).class_numbers(classes)))

    box = [0, 0, 1, 1]
    from_one, from_zero = ({"a": [{"category_id": n, "box": box}]} for n in (3, 0))
    instances = {"images": [], "annotations": [], "categories": [{"id": 9}, {"id": 5}]}
    assert numbers(from_one, 4) == [1, 2, 3, 4]
    assert numbers(from_zero, 4) == [0, 1, 2, 3]
    assert numbers(instances, 2) == [5, 9]
    assert numbers(from_one, 80)[10:13] == [11, 13, 14]  # COCO has no 12
    assert numbers(from_one, 80)[-1] == 90
    assert numbers(from_one, 90) == list(range(1, 91))
    assert numbers(from_one, 91) == list(range(91))
