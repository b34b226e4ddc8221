"""Proof that a rewrite is exact in float."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from roundel.model.session import open_session
from roundel.types import Sample


def check_equalized(before: ir.Model, after: ir.Model, samples: Sequence[Sample]) -> float:
    """The largest difference between the outputs of two models, relative to the largest output value."""
    sessions = [open_session(model) for model in (before, after)]
    worst = 0.0
    for sample in samples:
        for old, new in zip(*(session.run(None, sample) for session in sessions), strict=True):
            if not old.size or old.dtype.kind != "f":
                continue
            size = float(np.abs(old).max()) or 1.0
            worst = max(worst, float(np.abs(old.astype(np.float64) - new).max()) / size)
    return worst
