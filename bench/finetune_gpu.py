"""AdaRound at the documents' settings on a GPU, for a machine that has nothing else of the benchmark.

``python bench/finetune_gpu.py MODEL.onnx DATA.npz OUT.json``. DATA holds ``x`` (calibration images, 8-bit
with ``mean`` and ``std``, or the model's own input) and, to judge the result, ``eval_x`` and ``eval_y``
(``pack_images.py`` makes it). Needs torch with CUDA, ONNX Runtime (CPU), onnx, onnx-ir 1.1, numpy, pydantic
and pyyaml; ``--site`` names a folder with those that the machine's Python lacks.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

REFERENCE = {"seconds": 2319.0, "sqnr_db": 17.3, "what": "Quark 0.13 XINT8_ADAROUND, two CPU cores"}
ROWS = (
    ("AdaRound alone", {"improve": {"rounding": False}}),
    ("walk, then AdaRound", {}),
)


def main() -> int:
    """Runs both rows, prints them, and writes the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", help="of the gradients")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--preset", default="xint8_adaround")
    parser.add_argument("--site", type=Path, help="folder of unpacked wheels that come before the installed")
    args = parser.parse_args()
    repository = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(repository / "src"), *([str(args.site.resolve())] if args.site else [])]
    images = load(args.data)
    warm_up(args.device)
    result: dict[str, Any] = {"machine": describe(args.device), "reference": REFERENCE, "rows": []}
    print(json.dumps(result["machine"]), flush=True)
    print(f"{'':22}{'total s':>9}{'tuning s':>10}{'held-out dB':>18}{'eval dB':>9}{'top-1':>8}", flush=True)
    for name, changes in ROWS:
        row = run(name, changes, args, images)
        result["rows"].append(row)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(line(row), flush=True)
    print(f"{'reference':22}{REFERENCE['seconds']:9.0f}{'':10}{'':18}{REFERENCE['sqnr_db']:9.2f}")
    return 0


def load(path: Path) -> dict[str, Any]:
    """The arrays, as the model takes them."""
    import numpy as np

    with np.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name in ("x", "eval_x"):
        if name in arrays and arrays[name].dtype == np.uint8:
            arrays[name] = (arrays[name].astype(np.float32) - arrays["mean"]) / arrays["std"]
    return arrays


def warm_up(device: str) -> None:
    """The first step on a GPU loads libraries for seconds; it does not belong to any row."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    a = torch.randn(256, 256, device=device, requires_grad=True)
    (a @ a).square().mean().backward()
    torch.optim.Adam([a], fused=True).step()
    if device != "cpu":
        torch.cuda.synchronize()


def describe(device: str) -> dict[str, str]:
    """What the numbers depend on."""
    import onnxruntime  # type: ignore[import-not-found, unused-ignore]
    import torch

    name = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"device": name, **versions, "onnxruntime": onnxruntime.__version__}


def run(
    name: str, changes: dict[str, Any], args: argparse.Namespace, images: dict[str, Any]
) -> dict[str, Any]:
    """One quantization, timed as a whole, judged afterwards."""
    import roundel
    from roundel.recipe.settings import merge

    tuning = {"improve": {"finetune": {"optim_device": args.device, "iterations": args.iterations}}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "q.onnx"
        start = time.perf_counter()
        done = roundel.quantize(
            args.model, path, recipe=args.preset, data=images["x"], changes=merge(tuning, changes)
        )
        seconds = time.perf_counter() - start
        judged = judge(args.model, path, images) if "eval_x" in images else {}
    steps = {step.step: step for step in done.record.improvements}
    last = steps["fine-tuning"]
    return {
        "name": name,
        "seconds": seconds,
        "by_step": {step: report.seconds for step, report in steps.items()},
        "before_db": last.before_db,
        "after_db": last.after_db,
        "kept": last.kept,
        **judged,
        "layers": [asdict(layer) for layer in last.layers],
    }


def judge(model: Path, quantized: Path, images: dict[str, Any]) -> dict[str, float]:
    """SQNR of the outputs on the evaluation images, and top-1 where there are labels."""
    import numpy as np

    from roundel.model.session import open_session
    from roundel.numerics.metrics import Closeness

    outputs = []
    for path in (model, quantized):
        session = open_session(path, simulate=True)
        feed = session.get_inputs()[0].name
        rows = [session.run(None, {feed: image[None]})[0] for image in images["eval_x"]]
        outputs.append(np.concatenate(rows))
    found = {"eval_db": Closeness.of(*outputs).sqnr_db}
    if "eval_y" in images:
        top = [float((each.argmax(1) == images["eval_y"]).mean() * 100) for each in outputs]
        found |= {"float_top1": top[0], "top1": top[1]}
    return found


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    change = f"{row['before_db']:.2f} -> {row['after_db']:.2f}"
    quality = (("eval_db", "9.2f"), ("top1", "8.1f"))
    tail = "".join(f"{row[key]:{width}}" for key, width in quality if key in row)
    return f"{row['name']:22}{row['seconds']:9.1f}{row['by_step']['fine-tuning']:10.1f}{change:>18}{tail}"


if __name__ == "__main__":
    sys.exit(main())
