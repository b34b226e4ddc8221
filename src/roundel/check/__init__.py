"""Will it run on the NPU? Rules and a predicted split, with no NPU and no data."""

from roundel.check.report import check_model
from roundel.check.types import CheckReport, Finding, NodePlace, Place, Prediction, Severity

__all__ = ["CheckReport", "Finding", "NodePlace", "Place", "Prediction", "Severity", "check_model"]
