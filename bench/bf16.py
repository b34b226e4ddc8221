"""BF16 in every form: size, closeness to float, and whether the logits are equal bit for bit.

``python bench/bf16.py MODEL.onnx EVAL.npz [--learn CALIB.npz]`` where Roundel is installed; both hold images
as `x`. The files run in a stock ONNX Runtime session. Beside them stand AMD Quark's own files, and Roundel's
file without function bodies, both under Quark's operator library, in the ``quark`` environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import environments
import machine
import roundel
from models import BENCH_DIR, WORK_DIR, BenchSetupError
from processes import run_script
from records import Failure

FORMS: dict[str, dict[str, Any]] = {
    "pair": {"form": "pair"},
    "pair, 16-bit weights": {"form": "pair", "half_weights": True},
    "cast": {"form": "cast"},
    "cast, 16-bit weights": {"form": "cast", "half_weights": True},
    "plain": {"form": "plain"},
    "plain, 16-bit weights": {"form": "plain", "half_weights": True},
    "bare": {"form": "pair", "strip_functions": True},
}
IMPROVED: dict[str, dict[str, Any]] = {
    "pair, with data": {"floats.form": "pair"},
    "pair, with data, 16-bit weights": {"floats.form": "pair", "output.half_weights": True},
    "cast, with data": {"floats.form": "cast"},
    "cast, with data, 16-bit weights": {"floats.form": "cast", "output.half_weights": True},
}
QUARK = {"pair": "quark_pair", "cast": "quark_cast", "plain": "quark_plain"}


def logits(path: Path, images: Any, *, optimized: bool = True) -> Any:
    """One image after the other, in a session without any library."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {name: images[i : i + 1]})[0] for i in range(len(images))])


def sqnr(reference: Any, got: Any) -> float:
    """In dB, over all images together."""
    noise = np.square(got - reference, dtype=np.float64).sum()
    return float(10 * np.log10(np.square(reference, dtype=np.float64).sum() / noise))


def written(model: Path, folder: Path) -> dict[str, tuple[Path, float]]:
    """The files, with the seconds that each took."""
    made = {}
    for number, (name, options) in enumerate(FORMS.items()):
        path = folder / f"roundel_{number}.onnx"
        start = time.perf_counter()
        roundel.convert(model, path, **options)
        made[name] = path, time.perf_counter() - start
    return made


def improved(model: Path, folder: Path, images: Any) -> dict[str, tuple[Path, float]]:
    """The preset as it is with samples to learn from: biases take up what rounding shifts."""
    name = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).get_inputs()[0].name
    made = {}
    for number, (form, changes) in enumerate(IMPROVED.items()):
        path = folder / f"roundel_improved_{number}.onnx"
        start = time.perf_counter()
        roundel.quantize(model, path, recipe="bf16", data=[{name: x[None]} for x in images], changes=changes)
        made[form] = path, time.perf_counter() - start
    return made


def row(who: str, form: str, path: Path, seconds: float, whole: int, db: float) -> dict[str, Any]:
    """One line of the table."""
    share = path.stat().st_size / whole
    return {"by": who, "form": form, "share": share, "seconds": seconds, "sqnr_db": db}


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| by | form | size | SQNR | s | logits |", "|---|---|---:|---:|---:|---|"]
    for r in rows:
        lines.append(
            f"| {r['by']} | {r['form']} | {r['share']:.1%} | {r['sqnr_db']:.2f} dB | {r['seconds']:.1f} "
            f"| {r['equal']} |"
        )
    return "\n".join(lines)


def compared(
    made: dict[str, tuple[Path, float]], stock: dict[str, Any], peer: Any, strict: dict[str, Any]
) -> dict[str, str]:
    """In words, for each of Roundel's files, whose logits its own equal."""
    words = {}
    for name, (path, _) in made.items():
        same = []
        if name == "bare":
            same.append(_word("pair, all optimizations off", strict["pair"], peer[f"{path.stem} strict"]))
            same.append(_word("Quark's pair", peer["quark_pair"], peer[path.stem]))
        else:
            plain = "plain" if name.startswith("plain") else "pair"
            family = "pair, with data" if name in IMPROVED else plain
            same.append(_word(family, stock[family], stock[name]))
            if name in QUARK and name != "pair":
                same.append(_word(f"Quark's {name}", peer[QUARK[name]], stock[name]))
        words[name] = "; ".join(same)
    return words


def _word(what: str, one: Any, other: Any) -> str:
    return f"{'=' if one.tobytes() == other.tobytes() else 'NOT EQUAL to'} {what}"


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--learn", type=Path, help="samples to learn from, as `x`: adds rows with data")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--strict-images", type=int, default=20, help="with all optimizations off")
    parser.add_argument("--out", type=Path, default=BENCH_DIR / "results" / "bf16")
    args = parser.parse_args()
    facts, folder = machine.describe(), WORK_DIR / "out" / "bf16"
    folder.mkdir(parents=True, exist_ok=True)
    made = written(args.model, folder)
    if args.learn:
        made |= improved(args.model, folder, np.load(args.learn)["x"])
    images = np.load(args.data)["x"][: args.images]
    reference = logits(args.model, images)
    stock = {name: logits(path, images) for name, (path, _) in made.items() if name != "bare"}
    strict = {"pair": logits(made["pair"][0], images[: args.strict_images], optimized=False)}
    try:
        python = environments.ensure("quark")
        environments.warm_up("quark", python)
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    counts = ["--images", str(len(images)), "--strict-images", str(args.strict_images)]
    arguments = [str(args.model.resolve()), str(args.data.resolve()), str(folder)]
    result = run_script(
        python,
        BENCH_DIR / "peers" / "bf16_peer.py",
        [*arguments, *(str(path) for path, _ in made.values()), *counts],
        WORK_DIR / "logs" / "bf16.log",
        3600.0,
    )
    if isinstance(result, Failure):
        print(f"bench: {result.message}", file=sys.stderr)
        return 1
    peer, whole = np.load(folder / "peer.npz"), args.model.stat().st_size
    words = compared(made, stock, peer, strict)
    rows = []
    for name, (path, took) in made.items():
        got = peer[path.stem] if name == "bare" else stock[name]
        rows.append({**row("Roundel", name, path, took, whole, sqnr(reference, got)), "equal": words[name]})
    for form, stem in QUARK.items():
        found = row(
            "Quark",
            form,
            folder / f"{stem}.onnx",
            result["seconds"][form],
            whole,
            sqnr(reference, peer[stem]),
        )
        rows.append({**found, "equal": "needs its library" if form == "pair" else ""})
    described = ", ".join(f"{key}: {value}" for key, value in facts.items())
    page = f"""# BF16 in every form

{args.model.name}, {len(images)} images, a stock ONNX Runtime session for each file (Roundel's bare form and
Quark's pairs: with Quark's operator library). Size: share of the float file. Logits: bit for bit.

{table(rows)}

{described}. Revision {machine.revision()}.
"""
    args.out.with_suffix(".md").write_text(page)
    args.out.with_suffix(".json").write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
