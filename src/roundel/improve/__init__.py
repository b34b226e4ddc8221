"""Improve a quantized model beyond calibration. Algorithms take a state and return a state."""

from __future__ import annotations
