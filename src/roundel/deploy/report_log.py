"""The provider's console lines, in the dialects of its versions.

    [Vitis AI EP] No. of Operators :   CPU     2    IPU   398  99.50%
    [Vitis AI EP] No. of Subgraphs :   CPU     1    IPU     1 Actually running on IPU     1
    [Vitis AI EP] No. of Operators :   CPU    36    NPU   239 VITIS_EP_CPU    74
    [Vitis AI EP] No. of Operators :   CPU     5  VAIML   119

Some versions spread one of them over several lines, each with the logger's prefix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from roundel.deploy.placement import CPU_DEVICES, PlacementReport

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_HEAD = re.compile(r"No\. of (Operators|Subgraphs)\s*:", re.IGNORECASE)
_RUNNING = re.compile(r"Actually running on\s+\w+\s+([0-9]{1,9})\b", re.IGNORECASE)
_ITEM = re.compile(r"\b([A-Z][A-Z0-9_]*)\s+([0-9]{1,9})(?![\w.%])")
_PERCENT = re.compile(r"\d+(?:\.\d+)?%")
# What loggers put before a line: [name], a date, or a source line such as 'I20250108 … stat.cpp:198]'.
_PREFIX = re.compile(r"^\s*(?:\[[^\]]*\]\s*|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s*|\S[^\]]*\.\w+:\d+\]\s*)*")


@dataclass(slots=True)
class _Found:
    """One report as it comes together."""

    operators: dict[str, int] = field(default_factory=dict)
    subgraphs: dict[str, int] = field(default_factory=dict)
    running: int | None = None

    @property
    def complete(self) -> bool:
        """Whether the provider was done: it prints no subgraphs when all is on the CPU."""
        on_cpu = set(self.operators) <= CPU_DEVICES
        return bool(self.operators) and (on_cpu or bool(self.subgraphs) or self.running is not None)


def parse_log(text: str) -> PlacementReport | None:
    """The last complete report of a log, or None when there is none."""
    found = [each for each in _collect(_lines(text)) if each.operators]
    if not found:
        return None
    whole = [each for each in found if each.complete]
    chosen = whole[-1] if whole else found[-1]
    notes = []
    if len(found) > 1:
        notes.append(f"the log holds {len(found)} reports; this is number {found.index(chosen) + 1}")
    if not whole:
        notes.append("the log has no line about subgraphs; it may have been cut short")
    return PlacementReport(
        "console log", chosen.operators, {}, chosen.subgraphs, chosen.running, tuple(notes)
    )


def _lines(text: str) -> list[str]:
    plain = _COLOUR.sub("", text).replace("\0", "")
    # Each heading begins a line: loggers without buffering lose the line ends between two of them.
    return re.split(r"\r\n|\r|\n", _HEAD.sub(lambda head: f"\n{head[0]}", plain))


def _collect(lines: list[str]) -> list[_Found]:
    found: list[_Found] = []
    section: str | None = None
    for line in lines:
        head = _HEAD.search(line)
        if head is not None:
            section = head[1].lower()
            if section == "operators" or not found:
                found.append(_Found())
            counts = line[head.end() :]
            _take(found[-1], section, counts)
            if counts.strip():
                section = None  # counts on the line itself: no more of them follow
        elif section is not None:
            rest = _PREFIX.sub("", line, count=1)
            if not _only_counts(rest):
                section = None
            else:
                _take(found[-1], section, rest)
    return found


def _take(found: _Found, section: str, text: str) -> None:
    running = _RUNNING.search(text)
    if running is not None:
        found.running = int(running[1])
        text = _RUNNING.sub(" ", text)
    counts = found.operators if section == "operators" else found.subgraphs
    for name, count in _ITEM.findall(text):
        counts[name] = int(count)


def _only_counts(text: str) -> bool:
    """Whether a line holds device counts and nothing else; an empty one does too."""
    return not _PERCENT.sub(" ", _ITEM.sub(" ", _RUNNING.sub(" ", text))).strip()
