"""From a finished model to a Ryzen AI machine, and back from its report to what ran where."""

from __future__ import annotations

from roundel.kit.kit import DeployKit, deploy
from roundel.kit.npu_report import NpuReport, npu_report, read_report
from roundel.kit.placement import (
    PlacementReport,
    ReportError,
    compare_placements,
    compare_with_check,
    verdicts,
)

__all__ = [
    "DeployKit",
    "NpuReport",
    "PlacementReport",
    "ReportError",
    "compare_placements",
    "compare_with_check",
    "deploy",
    "npu_report",
    "read_report",
    "verdicts",
]
