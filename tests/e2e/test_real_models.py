"""Models and images of the shared folder, where the machine has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import PIL.Image
import pytest

import roundel
from helpers import assert_sound
from roundel.model.session import open_session

SHARED = Path(__file__).parents[3] / "shared"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "models").is_dir(), reason="no ../shared/models on this machine"),
]


Floats = list[float]


def cifar(name: str, count: int, side: int, mean: Floats, std: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Images as the model takes them, and their labels."""
    with np.load(SHARED / "data" / "cifar10" / name) as archive:
        pixels, labels = archive["x"][:count], archive["y"][:count]
    if side != pixels.shape[1]:
        size = (side, side)
        pixels = np.stack(
            [np.asarray(PIL.Image.fromarray(p).resize(size, PIL.Image.Resampling.BILINEAR)) for p in pixels]
        )
    scaled = (pixels.astype(np.float32) / 255 - np.float32(mean)) / np.float32(std)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)), labels


CIFAR = ([0.4914, 0.4822, 0.4465], [0.247, 0.243, 0.262])
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
MODELS = {"cifar10_resnet20": (32, *IMAGENET), "mobilenet_v3_small": (64, *CIFAR)}


@pytest.mark.parametrize(
    ("name", "recipe", "changes", "floor"),
    [
        ("cifar10_resnet20", "a8w8", {}, 15),
        ("cifar10_resnet20", "a16w8", {"weights": {"per_channel": True}}, 25),
        ("mobilenet_v3_small", "u8s8_aaws", {"weights": {"per_channel": True}}, 5),
        ("mobilenet_v3_small", "a16w8", {"weights": {"per_channel": True}}, 15),
    ],
)
def test_a_real_model(name: str, recipe: str, changes: dict, floor: float, tmp_path: Path) -> None:
    path = SHARED / "models" / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    side, mean, std = MODELS[name]
    images, _ = cifar("calib.npz", 8, side, mean, std)
    out = tmp_path / "q.onnx"
    result = roundel.quantize(path, out, recipe=recipe, data=images, changes=changes)
    assert_sound(onnx.load(path), onnx.load(out))
    report = result.record.outputs[0]
    assert report.sqnr_db > floor
    held_out, labels = cifar("eval.npz", 64, side, mean, std)
    accuracies = []
    for model in (path, out):
        session = open_session(model, simulate=True)
        feed = session.get_inputs()[0].name
        logits = np.concatenate([session.run(None, {feed: image[None]})[0] for image in held_out])
        accuracies.append(float((logits.argmax(1) == labels).mean()))
    assert accuracies[1] > accuracies[0] - 0.2
