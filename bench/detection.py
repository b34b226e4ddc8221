"""SSDLite MobileNetV2 on COCO images: mAP of every tool's file, all judged by `roundel evaluate`.

usage: python bench/detection.py [--contenders roundel:xint8,quark:XINT8,...]

Run where Roundel is installed; the peers run in their own environments. All get the same 40 calibration
images as the same arrays; 180 others judge. Each quantization is one run: its seconds are only a hint.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import environments
import machine
import roundel
from contenders import parse_contender
from models import BENCH_DIR, SHARED_DIR, WORK_DIR, BenchSetupError
from processes import run_script, scrub
from records import Contender, Failure
from roundel.data import open_samples
from roundel.measure.evaluate import evaluate_models
from roundel.model import load_model
from roundel.model.graph import input_specs
from roundel.recipe.settings import Data

MODEL = SHARED_DIR / "models" / "ssdlite_mobilenet_v2_coco.onnx"
COCO = SHARED_DIR / "data" / "coco"
WORK = WORK_DIR / "detection"
RESULT = BENCH_DIR / "results" / "detection"
TIMEOUT_S = 1800.0
CONTENDERS = (
    "roundel:xint8,quark:XINT8,quark:XINT8@include_cle=false,"
    "roundel:a8w8,quark:A8W8,quark:A8W8@include_cle=false,ort:int8_tensor,ort:int8_channel,ort:uint8_channel,"
    "roundel:a16w8,quark:A16W8,quark:A16W8@include_cle=false,ort:int16_channel"
)
# x / 127.5 - 1, the whole image stretched to the model's 300 x 300.
IMAGES = Data(mean=(0.5,), std=(0.5,))
Row = dict[str, Any]


def calibration() -> Path:
    """The calibration images as arrays that every tool reads."""
    specs = input_specs(load_model(MODEL).model)
    samples = open_samples(COCO / "calib", specs, images=IMAGES)
    path = WORK / "calib.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=np.concatenate([sample[specs[0].name] for sample in samples]))
    return path


def quantized(contender: Contender, calib: Path) -> tuple[Path, float] | Failure:
    """One contender's file and its seconds."""
    output = WORK / f"{contender.label.translate(str.maketrans(':@=', '___'))}.onnx"
    if contender.peer == "roundel":
        with np.load(calib) as stored:
            samples = [{"input": image[None]} for image in stored["x"]]
        start = time.perf_counter()
        roundel.quantize(MODEL, output, preset=contender.preset, data=samples)
        return output, time.perf_counter() - start
    try:
        python = environments.ensure(contender.peer)
        environments.warm_up(contender.peer, python)
    except BenchSetupError as error:
        return Failure(scrub(str(error)))
    words = ["--model", str(MODEL), "--calib", str(calib), "--preset", contender.preset]
    words += ["--output", str(output), "--options", json.dumps(dict(contender.options))]
    log = WORK_DIR / "logs" / "detection" / f"{output.stem}.log"
    done = run_script(python, BENCH_DIR / "peers" / f"{contender.peer}_peer.py", words, log, TIMEOUT_S)
    return done if isinstance(done, Failure) else (output, float(done["wall_s"]))


def judged(label: str, path: Path, seconds: float | None) -> Row:
    """What a file reaches, beside the float model."""
    models = [MODEL] if path == MODEL else [MODEL, path]
    words: dict[str, Any] = {"labels": COCO / "eval.json", "task": "detection", "options": IMAGES}
    score = evaluate_models(models, COCO / "eval", **words)[-1]
    row = {"contender": label, **score.metric, "sqnr_db": score.sqnr_db, "seconds": seconds}
    return {**row, "file_bytes": score.file_bytes, "images": score.rows}


def measured(labels: list[str]) -> list[Row]:
    """A row for the float model, and one for each contender."""
    calib, rows = calibration(), [judged("float", MODEL, None)]
    for label in labels:
        contender = parse_contender(label)
        try:
            made = quantized(contender, calib)
            if isinstance(made, Failure):
                rows.append({"contender": label, "error": made.message})
            else:
                rows.append(judged(label, *made))
        except roundel.RoundelError as error:
            rows.append({"contender": label, "error": scrub(str(error))})
        print(rows[-1], flush=True)
    return rows


def page(rows: list[Row], facts: dict[str, str]) -> str:
    """The result as Markdown."""
    lines = [
        "| contender | mAP50-95 | mAP50 | lost, points | box F1 | SQNR dB | size MB | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    best = rows[0]["mAP50-95"]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['contender']} | failed: {row['error'].splitlines()[0]} | | | | | | |")
            continue
        f1, sqnr, seconds = row.get("box F1"), row["sqnr_db"], row["seconds"]
        cells = [
            row["contender"],
            f"{100 * row['mAP50-95']:.2f}",
            f"{100 * row['mAP50']:.2f}",
            f"{100 * (best - row['mAP50-95']):.2f}",
            "" if f1 is None else f"{f1:.3f}",
            "" if sqnr is None else f"{sqnr:.1f}",
            f"{row['file_bytes'] / 1e6:.1f}",
            "" if seconds is None else f"{seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    described = ", ".join(f"{key}: {value}" for key, value in facts.items())
    return f"""# Detection: SSDLite MobileNetV2 on COCO images

40 calibration images, {rows[0]["images"]} others judge: mAP by COCO's rules in percent, scores above 0.01,
suppression at 0.6, at most 100 boxes. Box F1 and SQNR, of the class scores, are against the float model.
Roundel is at its default effort; Quark with equalization, its default, and without (`include_cle=false`).

{chr(10).join(lines)}

The labels have 27 classes, 6 of them one box only, and a box that is the only one of its class is worth 3.7
points of mAP: differences of a few points say nothing, and some files score above the float model.
Box F1 and SQNR say how far a file does what the float model does. One run each, on a machine that other work
shared, so that the seconds are a hint only. {described}. Revision {machine.revision()}.
"""


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if not MODEL.exists() or not COCO.is_dir():
        print("bench: SSDLite and the COCO images are missing in ../shared", file=sys.stderr)
        return 2
    environments.ignore_work_dir()
    facts = machine.describe()
    rows = measured(args.contenders.split(","))
    record = {"machine": facts, "revision": machine.revision(), "rows": rows}
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    text = page(rows, facts)
    args.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
