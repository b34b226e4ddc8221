"""All values of a report in one tree, which the page carries as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundel.report.html.content import ReportContent
from roundel.report.html.layers import layer_values, weight_values
from roundel.report.html.npu import npu_values
from roundel.report.html.numbers import short
from roundel.report.html.run import (
    command,
    count_values,
    data_words,
    preset_values,
    recipe_text,
    step_values,
    steps_by_layer,
    time_values,
)
from roundel.report.record import versions

if TYPE_CHECKING:
    from roundel.compare.types import OutputComparison


def payload(content: ReportContent) -> dict[str, Any]:
    """Plain values, named as the page's scripts read them."""
    c, record, check = content.comparison, content.record, content.check
    split = None if check is None else check.before
    return {
        "float": {"name": c.float_model, "bytes": c.float_bytes},
        "quantized": {"name": c.quantized_model, "bytes": c.quantized_bytes},
        "samples": {
            "count": c.samples,
            "words": data_words(c.data),
            "random": bool(c.data.get("random")),
        },
        "outputs": [_output(out) for out in c.outputs],
        "scores": [dict(score) for score in content.scores],
        "layers": layer_values(c, split, steps_by_layer(record)),
        "weights": weight_values(c.weights),
        "npu": None if check is None else npu_values(check),
        "unchecked": content.unchecked,
        "preset": None if record is None else preset_values(record),
        "counts": None if record is None else count_values(record),
        "steps": None if record is None else step_values(record),
        "recipe": None if record is None else recipe_text(record),
        "command": None if record is None else command(record),
        "times": time_values(record, c.seconds),
        "notes": [*(() if record is None else record["notes"]), *c.notes],
        "unmatched": [[name, reason] for name, reason in c.unmatched.items()],
        "versions": versions() if record is None else record["versions"],
    }


def _output(out: OutputComparison) -> dict[str, Any]:
    return {
        "name": out.name,
        "sqnr": short(out.difference.sqnr_db),
        "cosine": short(out.difference.cosine),
        "worst": short(out.difference.worst),
        "same": short(out.same_top),
    }
