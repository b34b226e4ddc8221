"""Turns the shared images into the arrays that every contender gets (run in the ``ort`` environment).

``python bench/prepare.py --models a,b`` writes ``.bench/data/<model>.{calib,eval}.npz`` with ``x`` (float32,
NCHW) and ``y`` (class index). A file that is already there is kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from models import (
    SHARED_DIR,
    BenchModel,
    BenchSetupError,
    Labels,
    Preprocess,
    calib_path,
    eval_path,
    model_by_name,
    require_shared,
)

Float32 = npt.NDArray[np.float32]
Labels64 = npt.NDArray[np.int64]


def to_input(image: Image.Image, steps: Preprocess) -> Float32:
    """Applies a model's preprocessing to one RGB image.

    Args:
        image: RGB image.
        steps: The preprocessing.

    Returns:
        Array of shape (3, H, W).
    """
    if steps.resize is not None:
        factor = steps.resize / min(image.size)
        size = (round(image.width * factor), round(image.height * factor))
        image = image.resize(size, Image.Resampling.BILINEAR)
    if steps.crop is not None:
        left = (image.width - steps.crop) // 2
        top = (image.height - steps.crop) // 2
        image = image.crop((left, top, left + steps.crop, top + steps.crop))
    pixels = np.asarray(image, dtype=np.float32)
    scaled = (pixels - np.asarray(steps.mean, np.float32)) / np.asarray(steps.std, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1), dtype=np.float32)


def imagenet_images(split: str) -> tuple[list[Image.Image], Labels64]:
    """Reads the ImageNet crops of a split; the class index is the first part of each file name."""
    files = sorted((SHARED_DIR / "data" / "imagenet" / split).glob("*.jpg"))
    images = [Image.open(file).convert("RGB") for file in files]
    return images, np.asarray([int(file.name.split("_")[0]) for file in files], np.int64)


def cifar_images(split: str) -> tuple[list[Image.Image], Labels64]:
    """Reads the CIFAR-10 images of a split."""
    with np.load(SHARED_DIR / "data" / "cifar10" / f"{split}.npz", allow_pickle=False) as stored:
        return [Image.fromarray(pixels) for pixels in stored["x"]], stored["y"].astype(np.int64).reshape(-1)


def write_arrays(model: BenchModel, split: str, path: Path) -> None:
    """Writes the input and label arrays of one split of one model."""
    reader = imagenet_images if model.labels is Labels.IMAGENET else cifar_images
    images, y = reader(split)
    x = np.stack([to_input(image, model.preprocess) for image in images])
    path.parent.mkdir(parents=True, exist_ok=True)
    # A half-written cache would be taken for a whole one next time: write aside, then rename.
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, x=x, y=y)
    partial.replace(path)
    print(f"{model.name} {split}: {x.shape}")


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True, help="comma-separated model names")
    names = parser.parse_args().models.split(",")
    try:
        require_shared()
        models = [model_by_name(name) for name in names]
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for model in models:
        for split, path in (("calib", calib_path(model)), ("eval", eval_path(model))):
            if not path.exists():
                write_arrays(model, split, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
