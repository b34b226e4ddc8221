"""From a finished model to a Ryzen AI machine, and back from its report to what ran where."""

from __future__ import annotations

from roundel.kit.kit import deploy
from roundel.kit.npu_report import npu_report
from roundel.kit.placement import PlacementReport, ReportError, compare_placements

__all__ = ["PlacementReport", "ReportError", "compare_placements", "deploy", "npu_report"]
