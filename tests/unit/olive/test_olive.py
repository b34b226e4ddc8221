"""Workflows with Roundel's pass, and Olive's own passes through the doors; where Olive is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from helpers import activations, rng
from script_cases import network

pytest.importorskip("olive", reason="olive-ai is not installed")

SPEC = {"symmetric": False, "calibration_method": "MinMax", "quant_granularity": "Tensor"}
PASSES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "Roundel's": (
        ["-m", "olive"],
        {
            "type": "RoundelQuantization",
            "preset": "a16w8",
            "recipe": {"improve.rounding": False},
            "samples": 6,
        },
    ),
    "Quark's": (
        ["-m", "roundel.quark", "-m", "olive"],
        {
            "type": "QuarkQuantization",
            "global_config": {
                "activation": {**SPEC, "data_type": "Int16"},
                "weight": {**SPEC, "symmetric": True, "data_type": "Int8"},
            },
            "algo_config": [{"name": "cle", "cle_steps": 1}],
            "extra_options": {"AlignEltwiseQuantType": True},
        },
    ),
    "ONNX Runtime's": (
        ["-m", "roundel.ort", "-m", "olive"],
        {"type": "OnnxStaticQuantization", "activation_type": "int16", "precision": "uint8"},
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_workflow(name: str, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "net.onnx")
    folder = tmp_path / "data" / "x"
    folder.mkdir(parents=True)
    for index in range(8):
        rng(index).normal(0, 1, (1, 3, 8, 8)).astype("float32").tofile(folder / f"{index}.bin")
    data = {
        "name": "calib",
        "load_dataset_config": {
            "type": "raw_dataset",
            "data_dir": str(tmp_path / "data"),
            "input_names": ["x"],
            "input_shapes": [[3, 8, 8]],
        },
        "pre_process_data_config": {"type": "skip_pre_process"},
        "post_process_data_config": {"type": "skip_post_process"},
        "dataloader_config": {"batch_size": 1},
    }
    command, settings = PASSES[name]
    workflow = {
        "input_model": {"type": "ONNXModel", "model_path": "net.onnx"},
        "data_configs": [data],
        "passes": {"q": {**settings, "data_config": "calib"}},
        "output_dir": "out",
        "no_artifacts": True,
    }
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    written = subprocess.run(
        [sys.executable, "-m", "roundel.olive", "package.json"], cwd=tmp_path, check=False
    )
    assert written.returncode == 0
    more = ["--package-config", "package.json"] if name == "Roundel's" else []
    done = subprocess.run(
        [sys.executable, *command, "run", "--config", "workflow.json", *more],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OLIVE_DISABLE_TELEMETRY": "1"},
    )
    made = list((tmp_path / "out").rglob("*.onnx"))
    assert made, done.stdout[-2000:] + done.stderr[-2000:]
    assert {found.dtype for found in activations(onnx.load(made[0])).values()} == {"int16"}
