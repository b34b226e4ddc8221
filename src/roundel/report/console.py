"""Progress and tables for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from roundel.errors import RoundelError
from roundel.plain import counted, decibel, to_plain
from roundel.plan.types import QuantPlan
from roundel.recipe.settings import Recipe
from roundel.report.record import Record
from roundel.report.verdict import Verdict
from roundel.state import LayerReport, StepReport

Tree = Mapping[str, Any]
_STEPS = 2
_ALIKE = 3  # so many more notes of a kind, and they share a line
_QUOTED, _NUMBER = re.compile("'[^']+'"), re.compile(r"-?\d+(\.\d+)?")
_NAME = 26  # characters of a layer's name: with two steps the table is just below 80 columns


def layer_table(steps: Sequence[StepReport], *, most: int | None) -> Table | None:
    """One line for each layer, with its SQNR in dB at each step's beginning and end, on held-out samples.

    Args:
        steps: of the record; the last two that work layer by layer have a column, in brackets where not kept.
        most: the number of layers to show: the worst ones, and those that gained most; None shows all.
    """
    shown = [step for step in steps if step.layers and parts_word(step) == "layers"][-_STEPS:]
    if not shown:
        return None
    found = [{report.layer: report for report in step.layers} for step in shown]
    names = list(dict.fromkeys(name for reports in found for name in reports))
    counting = [reports for step, reports in zip(shown, found, strict=True) if step.kept] or found
    chosen = set(names) if most is None else _telling(names, counting, most)
    headings = (h for step in shown for h in (f">{step.step if step.kept else f'({step.step})'}", ">s"))
    title = "SQNR of each layer in dB, before and after, on held-out samples"
    if len(chosen) < len(names):
        title += f"\nthe worst and the most improved {len(chosen)} of {len(names)}; all with --verbose"
    table = grid("layer", "operator", *headings, title=title)
    for name in (name for name in names if name in chosen):
        reports = [each.get(name) for each in found]
        op = next(report.op for report in reports if report is not None)
        cells = [cell for report in reports for cell in _cells(report)]
        table.add_row(escape(shortened(name, _NAME)), escape(op), *cells)
    return table


def parts_word(step: StepReport) -> str:
    """What its reports are about: choosing ranges looks at tensors, everything else at layers."""
    return "tensors" if all(report.op == "range" for report in step.layers) else "layers"


def _telling(names: Sequence[str], found: Sequence[Mapping[str, LayerReport]], most: int) -> set[str]:
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


def _cells(report: LayerReport | None) -> tuple[str, str]:
    if report is None:
        return "", ""
    change = f"-> {report.after_db:.1f}" if report.kept else "[dim]as it was[/]"
    return f"{report.before_db:.1f} {change}", f"{report.seconds:.1f}"


_FEW_LAYERS, _KINDS = 8, 6


def terminal(*, stderr: bool = False) -> Console:
    """Where tables and messages go. Names may hold ":key:" and numbers: no emoji, no colours of its own."""
    return Console(stderr=stderr, emoji=False, highlight=False)


def grid(*headings: str, title: str | None = None, gap: int = 2) -> Table:
    """A table without lines.

    Args:
        headings: of the columns; '>' before one sets its column to the right, '~' lets long texts break.
        title: above it.
        gap: blanks between columns.
    """
    table = Table(title=title, title_justify="left", box=None, padding=(0, gap, 0, 0))
    for heading in headings:
        broken, right = heading.startswith("~"), heading.startswith(">")
        justify: Literal["left", "right"] = "right" if right else "left"
        overflow: Literal["fold", "ellipsis"] = "fold" if broken else "ellipsis"
        table.add_column(heading.lstrip(">~"), justify=justify, overflow=overflow, no_wrap=not broken)
    return table


def labelled(rows: Mapping[str, str]) -> Table:
    """Labels with their texts, one below the other."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    for label, text in rows.items():
        table.add_row(label, Text(text))
    return table


def show_notes(console: Console, notes: Iterable[str]) -> None:
    """One below the other, for who reads carefully; of many that are alike, one and how many more."""
    for note in _grouped(notes):
        console.print(f"[yellow]note:[/] {escape(note)}")


