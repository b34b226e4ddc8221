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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from PIL import Image

from models import BenchModel, BenchSetupError, Labels, float_path, model_by_name, require_shared
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


def outputs(path: Path, views: list[Array]) -> Array:
    """The first output for each view, batch 1, Q/DQ pairs computed in float as they are written."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options)
    name = session.get_inputs()[0].name

    def one(view: Array) -> Array:
        return np.asarray(session.run(None, {name: view[None]})[0][0], np.float32)

    with ThreadPoolExecutor(2) as pool:
        return np.stack(list(pool.map(one, views)))


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    try:
        require_shared()
        model = model_by_name(args.model)
        if model.labels is not Labels.IMAGENET:
            raise BenchSetupError(f"{model.name} takes whole images: there is nothing to crop")
        images, labels = imagenet_images("eval")
        views = [view for image in images for view in corners(image, model)]
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    wanted = np.repeat(labels, VIEWS)
    real = outputs(float_path(model), views)
    right = real.argmax(1) == wanted
    print(f"{model.name}: {len(images)} images, {len(views)} views, float top-1 {100 * right.mean():.2f} %\n")
    print("| file | top-1 % | drop, points | as float % | SQNR dB |\n|---|---|---|---|---|")
    for path in args.files:
        got = outputs(path, views)
        lost = 100.0 * (right.astype(float) - (got.argmax(1) == wanted)).reshape(-1, VIEWS).mean(1)
        margin = lost.std() / np.sqrt(len(lost))
        same = 100 * (got.argmax(1) == real.argmax(1)).mean()
        ratio = 10 * np.log10(
            np.square(real, dtype=np.float64).sum() / np.square(got - real, dtype=np.float64).sum()
        )
        top = 100 * right.mean() - lost.mean()
        print(
            f"| {path.stem} | {top:.2f} | {lost.mean():.2f} ± {margin:.2f} | {same:.1f} | {ratio:.1f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
