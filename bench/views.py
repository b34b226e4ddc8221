"""How many points of top-1 quantized ImageNet models lose, over more than one view of each evaluation image.

``python bench/views.py MODEL FILE...`` (in the ``ort`` environment): MODEL is a name of `models.py`, FILE a
quantized file of it. A handful of images decides a drop on 400 of them: files of the same SQNR differ by two
points. So each image is cropped at four corners, two of them mirrored, and never in the centre as in other
benchmarks. The margin is one standard error; the views of one image count as one draw.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from evaluate import file_size, open_session, run_all, score
from models import BenchModel, BenchSetupError, float_path, model_by_name, require_shared
from prepare import imagenet_images, to_input

Array = npt.NDArray[np.float32]
VIEWS = 4


def corners(image: Image.Image, model: BenchModel) -> Iterator[Array]:
    """Four crops of an image, off its centre, every other one mirrored."""
    steps = model.preprocess
    if steps.resize is None or steps.crop is None:
        raise BenchSetupError(f"{model.name} takes whole images: there is nothing to crop")
    whole = image.resize((steps.resize, steps.resize), Image.Resampling.BILINEAR)
    near, far = 4, steps.resize - steps.crop - 4
    plain = dataclasses.replace(steps, resize=None, crop=None)
    for number, (left, top) in enumerate(((near, near), (far, near), (near, far), (far, far))):
        part = whole.crop((left, top, left + steps.crop, top + steps.crop))
        if number in (1, 2):
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        yield to_input(part, plain)


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    try:
        require_shared()
        model = model_by_name(args.model)
        images, labels = imagenet_images("eval")
        views = np.stack([view for image in images for view in corners(image, model)])
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    wanted = np.repeat(labels, VIEWS)
    real = run_all(open_session(float_path(model), None), views)
    right = real[0].argmax(1) == wanted
    print(f"{model.name}: {len(images)} images, {len(views)} views, float top-1 {100 * right.mean():.2f} %\n")
    print("| file | top-1 % | drop, points | as float % | SQNR dB |\n|---|---|---|---|---|")
    for path in args.files:
        got = run_all(open_session(path, None), views)
        found = score(real, got, wanted, file_size(path))
        lost = 100.0 * (right.astype(float) - (got[0].argmax(1) == wanted)).reshape(-1, VIEWS).mean(1)
        drop = f"{lost.mean():.2f} ± {lost.std() / np.sqrt(len(lost)):.2f}"
        ratio = "-" if found.sqnr_db is None else f"{found.sqnr_db:.1f}"
        print(f"| {path.stem} | {found.top1:.2f} | {drop} | {found.agreement:.1f} | {ratio} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
