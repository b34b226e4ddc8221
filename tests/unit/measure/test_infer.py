"""Infer: what is run, and under which names it is saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import build, node, normal, run
from roundel import evaluate_models, infer
from roundel.errors import DataError, OutputError, RecipeError
from roundel.options import data_settings
from roundel.recipe.settings import Data


def doubling(batch: int | str = "N") -> object:
    return build([node("Add", ["x", "x"], ["y"], "add")], {"x": [batch, 4]}, {"y": [batch, 4]})


def two_outputs() -> object:
    nodes = [node("Relu", ["x"], ["up/1"], "relu"), node("Neg", ["x"], ["down"], "neg")]
    return build(nodes, {"x": [1, 4]}, {"up/1": [1, 4], "down": [1, 4]})


def brighter() -> object:
    return build(
        [node("Mul", ["x", "half"], ["y"], "mul")],
        {"x": [1, 3, 8, 8]},
        {"y": [1, 3, 8, 8]},
        {"half": np.float32(0.5)},
    )


def test_files_are_named_after_their_inputs(tmp_path: Path) -> None:
    data = tmp_path / "in" / "sub"
    data.mkdir(parents=True)
    arrays = {"a.b": normal(1, 4, seed=1), "cat": normal(3, 4, seed=2)}
    for name, array in arrays.items():
        np.save(data / f"{name}.npy", array)
    done = infer(doubling(), tmp_path / "in", tmp_path / "new" / "out")
    assert sorted(done.files) == ["sub/a.b.npy", "sub/cat.npy"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.load(tmp_path / "new" / "out" / "sub" / f"{name}.npy"), 2 * array)


def test_samples_without_files_are_numbered(tmp_path: Path) -> None:
    stack = normal(3, 4)
    np.savez(tmp_path / "x.npz", x=stack, y=np.arange(3))
    for data, folder in ((tmp_path / "x.npz", "a"), ([stack[i : i + 1] for i in range(3)], "b")):
        assert infer(doubling(), data, tmp_path / folder).files == ("0.npy", "1.npy", "2.npy")
        np.testing.assert_array_equal(np.load(tmp_path / folder / "2.npy"), 2 * stack[2:])


def test_no_row_is_lost_to_a_fixed_batch(tmp_path: Path) -> None:
    """Calibration drops an incomplete batch; results must be complete."""
    arrays = {str(i): normal(rows, 4, seed=i) for i, rows in enumerate((1, 4, 7))}
    (tmp_path / "in").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "in" / f"{name}.npy", array)
    infer(doubling(4), tmp_path / "in", tmp_path / "out")
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.load(tmp_path / "out" / f"{name}.npy"), 2 * array)


def test_several_outputs_have_folders_of_their_own(tmp_path: Path) -> None:
    feed = normal(1, 4)
    done = infer(two_outputs(), [feed], tmp_path / "all")
    assert set(done.files) == {"up_1/0.npy", "down/0.npy"}
    np.testing.assert_array_equal(np.load(tmp_path / "all" / "down" / "0.npy"), -feed)
    assert infer(two_outputs(), [feed], tmp_path / "one", outputs=["down"]).files == ("0.npy",)
    with pytest.raises(RecipeError, match="no output 'dwn'"):
        infer(two_outputs(), [feed], tmp_path / "none", outputs=["dwn"])


def test_pictures_in_pictures_out(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "in" / "p.png")
    done = infer(brighter(), tmp_path / "in", tmp_path / "out", images=True)
    assert done.files == ("p.png",)
    shown = np.asarray(Image.open(tmp_path / "out" / "p.png"))
    assert np.abs(shown.astype(int) - np.rint(pixels / 2)).max() <= 1
    with pytest.raises(OutputError, match="not a picture"):
        infer(doubling(), [normal(1, 4)], tmp_path / "x", images=True)


def test_two_inputs_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for suffix in ("png", "jpg"):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "in" / f"p.{suffix}")
    with pytest.raises(OutputError, match="one name"):
        infer(brighter(), tmp_path / "in", tmp_path / "out")


def test_the_data_section_is_obeyed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for index in range(4):
        Image.fromarray(np.full((20, 20, 3), 51 * index, np.uint8)).save(tmp_path / "in" / f"{index}.png")
    options = Data(samples=2, mean=(0.2,), std=(0.5,), resize=(8, 8))
    done = infer(brighter(), tmp_path / "in", tmp_path / "out", options=options)
    assert done.files == ("0.npy", "2.npy")
    wanted = (2 * 51 / 255 - 0.2) / 0.5 * 0.5
    np.testing.assert_allclose(np.load(tmp_path / "out" / "2.npy"), wanted, rtol=1e-5)
    assert data_settings(None, {"mean": 0.2}).mean == (0.2,)


def test_labels_in_every_form_say_the_same(tmp_path: Path) -> None:
    model = build([node("Identity", ["x"], ["y"], "id")], {"x": [1, 4]}, {"y": [1, 4]})
    truth = [2, 0, 1, 3]
    for name, digit in zip("abcd", truth, strict=True):
        folder = tmp_path / "in" / f"class{digit}"
        folder.mkdir(parents=True)
        np.save(folder / f"{name}_{digit}.npy", np.eye(4, dtype=np.float32)[[digit]])
    ordered = [0, 1, 2, 3]  # the natural order of the paths
    np.save(tmp_path / "l.npy", ordered)
    np.savez(tmp_path / "l.npz", y=ordered)
    (tmp_path / "l.json").write_text('{"a_2": 2, "b_0.npy": 0, "class1/c_1.npy": 1, "class3/d_3": 3}')
    (tmp_path / "l.txt").write_text("0\n1\n2\n3\n")
    (tmp_path / "l.csv").write_text("file,label\na_2.npy,2\nb_0.npy,0\nc_1.npy,1\nd_3.npy,3\n")
    forms: list[object] = [tmp_path / f"l.{s}" for s in ("npy", "npz", "json", "txt", "csv")]
    for labels in [*forms, ordered, "folders", r"re:_(\d)\.npy$", {"a_2": 2, "b_0": 0, "c_1": 1, "d_3": 3}]:
        (score,) = evaluate_models([model], tmp_path / "in", labels=labels)
        assert (score.top1, score.rows, score.top5) == (1.0, 4, None), labels
    (score,) = evaluate_models([model], tmp_path / "in", labels=[1, 1, 2, 3])
    assert score.top1 == 0.75


@pytest.mark.parametrize("labels", [[0, 1], "re:(x", "re:abc", "nothing.npy", {"a": 1}, [0.5] * 4, object()])
def test_labels_that_do_not_fit_are_refused(labels: object, tmp_path: Path) -> None:
    model = build([node("Identity", ["x"], ["y"], "id")], {"x": [1, 4]}, {"y": [1, 4]})
    with pytest.raises(DataError):
        evaluate_models([model], [normal(1, 4, seed=i) for i in range(4)], labels=labels)


def test_models_side_by_side(tmp_path: Path) -> None:
    rows = [np.eye(8, dtype=np.float32)[[i]] + normal(1, 8, seed=i, scale=0.1) for i in range(8)]
    plain = build([node("Identity", ["x"], ["y"], "id")], {"x": [1, 8]}, {"y": [1, 8]})
    rolled = build(
        [node("MatMul", ["x", "w"], ["y"], "mm")],
        {"x": [1, 8]},
        {"y": [1, 8]},
        {"w": np.roll(np.eye(8, dtype=np.float32), 1, axis=1) * 0.5 + 0.6 * np.eye(8, dtype=np.float32)},
    )
    metric = tmp_path / "mine.py"
    metric.write_text(
        "import numpy as np\n"
        "def both(outputs, labels):\n"
        "    hits = [o.argmax() == l[0] for o, l in zip(outputs, labels, strict=True)]\n"
        "    return {'hits': sum(hits), 'size': float(np.abs(outputs[0]).max())}\n"
    )
    first, second = evaluate_models([plain, rolled], rows, labels=range(8), metric=f"{metric}:both")
    assert (first.top1, first.top5, first.agreement, first.sqnr_db) == (1.0, 1.0, None, None)
    wanted = np.concatenate([run(rolled, {"x": row})[0] for row in rows])
    assert second.top1 == np.mean(wanted.argmax(1) == np.arange(8))
    assert second.agreement == second.top1
    assert second.metric["hits"] == second.top1 * 8
    assert first.metric["size"] == pytest.approx(np.abs(rows[0]).max())


def test_a_metric_that_fails_says_so(tmp_path: Path) -> None:
    model = build([node("Identity", ["x"], ["y"], "id")], {"x": [1, 4]}, {"y": [1, 4]})

    def broken(outputs: list[object], labels: object) -> float:
        raise ZeroDivisionError("no")

    for metric in (broken, lambda outputs, labels: "good", "nowhere:f", "x.py:f", "helpers:nothing", "plain"):
        with pytest.raises(RecipeError):
            evaluate_models([model], [normal(1, 4)], metric=metric)


def test_labels_need_class_scores_or_a_metric() -> None:
    with pytest.raises(DataError, match="not class scores"):
        evaluate_models([brighter()], [normal(1, 3, 8, 8)], labels=[0])