def _grouped(notes: Iterable[str]) -> Iterator[str]:
    """Notes that differ in a quoted name and in numbers only share a line."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for note in dict.fromkeys(notes):
        quoted = _QUOTED.search(note)
        name = quoted[0] if quoted else note
        alike.setdefault(_NUMBER.sub("0", note.replace(name, "''", 1)), []).append((name, note))
    for group in alike.values():
        others = [name for name in dict.fromkeys(name for name, _ in group) if name != group[0][0]]
        if len(others) < _ALIKE:
            yield from (note for _, note in group)
        else:
            yield f"{group[0][1]}, and likewise for {len(others)} others: {', '.join(others[:2])}, …"


def shortened(name: str, width: int) -> str:
    """The end of a long name, where names differ."""
    return name if len(name) <= width else "…" + name[1 - width :]


def figure(value: float | str | None, form: str = ".5g") -> str:
    """A number in a cell; '-' where there is none, 'exact' where it is infinite: nothing was lost."""
    if value is None:
        return "-"
    return "exact" if float(value) == math.inf else format(float(value), form)


def size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return "-"
    number, units = float(count), ["B", "KB", "MB", "GB"]
    while number >= 1000 and len(units) > 1:
        number /= 1000
        del units[0]
    return f"{number:.{0 if len(units) == 4 else 1}f} {units[0]}"


def show_error(console: Console, error: RoundelError) -> None:
    """A short message that says what to do; never a traceback."""
    console.print(f"[bold red]error:[/] {escape(error.what)}")
    for label, text in error.details():
        console.print(f"  [bold]{label}[/]: {escape(text)}", soft_wrap=True)


def show_summary(console: Console, record: Record, *, every_layer: bool = False) -> None:
    """The result of a run, in one screen; `every_layer` may take more."""
    _show_verdict(console, record)
    counts = record.counts
    quantized = sum(counts.get("quantized_nodes", {}).values())
    left = counts.get("float_nodes", {})
    file, data, seconds = record.file, record.data, record.seconds
    kind = "random data" if data.get("random") else str(data.get("kind", "none"))
    rows = {
        "model": f"{record.model.get('name')} ({size(record.model.get('bytes'))})",
        "result": f"{file.get('name') or 'in memory'} ({size(file.get('bytes'))})",
        "recipe": str(record.recipe.get("name")),
        "data": f"{kind}, {counted(int(data.get('samples_seen', 0)), 'sample')}",
        "quantized": f"{quantized} of {quantized + sum(left.values())} nodes",
        **({"left in float": _counts(left)} if left else {}),
    }
    table = labelled(rows)
    for step in record.improvements:
        table.add_row(step.step, _step_line(step))
    steps = ", ".join(f"{name} {took:.1f}" for name, took in seconds.items() if took >= 0.05)
    table.add_row("seconds", f"{sum(seconds.values()):.1f} ({steps})")
    console.print(table)
    layers = layer_table(record.improvements, most=None if every_layer else _FEW_LAYERS)
    if layers is not None:
        console.print(layers)
    if record.outputs:
        title = f"against the float model, {counted(int(data.get('samples_verified', 0)), 'sample')}"
        console.print(_outputs(to_plain(record.outputs), title))
    show_notes(console, record.notes)
    show_verdict(console, to_plain(record.verdict))


_LEVELS = {"good": "bold green", "doubtful": "bold yellow", "poor": "bold red"}


def show_verdict(console: Console, tree: Tree) -> None:
    """The three questions and their answers; the command stays one line in the clipboard."""
    told = Verdict(**tree)
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    *answers, (word, command) = told.rows().items()
    for question, answer in answers:
        table.add_row(Text(question, style=_LEVELS.get(told.level, "bold")), Text(answer))
    console.print(table)
    console.print(f" {word}: {command}", markup=False, soft_wrap=True)


_BROKEN_DB = 10.0  # a third of each value is error


def _show_verdict(console: Console, record: Record) -> None:
    """The first line, where an output misses the goal; random data tell nothing."""
    if record.reached or record.worst is None or record.data.get("random"):
        return
    name, reached = record.worst
    what = "is broken" if reached < _BROKEN_DB else "is far from the float model"
    text = f"output '{name}' {what}: {decibel(reached)}, the goal is {record.goal:g} dB. See the notes."
    console.print(f"[bold red]{escape(text)}[/]", soft_wrap=True)


def _step_line(step: StepReport) -> str:
    judged = " (ahead of rounding)" if step.foreseen else ""
    if step.refused_db is not None:
        change = f"not kept: {decibel(step.before_db)} without it, {decibel(step.refused_db)} with it"
        return f"{change}{judged}, {step.seconds:.1f} s"
    change = f"{decibel(step.before_db)} -> {decibel(step.after_db)} on held-out samples{judged}"
    kept = sum(layer.kept for layer in step.layers)
    some = f", {kept} of {len(step.layers)} {parts_word(step)}" if step.layers else ""
    return f"{change}{some}, {step.seconds:.1f} s"


def _outputs(outputs: Sequence[Tree], title: str, most: int = 8) -> Table:
    table = grid("~output", ">SQNR", ">cosine", ">worst error", ">same top-1", title=title)
    for out in outputs[:most]:
        numbers = (decibel(float(out["sqnr_db"])), f"{out['cosine']:.5f}", f"{float(out['worst']):.3g}")
        table.add_row(escape(out["name"]), *numbers, figure(out["same_top"], ".1%"))
    if len(outputs) > most:
        table.add_row(f"… {len(outputs) - most} more in the record", "", "", "", "")
    return table


def show_plan(console: Console, plan: QuantPlan, tensor: str | None = None) -> None:
    """What every tensor becomes, and why; without the nodes where the plan is that of one tensor."""
    table = grid("~tensor", "~role", "~stored as", "~range", "~why")
    for name, item in plan.tensors.items():
        cells = (name, item.role.value, str(item.scheme), str(item.source), item.reason)
        table.add_row(*(escape(text) for text in cells))
    for name, reason in plan.kept_float.items():
        table.add_row(escape(name), "activation", "[dim]float[/]", "-", escape(reason))
    console.print(table)
    for node in plan.nodes.values() if tensor is None else ():
        if not node.quantized:
            console.print(f"[dim]float[/] {node.op} {escape(node.name)}: {escape(node.reason)}")


def show_presets(console: Console, recipes: Mapping[str, Recipe]) -> None:
    """Names, and what they are."""
    table = grid("preset", "~what it is")
    for known, recipe in recipes.items():
        table.add_row(known, recipe.title)
    console.print(table)


def show_inspection(console: Console, found: Any, *, nodes: bool) -> None:
    """A model's outline."""
    types = ", ".join(f"{name} {size(count)}" for name, count in found.weight_types.items())
    rows = {
        "model": f"{found.name} ({size(found.file_bytes)}, weights {size(found.weight_bytes)})",
        "opset": str(found.opset),
        "inputs": "\n".join(found.inputs),
        "outputs": "\n".join(found.outputs),
        "weights": types or "none",
    }
    console.print(labelled(rows))
    counts = grid("operator", ">nodes")
    for op, count in found.operators.items():
        counts.add_row(escape(op), str(count))
    console.print(counts)
    text = "the model is quantized already"
    if found.quantized_by is not None:
        whole = sum(found.quantized.values()) + sum(found.left.values())
        text = f"{found.quantized_by} would quantize {sum(found.quantized.values())} of {whole} nodes"
        text += f"; float: {_counts(found.left)}" if found.left else ""
    console.print(escape(text))
    console.print(Text(f"on the NPU? {found.npu}"))
    if nodes:
        listing = grid("~node", "~operator", "~verdict")
        for row in found.nodes:
            listing.add_row(*(escape(text) for text in row))
        console.print(listing)


