"""Inputs and files that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from roundel.types import InputSpec


@pytest.fixture
def image_input() -> list[InputSpec]:
    """A small image classifier with a fixed batch of 1."""
    return [InputSpec("input", np.dtype(np.float32), (1, 3, 4, 6))]


@pytest.fixture
def open_input() -> list[InputSpec]:
    """The same with an open batch."""
    return [InputSpec("input", np.dtype(np.float32), ("N", 3, 4, 6))]


@pytest.fixture
def two_inputs() -> list[InputSpec]:
    """A text model."""
    return [
        InputSpec("input_ids", np.dtype(np.int64), ("batch", 5)),
        InputSpec("attention_mask", np.dtype(np.int64), ("batch", 5)),
    ]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Class sub-folders of small PNG images whose names sort differently by text and by number."""
    rng = np.random.default_rng(0)
    for name in ("a/img10.png", "a/img2.png", "b/img1.png"):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 14, 3), dtype=np.uint8)).save(path)
    return tmp_path / "pictures"
