"""The report as one HTML file: it opens offline, asks no network and needs no library.

Python says what is true (figures, words, where each layer stands in the chart), as plain values in one tree,
which the page carries as JSON; the scripts in `assets/` show it. They write text only, never markup, so that
a tensor's name stays a name.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from roundel.report.html import values
from roundel.report.html.layers import layer_values, weight_values
from roundel.report.html.values import ReportContent, short
from roundel.report.record import versions

if TYPE_CHECKING:
    from roundel.measure.types import OutputComparison

__all__ = ["ReportContent", "render"]


def payload(content: ReportContent) -> dict[str, Any]:
    """Plain values, named as the page's scripts read them."""
    c, record, check = content.comparison, content.record, content.check
    split = None if check is None else check.before
    return {
        "float": {"name": c.float_model, "bytes": c.float_bytes},
        "quantized": {"name": c.quantized_model, "bytes": c.quantized_bytes},
        "samples": {
            "count": c.samples,
            "words": values.data_title(c.data),
            "random": bool(c.data.get("random")),
        },
        "outputs": [_output(out) for out in c.outputs],
        "scores": [dict(score) for score in content.scores],
        "layers": layer_values(c, split, values.steps_by_layer(record)),
        "weights": weight_values(c.weights),
        "npu": None if check is None else values.npu_values(check),
        "unchecked": content.unchecked,
        **values.record_values(record),
        "times": values.time_values(record, c.seconds),
        "verdict": None if c.verdict is None else values.verdict_values(c.verdict),
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


# In the order in which they build on each other; together they are one script.
_SCRIPTS = (
    *("dom", "colours", "chart_view", "chart_paint", "chart", "overview"),
    *("plots", "details", "table", "summary", "sections", "main"),
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render(content: ReportContent) -> str:
    """The page as text."""
    tree = payload(content)
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS) + "\n})();"
    style = _asset("style.css")
    names = (tree["float"]["name"], tree["quantized"]["name"])
    parts = {
        "title": html.escape(f"{names[1]} against {names[0]}: Roundel report"),
        # Nothing but these two texts is ever executed or applied, and nothing is ever fetched.
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'",
        "style": style,
        "script": script,
        "values": _inert(json.dumps(tree, separators=(",", ":"), allow_nan=False)),
    }
    return _PLACE.sub(lambda match: parts[match[1]], _asset("page.html"))


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert(text: str) -> str:
    """JSON that no HTML parser takes for markup: a name such as '</script>' stays inside its string."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
