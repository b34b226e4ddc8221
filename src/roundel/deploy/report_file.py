"""Reads the provider's report file, or a console log, into the one placement view."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any

from roundel.deploy.placement import PlacementReport, ReportError
from roundel.deploy.report_log import parse_log

_LARGEST = 512 * 1024 * 1024
_ALL = "ALL"
_RUNNING = "ACTUALLY RUNNING ON "
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_report(path: str | Path) -> PlacementReport:
    """Read `vitisai_ep_report.json`, or a text log that holds the provider's console lines.

    Raises:
        ReportError: the file cannot be read, or is neither.
    """
    file = Path(path)
    text = _decode(_bytes(file))
    if not text.strip():
        raise ReportError("The report is empty.", where=file, hint="Run the session with the report enabled.")
    looks_json = text.lstrip().startswith("{")
    if file.suffix.lower() == ".json" or looks_json:
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            found = parse_log(text)
            if found is not None:
                return found
            raise ReportError(
                "The report is not valid JSON.",
                where=file,
                observed=error if isinstance(error, ValueError) else "nested too deeply",
                hint="Was the session still writing, or the file cut short? Run it again.",
            ) from error
        return parse_json(tree, file)
    found = parse_log(text)
    if found is None:
        raise ReportError(
            "The log has no placement line of the VitisAI provider.",
            where=file,
            expected="a line such as '[Vitis AI EP] No. of Operators : CPU 2 NPU 398'",
            hint="The provider prints it when it compiles: delete the cache folder, run again, and keep "
            "both stdout and stderr. No line at all can mean that the provider was not loaded.",
        )
    return found


def parse_json(tree: Any, where: object = "the report") -> PlacementReport:
    """The view of a parsed `vitisai_ep_report.json`; keys that it does not know are ignored.

    Raises:
        ReportError: it has no device statistics, or these are not counts.
    """
    stats = tree.get("deviceStat") if isinstance(tree, dict) else None
    if not isinstance(stats, list) or not stats:
        raise ReportError(
            "The report has no device statistics.",
            where=where,
            observed=f"keys {sorted(map(str, tree))[:8]}" if isinstance(tree, dict) else type(tree).__name__,
            expected="a list 'deviceStat'",
            hint="Is this vitisai_ep_report.json?",
        )
    operators: dict[str, int] = {}
    op_types: dict[str, tuple[str, ...]] = {}
    for entry in stats:
        name = _device(entry, ("name",), where)
        operators[name] = operators.get(name, 0) + _count(entry, ("nodeNum",), where)
        types = entry.get("supportedOpType")
        if isinstance(types, list) and name != _ALL:
            op_types[name] = tuple(dict.fromkeys(_op_type(str(each)) for each in types))
    total = operators.pop(_ALL, None)
    if not operators and total:
        raise ReportError("The report names no device but 'all'.", where=where, hint="Run the session again.")
    subgraphs, running = _subgraphs(tree.get("subgraphStat"), where)
    placed = sum(operators.values())
    notes = () if total in (None, placed) else (f"the report counts {total} operators, {placed} are placed",)
    return PlacementReport("vitisai_ep_report.json", operators, op_types, subgraphs, running, notes)


def _subgraphs(stats: Any, where: object) -> tuple[dict[str, int], int | None]:
    counts: dict[str, int] = {}
    running: int | None = None
    for entry in stats if isinstance(stats, list) else ():
        name = _device(entry, ("device", "name"), where)
        count = _count(entry, ("count", "subgraphNum"), where)
        if name.startswith(_RUNNING):
            running = (running or 0) + count
        elif name != _ALL:
            counts[name] = counts.get(name, 0) + count
    return counts, running


def _device(entry: Any, keys: tuple[str, ...], where: object) -> str:
    name = next((entry[key] for key in keys if entry.get(key)), None) if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise ReportError(
            "An entry of the report names no device.",
            where=where,
            observed=str(entry)[:80],
            expected="a name",
        )
    return name.strip().upper()


def _count(entry: dict[str, Any], keys: tuple[str, ...], where: object) -> int:
    # The file is protobuf's JSON: zeros are left out, and long integers are strings.
    value = next((entry[key] for key in keys if key in entry), 0)
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ReportError(
            "A count in the report is not a number.",
            where=where,
            observed=f"{keys[0]}: {str(value)[:40]}",
            expected="a whole number",
        )
    return value


def _op_type(text: str) -> str:
    """'::Conv' is Conv; 'com.microsoft::QuantizeLinear' keeps its domain."""
    return text.strip().strip(":")


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            raise ReportError(
                "The file is too large to be a report.",
                where=path,
                observed=f"{size} bytes",
                expected="a log",
            )
        return path.read_bytes()
    except OSError as error:
        raise ReportError("The report cannot be read.", where=path, observed=error.strerror) from error


def _decode(data: bytes) -> str:
    """Text as a console redirect left it: UTF-8, PowerShell's UTF-16, or an old code page."""
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return data.decode(encoding, errors="replace")
    head = data[:4096]
    if head.count(0) > len(head) // 4:
        even = head[0::2].count(0)
        return data.decode("utf-16-be" if even > head.count(0) - even else "utf-16-le", errors="replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
