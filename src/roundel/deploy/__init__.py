"""From a finished model to a Ryzen AI machine, and back from its report to what ran where."""

from roundel.deploy.kit import DeployKit, write_kit
from roundel.deploy.placement import ComparisonRow, PlacementReport, ReportError, compare, verdicts
from roundel.deploy.predicted import Comparison, compare_with_check
from roundel.deploy.report_file import read_report
from roundel.targets.devices import DEVICES, Device, Format

__all__ = [
    "DEVICES",
    "Comparison",
    "ComparisonRow",
    "DeployKit",
    "Device",
    "Format",
    "PlacementReport",
    "ReportError",
    "compare",
    "compare_with_check",
    "read_report",
    "verdicts",
    "write_kit",
]
