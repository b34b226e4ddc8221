"""Will it run on the NPU? Rules and a predicted split, with no NPU and no data."""

from __future__ import annotations

from roundel.rules.report import check
from roundel.rules.types import CheckReport, Finding, NodePlace, Place, Prediction, Severity

__all__ = ["CheckReport", "Finding", "NodePlace", "Place", "Prediction", "Severity", "check"]
