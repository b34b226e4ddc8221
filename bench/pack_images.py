"""Packs calibration and evaluation images into one small file for ``finetune_gpu.py``.

``python bench/pack_images.py CALIB.npz EVAL.npz OUT.npz [--evaluate 100]``. The arrays ``x`` must be images
of whole 8-bit values behind one mean and one std; they are stored as such, and the file says how to get back.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def as_bytes(x: npt.NDArray[np.float32], mean: float, std: float) -> npt.NDArray[np.uint8]:
    """The pixels behind a normalized array.

    Raises:
        ValueError: They are not whole numbers in 0..255.
    """
    pixels = np.rint(x.astype(np.float64) * std + mean)
    if pixels.min() < 0 or pixels.max() > 255 or not np.array_equal(((pixels - mean) / std).astype("f4"), x):
        raise ValueError(f"the images are not 8-bit pixels less {mean}, over {std}")
    return pixels.astype(np.uint8)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("calib", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--evaluate", type=int, default=100, help="evaluation images, evenly spread")
    parser.add_argument("--mean", type=float, default=127.0)
    parser.add_argument("--std", type=float, default=128.0)
    args = parser.parse_args()
    arrays: dict[str, Any] = {"mean": np.float32(args.mean), "std": np.float32(args.std)}
    with np.load(args.calib) as stored:
        arrays["x"] = as_bytes(stored["x"], args.mean, args.std)
    with np.load(args.evaluation) as stored:
        step = max(1, len(stored["y"]) // args.evaluate)
        arrays["eval_x"] = as_bytes(stored["x"][::step], args.mean, args.std)
        arrays["eval_y"] = stored["y"][::step]
    np.savez_compressed(args.out, **arrays)


if __name__ == "__main__":
    main()
