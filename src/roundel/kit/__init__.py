"""From a finished model to a Ryzen AI machine, and back from its report to what ran where."""

from __future__ import annotations

from roundel.kit.kit import DeployKit, write_kit
from roundel.kit.npu_report import read_report
from roundel.kit.placement import (
    ComparisonRow,
    PlacementComparison,
    PlacementReport,
    ReportError,
    compare_placements,
    compare_with_check,
    verdicts,
)
from roundel.targets.npu import DEVICES, Device, Format

__all__ = [
    "DEVICES",
    "ComparisonRow",
    "DeployKit",
    "Device",
    "Format",
    "PlacementComparison",
    "PlacementReport",
    "ReportError",
    "compare_placements",
    "compare_with_check",
    "read_report",
    "verdicts",
    "write_kit",
]
