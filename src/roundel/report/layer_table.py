"""What the improving steps did, layer by layer: the error before and after, and how long it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from roundel.algorithms.finetune_report import FinetuneReport
from roundel.algorithms.judge import StepReport
from roundel.algorithms.layer_report import LayerReport

Report = LayerReport | FinetuneReport
_STEPS = 2
_NAME = 26  # characters of a layer's name: with two steps the table is just below 80 columns


def layer_table(steps: Sequence[StepReport], *, most: int | None) -> Table | None:
    """One line for each layer, with its SQNR in dB at each step's beginning and end, on held-out samples.

    Args:
        steps: of the record; the last two that work layer by layer have a column, in brackets where not kept.
        most: the number of layers to show: the worst ones, and those that gained most; None shows all.
    """
    shown = [step for step in steps if step.layers and parts_of(step) == "layers"][-_STEPS:]
    if not shown:
        return None
    found = [{report.layer: report for report in step.layers} for step in shown]
    names = list(dict.fromkeys(name for reports in found for name in reports))
    counting = [reports for step, reports in zip(shown, found, strict=True) if step.kept] or found
    chosen = set(names) if most is None else _telling(names, counting, most)
    table = Table(title=_title(len(names), len(chosen)), title_justify="left", box=None, padding=(0, 1))
    table.add_column("layer", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    for step in shown:
        heading = step.step if step.kept else f"({step.step})"
        table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("s", justify="right", no_wrap=True)
    for name in names:
        if name in chosen:
            reports = [each.get(name) for each in found]
            op = next(report.op for report in reports if report is not None)
            cells = [cell for report in reports for cell in _cells(report)]
            table.add_row(escape(_short(name)), escape(op), *cells)
    return table


def parts_of(step: StepReport) -> str:
    """What its reports are about: choosing ranges looks at tensors, everything else at layers."""
    return "tensors" if all(report.op == "range" for report in step.layers) else "layers"


def _title(count: int, shown: int) -> str:
    what = "SQNR of each layer in dB, before and after, on held-out samples"
    if shown == count:
        return what
    return f"{what}\nthe worst and the most improved {shown} of {count}; all with --verbose"


def _telling(names: Sequence[str], found: Sequence[Mapping[str, Report]], most: int) -> set[str]:
    """Half of them the layers with the largest error left, the other half those that gained most."""
    if len(names) <= most:
        return set(names)
    last = dict.fromkeys(names, math.inf)
    last |= {name: report.after_db for reports in found for name, report in reports.items()}
    gains = dict.fromkeys(names, 0.0)
    for reports in found:
        for name, report in reports.items():
            gains[name] += report.after_db - report.before_db
    chosen = sorted(names, key=lambda name: last[name])[: most // 2]
    others = [name for name in sorted(names, key=lambda name: -gains[name]) if name not in chosen]
    return {*chosen, *others[: most - len(chosen)]}


def _cells(report: Report | None) -> tuple[str, str]:
    if report is None:
        return "", ""
    time = f"{report.seconds:.1f}"
    if not report.kept:
        return f"{report.before_db:.1f} [dim]as it was[/]", time
    return f"{report.before_db:.1f} -> {report.after_db:.1f}", time


def _short(name: str) -> str:
    """The end of a long name: it tells layers apart."""
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
