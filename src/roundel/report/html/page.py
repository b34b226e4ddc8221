"""One HTML file from the template, the style, the scripts and the values."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib import resources

from roundel.report.html.content import ReportContent
from roundel.report.html.payload import payload

# In the order in which they build on each other; together they are one script.
_SCRIPTS = (
    "dom.js",
    "colours.js",
    "chart_view.js",
    "chart_paint.js",
    "chart.js",
    "overview.js",
    "plots.js",
    "details.js",
    "table.js",
    "summary.js",
    "sections.js",
    "main.js",
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render(content: ReportContent) -> str:
    """The page as text."""
    values = payload(content)
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();"
    style = _asset("style.css")
    names = (values["float"]["name"], values["quantized"]["name"])
    parts = {
        "title": html.escape(f"{names[1]} against {names[0]}: Roundel report"),
        # Nothing but these two texts is ever executed or applied, and nothing is ever fetched.
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'",
        "style": style,
        "script": script,
        "values": _inert(json.dumps(values, separators=(",", ":"), allow_nan=False)),
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
