"""Image classification in the NPU's integer formats, with the flags of AMD's advanced quantization tutorial.

    python examples/classification/quantize.py                      # the embedded digits, all configurations
    python examples/classification/quantize.py --fast_finetune      # one configuration
    python examples/classification/quantize.py --model_input models/mobilenetv2.onnx \\
        --model_output models/mobilenetv2_quant.onnx --calib_data calib/ --eval_data val/ --labels folders \\
        --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --resize 256 --crop 224

`--config` chooses XINT8, A8W8 or A16W8; `--fast_finetune` and `--cross_layer_equalization` are as there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import roundel
from roundel.example import load_example
from roundel.recipe.settings import Data
from table import show

CONFIGS = ("XINT8", "A8W8", "A16W8")


def recipe(config: str, *, finetune: bool, equalize: bool, iterations: int) -> dict[str, Any]:
    """What the tutorial's script does for its flags, as a recipe: calibration only, and what is asked for."""
    wanted: dict[str, Any] = {"extends": config.lower(), "effort": "none", "improve": {}}
    if finetune or equalize:
        wanted["effort"] = "fast"
        wanted["improve"] = {"equalize": {"enabled": equalize}, "rounding": False, "ranges": False}
    if finetune:
        wanted["improve"]["finetune"] = {"algorithm": "adaround", "iterations": iterations}
    return wanted


def numbers(text: str | None) -> list[float] | None:
    return None if text is None else [float(part) for part in text.split(",")]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_input", type=Path, help="float model; the embedded digits when not given")
    parser.add_argument("--model_output", type=Path, help="where the quantized model goes")
    parser.add_argument("--calib_data", type=Path, help="folder of images")
    parser.add_argument("--eval_data", type=Path, help="folder of images")
    parser.add_argument("--labels", default="folders", help="see docs/evaluate.md")
    parser.add_argument("--config", choices=CONFIGS, default=None, help="XINT8 in the tutorial")
    parser.add_argument("--fast_finetune", action="store_true")
    parser.add_argument("--cross_layer_equalization", action="store_true")
    parser.add_argument("--iterations", type=int, default=1000, help="of fine-tuning, for each layer")
    parser.add_argument("--mean")
    parser.add_argument("--std")
    parser.add_argument("--resize", type=int)
    parser.add_argument("--crop", type=int)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    images = {"mean": numbers(args.mean), "std": numbers(args.std), "resize": args.resize, "crop": args.crop}
    given = {name: value for name, value in images.items() if value is not None}
    if args.model_input is None:
        example = load_example()
        model, calib = example.model_path, example.calibration
        judged, labels = [{"image": image[None]} for image in example.eval_x], example.eval_y
    else:
        model, calib, judged, labels = args.model_input, args.calib_data, args.eval_data, args.labels
    flags = (args.fast_finetune, args.cross_layer_equalization)
    everything = args.config is None and not any(flags) and args.model_input is None
    runs = [(args.config or "XINT8", *flags)]
    if everything:
        runs = [(c, *f) for c in CONFIGS for f in ((False, False), (False, True), (True, False))]
    with tempfile.TemporaryDirectory() as folder:
        names, files = ["float"], [model]
        for config, finetune, equalize in runs:
            words = [config, *(["fast_finetune"] if finetune else []), *(["CLE"] if equalize else [])]
            target = args.model_output or Path(folder) / f"{'_'.join(words)}.onnx"
            settings = recipe(config, finetune=finetune, equalize=equalize, iterations=args.iterations)
            roundel.quantize(model, target, recipe=settings, data=calib, changes={"data": given})
            names.append(" + ".join(words))
            files.append(target)
        scores = roundel.evaluate_models(files, judged, labels=labels, options=Data(**given))
        rows = [
            (name, f"{file.stat().st_size / 1e3:.1f} KB", *map(percent, (s.top1, s.top5, s.agreement)))
            for name, file, s in zip(names, files, scores, strict=True)
        ]
    show(("configuration", "size", "top-1", "top-5", "same as float"), rows)


if __name__ == "__main__":
    main()
