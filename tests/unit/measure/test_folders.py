"""Two folders of results: partners, formats, refusals."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import normal, rng
from roundel import evaluate_folders
from roundel.errors import DataError


def save(folder: Path, **arrays: np.ndarray) -> Path:
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, array)
    return folder


def test_arrays_and_images_in_sub_folders_are_matched_by_name(tmp_path: Path) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    pixels = rng(1).integers(0, 256, (24, 30, 3)).astype(np.uint8)
    for folder, shift in ((base, 0), (other, 3)):
        save(folder / "scores", a=normal(1, 10) + shift / 10, b=normal(1, 10, seed=2) + shift / 100)
        Image.fromarray(np.clip(pixels.astype(int) + shift, 0, 255).astype(np.uint8)).save(folder / "pic.png")
        Image.fromarray(pixels[:, :, 0]).save(folder / "grey.jpg")
        (folder / "notes.txt").write_text("not a result")
    scores = evaluate_folders(base, other)
    names = [file.name for file in scores.files]
    assert names == ["grey.jpg", "pic.png", "scores/a.npy", "scores/b.npy"]
    by_name = {file.name: file.similarity for file in scores.files}
    assert by_name["grey.jpg"].l2 == 0
    assert by_name["pic.png"].psnr_db == pytest.approx(20 * np.log10(255 / 3), abs=0.2)
    assert scores.metrics["l2"].worst_file == "pic.png"
    assert scores.metrics["cosine"].worst == min(s.cosine for s in by_name.values())
    assert scores.metrics["cosine"].mean == pytest.approx(np.mean([s.cosine for s in by_name.values()]))
    assert json.loads(json.dumps(scores.to_dict()))["metrics"]["psnr_db"]["mean"] == "inf"
    rows = list(csv.DictReader(io.StringIO(scores.to_csv())))
    assert [row["file"] for row in rows] == names
    assert float(rows[2]["l2"]) == pytest.approx(by_name["scores/a.npy"].l2)
    assert rows[2]["ssim"] == ""


def test_a_picture_saved_in_another_format_is_still_its_partner(tmp_path: Path) -> None:
    pixels = rng(1).integers(0, 256, (24, 30, 3)).astype(np.uint8)
    for name, suffix in (("one", ".png"), ("two", ".jpg")):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / f"a{suffix}")
    assert evaluate_folders(tmp_path / "one", tmp_path / "two").files[0].similarity.cosine > 0.9


def test_missing_partners_are_an_error_on_either_side(tmp_path: Path) -> None:
    one = save(tmp_path / "one", a=normal(1, 3), b=normal(1, 3))
    two = save(tmp_path / "two", a=normal(1, 3), c=normal(1, 3))
    with pytest.raises(DataError) as caught:
        evaluate_folders(one, two)
    assert "b.npy" in str(caught.value)
    assert "c.npy" in str(caught.value)


@pytest.mark.parametrize("broken", ["shape", "nan", "objects", "truncated", "empty", "absent", "mixed"])
def test_results_that_cannot_be_compared(broken: str, tmp_path: Path) -> None:
    one, two = save(tmp_path / "one", a=normal(1, 3)), save(tmp_path / "two", a=normal(1, 3))
    target = two / "a.npy"
    if broken == "shape":
        np.save(target, normal(1, 4))
    elif broken == "nan":
        np.save(target, np.full((1, 3), np.nan, np.float32))
    elif broken == "objects":
        np.save(target, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif broken == "truncated":
        target.write_bytes(target.read_bytes()[:-4])
    elif broken == "empty":
        target.unlink()
    elif broken == "absent":
        two = tmp_path / "three"
    else:
        target.unlink()
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(two / "a.png")
    with pytest.raises(DataError):
        evaluate_folders(one, two)
