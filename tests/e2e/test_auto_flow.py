"""Budgets and searches as commands, from the embedded example to a model that a stock ONNX Runtime runs."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from roundel.example import load_example

DIGITS = load_example()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(
        tmp_path / "calib.npz", image=np.concatenate([sample["image"] for sample in DIGITS.calibration[:40]])
    )
    np.savez(tmp_path / "eval.npz", image=DIGITS.eval_x[:200])
    np.save(tmp_path / "labels.npy", DIGITS.eval_y[:200])
    return tmp_path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "roundel", *map(str, words)]


def test_a_model_within_its_budget(data: Path) -> None:
    out = data / "out.onnx"
    words = ("--data", data / "calib.npz", "--eval-data", data / "eval.npz", "--labels", data / "labels.npy")
    rungs = ("--rungs", "xint8,a8w8,a16w8,mixed,bf16")
    ran = subprocess.run(
        command("auto", DIGITS.model_path, "-o", out, *words, "--max-drop", "1 point", *rungs),
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert max(map(len, ran.stdout.splitlines())) <= 80
    tree = json.loads((data / "out.auto.json").read_text())
    step = next(step for step in tree["ladder"] if step["verdict"] == "chosen")
    # Judged anew, by nothing of Roundel's.
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    right = {}
    for path in (DIGITS.model_path, out):
        session = ort.InferenceSession(path, options, ["CPUExecutionProvider"])
        answers = [session.run(None, {"image": x[None]})[0].argmax() for x in DIGITS.eval_x[:200]]
        right[path] = float(np.mean(np.array(answers) == DIGITS.eval_y[:200]))
    assert tree["float"] == pytest.approx(right[DIGITS.model_path])
    assert step["metric"] == pytest.approx(right[out])
    assert right[DIGITS.model_path] - right[out] <= 0.01 + 1e-9


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_search_goes_on(data: Path) -> None:
    study = data / "study.db"
    space = ("--space", "calibration.margin=1.0..2.0", "-p", "a8w8_minmax")
    words = command("search", DIGITS.model_path, "--data", data / "calib.npz", *space, "--study", study)
    running = subprocess.Popen(
        [*words, "--trials", "500"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while _finished(study) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    running.kill()
    running.wait()
    before = _finished(study)
    assert before >= 2
    ran = subprocess.run(
        [*words, "--trials", str(before + 2), "--json"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["finished"] == before + 2


def _finished(study: Path) -> int:
    if not study.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{study}?mode=ro", uri=True) as database:
            return int(database.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0])
    except sqlite3.OperationalError:  # its tables are being made
        return 0
