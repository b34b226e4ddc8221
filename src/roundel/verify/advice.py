"""What to do about a result that is far from the float model."""

from __future__ import annotations

from collections.abc import Sequence

from roundel.recipe import Recipe
from roundel.verify.closeness import OutputReport

_FAR_DB = 12.0  # errors are then a quarter as large as the values themselves


def advice(reports: Sequence[OutputReport], recipe: Recipe) -> tuple[str, ...]:
    """A note with the next commands to try, where an output is far off; otherwise none."""
    far = [report for report in reports if report.sqnr_db < _FAR_DB]
    if not far or recipe.mode != "static":
        return ()
    worst = min(far, key=lambda report: report.sqnr_db)
    more = "effort fast often mends it; " if recipe.effort == "none" else ""
    return (
        f"output '{worst.name}' is far from the float model ({worst.sqnr_db:.1f} dB): {more}'roundel "
        "sensitivity' names the nodes to leave in float, 'roundel auto' tries finer formats",
    )
