"""Torch is an extra: without it these tests have nothing to say."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")
