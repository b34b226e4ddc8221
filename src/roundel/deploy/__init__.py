"""From a finished model to a Ryzen AI machine, and back from its report to what ran where."""

from roundel.deploy.kit import DeployKit, write_kit
from roundel.deploy.placement import ComparisonRow, PlacementReport, ReportError, compare, verdicts
from roundel.deploy.report_file import read_report
from roundel.targets.devices import DEVICES, Device, Format

__all__ = [
    "DEVICES",
    "ComparisonRow",
    "DeployKit",
    "Device",
    "Format",
    "PlacementReport",
    "ReportError",
    "compare",
    "read_report",
    "verdicts",
    "write_kit",
]