def show_demo(console: Console, rows: Sequence[Any]) -> None:
    """The demo's comparison."""
    table = grid("preset", ">accuracy", ">same as float", ">SQNR", ">size", ">seconds")
    for row in rows:
        sqnr = "-" if row.sqnr_db is None else decibel(row.sqnr_db)
        shares = (f"{row.accuracy:.1%}", f"{row.agreement:.1%}")
        table.add_row(row.preset, *shares, sqnr, size(row.bytes), figure(row.seconds, ".2f"))
    console.print(table)


def show_conversion(console: Console, tree: Tree) -> None:
    """File, counts, closeness and notes."""
    file, counts = tree["file"], tree["converted"]
    rows = {
        "result": f"{file['name']} ({size(file['bytes'])})",
        "converted": f"{counts['activations']} activations, {counts['constants']} constants",
    }
    console.print(labelled(rows))
    if tree["outputs"]:
        console.print(_outputs(tree["outputs"], "against the model given", len(tree["outputs"])))
    show_notes(console, tree["notes"])


def _counts(counts: Mapping[str, Any]) -> str:
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    text = ", ".join(f"{count} {op}" for op, count in ranked[:_KINDS])
    return text + (f" and {len(ranked) - _KINDS} more kinds" if len(ranked) > _KINDS else "")
