"""The report as one HTML file: it opens offline, asks no network and needs no library.

Python says what is true (figures, words, where each layer stands in the chart), as plain values; the scripts
in `assets/` show it. They write text only, never markup, so that a tensor's name stays a name.
"""

from roundel.report.html.page import render
from roundel.report.html.values import ReportContent

__all__ = ["ReportContent", "render"]
