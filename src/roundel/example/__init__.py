"""The embedded example: a small CNN for 8x8 handwritten digits, with its calibration and evaluation images.

``digits.onnx`` and ``digits.npz`` are made by ``scripts/train_example.py``. The images are those of
scikit-learn's ``load_digits``, a part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak (UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["INPUT_NAME", "Example", "load_example", "preprocess"]

INPUT_NAME = "image"
_PIXEL_MAX = 16.0


@dataclass(frozen=True, eq=False)
class Example:
    """A float model with the data to calibrate and to judge its quantized forms.

    Attributes:
        model_path: The float32 ONNX file, batch dimension dynamic.
        calibration: One feed (input name to a batch of 1) per calibration image.
        calibration_labels: The digit shown in each calibration image, int64.
        eval_x: All held-out images, preprocessed: float32, (count, 1, 16, 16).
        eval_y: The digit shown in each held-out image, int64.
    """

    model_path: Path
    calibration: list[dict[str, NDArray[np.float32]]]
    calibration_labels: NDArray[np.int64]
    eval_x: NDArray[np.float32]
    eval_y: NDArray[np.int64]


def preprocess(images: NDArray[Any]) -> NDArray[np.float32]:
    """Turn raw digits into what the network takes.

    Each image is doubled in size (bilinear, half-pixel centres, edges held) and mapped from 0..16 to -1..1.

    Args:
        images: Grayscale images with values 0 to 16, of shape (count, height, width).

    Returns:
        A float32 array of shape (count, 1, 2 * height, 2 * width).
    """
    import numpy as np

    x = np.asarray(images, dtype=np.float32) * np.float32(2.0 / _PIXEL_MAX) - np.float32(1.0)
    for axis in (1, 2):
        size = x.shape[axis]
        at = np.arange(size)
        before = x.take(np.maximum(at - 1, 0), axis=axis)
        after = x.take(np.minimum(at + 1, size - 1), axis=axis)
        # At twice the size, every output lies a quarter pixel from its source: weights 3/4 and 1/4.
        pair = np.stack([0.75 * x + 0.25 * before, 0.75 * x + 0.25 * after], axis=axis + 1)
        x = pair.reshape(*x.shape[:axis], 2 * size, *x.shape[axis + 1 :])
    return np.ascontiguousarray(x[:, np.newaxis], dtype=np.float32)


def load_example() -> Example:
    """Load the example that comes with the package.

    Returns:
        The model's path with 100 calibration feeds and the evaluation set, all preprocessed.
    """
    import numpy as np

    folder = Path(__file__).resolve().parent
    with np.load(folder / "digits.npz", allow_pickle=False) as data:
        calib_x = preprocess(data["calib_x"])
        calib_y = data["calib_y"].astype(np.int64)
        eval_x = preprocess(data["eval_x"])
        eval_y = data["eval_y"].astype(np.int64)
    return Example(
        model_path=folder / "digits.onnx",
        calibration=[{INPUT_NAME: calib_x[i : i + 1]} for i in range(len(calib_x))],
        calibration_labels=calib_y,
        eval_x=eval_x,
        eval_y=eval_y,
    )
