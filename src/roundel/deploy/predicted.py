"""What `roundel check` predicts for a model, beside what the provider says it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundel.check import CheckReport, check_model
from roundel.check.number_format import is_quantized
from roundel.deploy.placement import BOUNDARY_CPU, ComparisonRow, PlacementReport, compare
from roundel.model import load_model
from roundel.qdq.pairs import QUARK
from roundel.targets.devices import Format


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction and a report of the same model.

    Attributes:
        format: the number format judged.
        device: the device judged.
        rows: the quantities that can be compared.
        notes: what the prediction rests on, and what to beware of.
    """

    format: str
    device: str
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [
            {"quantity": row.quantity, "predicted": row.predicted, "reported": row.actual}
            for row in self.rows
        ]
        return {"format": self.format, "device": self.device, "rows": rows, "notes": list(self.notes)}


def compare_with_check(
    report: PlacementReport, model: Path, *, preset: str | None = None, device: str = "stx"
) -> Comparison:
    """Judge the model that ran, as it stands, and put the prediction beside the report.

    Args:
        report: what the provider said.
        model: the model that ran; with a preset, the float model that it was made from will do.
        preset: the format; None means what a quantized model shows, and BF16 for a float one.
        device: phx, hpt, stx, stx-halo or krk.

    Raises:
        RoundelError: the model cannot be read, or there is no such preset or device.
    """
    if preset is None and not is_quantized(load_model(model, allow_quantized=True, opaque=QUARK).model):
        preset = Format.BF16.value  # what the compiler makes of a float model
    judged = check_model(model, preset=preset, device=device)
    split, integer = judged.before, Format(judged.format).integer
    rows = compare(report, split.cpu_nodes, None if integer else split.npu_nodes, split.islands)
    notes = (*judged.notes, *_notes(report, judged, integer))
    return Comparison(judged.format, judged.device, rows, notes)


def _notes(report: PlacementReport, judged: CheckReport, integer: bool) -> Iterator[str]:
    if not integer:
        return
    yield "The provider counts Q/DQ among the NPU's operators, so their number is not compared."
    named = BOUNDARY_CPU in report.operators or "CPU" in report.op_types
    if report.operators.get("CPU") and not named:
        yield "The report does not tell Q/DQ at the islands' borders from other operators on the CPU."
    before, after = judged.before, judged.after
    if not judged.quantized and after != before:
        yield (
            "Predicted for the plain preset. If the model was made with quantize --device: "
            f"{after.cpu_nodes} operators on the CPU, {after.islands} islands."
        )
