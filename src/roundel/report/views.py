"""What commands print of their results, within 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from roundel.plain import counted, listed
from roundel.report.console import Tree, figure, grid, labelled, shortened, show_notes, show_verdict, size

_WORST = 20
_NAME_WIDTH = 22
_OP_WIDTH = 8


def show_comparison(console: Console, tree: Tree, *, everything: bool, weights: bool) -> None:
    """Print what `Comparison.to_dict` holds.

    Args:
        console: where to.
        tree: the comparison.
        everything: all tensors in order of execution, instead of those whose layers cost the outputs most.
        weights: list the weights, too.
    """
    _summary(console, tree)
    tensors = tree["tensors"]
    known = [t for t in tensors if t["introduced"] is not None]
    measured = [t for t in known if t["effect"] is not None]
    worst = sorted(measured or known, key=_cost)[:_WORST]
    shown = tensors if everything else worst
    what = "cost the outputs most" if measured else "introduce most"
    title = "all tensors" if everything else f"the {len(shown)} layers that {what}, of {len(tensors)}"
    console.print(_tensors(shown, title))
    if weights:
        ranked = sorted(tree["weights"], key=lambda w: float(w["error"]["sqnr_db"]))
        console.print(_weights(ranked if everything else ranked[:_WORST]))
    if tree["unmatched"]:
        count = len(tree["unmatched"])
        console.print(
            f"[dim]{count} tensors of the quantized model have no partner (see --json)[/]", highlight=True
        )
    show_notes(console, tree["notes"])
    if tree["verdict"] is not None:
        show_verdict(console, tree["verdict"])


def _cost(tensor: Tree) -> float:
    effect = tensor["effect"]
    return float(tensor["introduced"]["sqnr_db"] if effect is None else effect)


def _summary(console: Console, tree: Tree) -> None:
    rows = {
        "float": f"{tree['float_model']} ({size(tree['float_bytes'])})",
        "quantized": f"{tree['quantized_model']} ({size(tree['quantized_bytes'])})",
        "samples": f"{tree['samples']}, {tree['seconds']['total']:.1f} s",
    }
    table = labelled(rows)
    for out in tree["outputs"]:
        words = f"{_db(out['difference'])} dB, cosine {out['difference']['cosine']:.5f}"
        words += "" if out["same_top"] is None else f", same top-1 {out['same_top']:.1%}"
        table.add_row("output", f"{escape(out['name'])}: {words}")
    console.print(table)


def _tensors(tensors: Sequence[Tree], title: str) -> Table:
    numbers = (">at the\noutputs", ">intro-\nduced", ">inher-\nited", ">\ntotal", ">cut\noff", ">range\nused")
    table = grid("tensor", "op", *numbers, "worst\nchannels", title=f"{title} (SQNR in dB)", gap=1)
    for t in tensors:
        errors = (_db(t[name]) for name in ("introduced", "inherited", "total"))
        shares = (_percent(t[name]) for name in ("saturated", "range_use"))
        cells = (figure(t["effect"], ".1f"), *errors, *shares, _channels(t["worst_channels"][:2]))
        table.add_row(_label(t["name"]), escape(_begun(t["op"])), *cells)
    return table


def _weights(weights: Sequence[Tree]) -> Table:
    headings = ("weight", "op", "role", "stored as", ">SQNR", ">cut off", "worst channels")
    table = grid(*headings, title="weights (SQNR in dB)", gap=1)
    for w in weights:
        storage = w["storage"]
        kind = "float" if storage is None else storage["dtype"]
        if storage is not None and storage["scales"] > 1:
            kind += f" x{storage['scales']}"
        cells = (_begun(w["op"]), w["role"], kind, _db(w["error"]), _percent(w["saturated"]))
        table.add_row(_label(w["name"]), *cells, _channels(w["worst_channels"]))
    return table


def _channels(worst: Sequence[Tree]) -> str:
    return " ".join(str(c["channel"]) for c in worst)


def _begun(op: str) -> str:
    """The beginning of a long operator name."""
    return op if len(op) <= _OP_WIDTH else op[: _OP_WIDTH - 1] + "…"


def _label(name: str) -> str:
    """A tensor's name without what exporters append to every one."""
    return escape(shortened(name.removesuffix("_output_0"), _NAME_WIDTH))


def _db(difference: Tree | None) -> str:
    return figure(None if difference is None else difference["sqnr_db"], ".1f")


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


_WORST_LAYERS = 10
_LAYER_WIDTH = 24
_KIND_WIDTH = 9


def show_sensitivity(console: Console, tree: Tree, *, everything: bool) -> None:
    """Print what `Sensitivity.to_dict` holds; all layers, or the worst."""
    layers = tree["layers"]
    whole = "exact" if tree["sqnr_db"] is None else f"{figure(tree['sqnr_db'], '.1f')} dB"
    console.print(
        f"{escape(tree['model'])}, {escape(tree['recipe'])}: {whole} after calibration; {len(layers)} layers,"
        f" each measured with {counted(tree['samples'], 'sample')}, {tree['seconds']:.1f} s"
    )
    console.print(_table(layers if everything else layers[:_WORST_LAYERS]))
    _proposals(console, [layer for layer in layers if layer["remedies"]])
    if tree["together"] is not None:
        console.print("\n[bold]all first proposals at once[/]")
        _verbatim(console, tree["together"])
    if tree["head"] is not None:
        _head(console, tree["head"])
    show_notes(console, tree["notes"])


def _table(layers: Sequence[Tree]) -> Table:
    numbers = (">alone\ndB", ">share\nof all", ">left\nof it", ">from\nweights", ">won\nback")
    table = grid("\nlayer", "\nop", *numbers, "what\nhelps", gap=1)
    for layer in layers:
        table.add_row(
            escape(shortened(layer["name"], _LAYER_WIDTH)),
            escape(layer["op"][:_KIND_WIDTH]),
            "exact" if layer["sqnr_db"] is None else figure(layer["sqnr_db"], ".1f"),
            f"{layer['share']:.1%}",
            f"{layer['left']:.1%}",
            _from_weights(float(layer["weights"]), float(layer["cost"])),
            "-" if layer["won_back"] is None else f"{layer['won_back']:.0%}",
            layer["remedies"][0]["kind"] if layer["remedies"] else "-",
        )
    return table


def _from_weights(weights: float, cost: float) -> str:
    if math.isinf(cost):
        return "all" if math.isinf(weights) else "0%"
    return f"{weights / cost:.0%}" if cost else "-"


def _proposals(console: Console, layers: Sequence[Tree]) -> None:
    for number, layer in enumerate(layers, 1):
        console.print(f"\n[bold]{number}. {escape(layer['name'])}[/]", soft_wrap=True)
        for remedy in layer["remedies"]:
            console.print(f"{remedy['kind']}: {escape(remedy['why'])}")
            _verbatim(console, remedy["option"])


def _head(console: Console, head: Tree) -> None:
    count, share = len(head["nodes"]), head["share"]
    console.print(f"\n[bold]detection head[/]: {count} nodes, {share:.0%} of all costs")
    for sign in head["signs"]:
        console.print(f"- {escape(sign)}")
    _verbatim(console, head["option"])


def _verbatim(console: Console, text: str) -> None:
    """Words to copy: a line of the terminal's own breaking stays one line in the clipboard."""
    console.print("  " + text, markup=False, soft_wrap=True)


_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_BLOCKS = {"N": "█", "C": "░"}
_PLAIN_BLOCKS = {"N": "#", "C": "."}
_LINES = 3  # of the strip
_FIRST_NODES = 3
_MARGIN = 9


def show_check(console: Console, report: Tree) -> None:
    """Print what `CheckReport.to_dict` holds."""
    _check_summary(console, report)
    _strips(console, report)
    for note in report["notes"]:
        console.print(f"[dim]note: {escape(note)}[/]")
    if report["findings"]:
        console.print(_findings(report["findings"]))
    else:
        console.print("[green]no findings[/]")
    if "nodes" in report["after"]:
        console.print(_nodes(report["before"]["nodes"], report["after"]["nodes"]))


def _check_summary(console: Console, report: Tree) -> None:
    before, after = report["before"], report["after"]
    kind = "quantized" if report["quantized"] else "float"
    total = before["npu_nodes"] + before["cpu_nodes"]
    rows = {
        "model": f"{report['model']} ({kind}), {report['format']} on {report['device']}",
        "NPU islands": _change(str(before["islands"]), str(after["islands"])),
        "MACs on the NPU": _change(_share(before), _share(after)),
        "nodes on the CPU": f"{_change(str(before['cpu_nodes']), str(after['cpu_nodes']))} of {total}",
    }
    counts = report.get("counts")
    if counts is not None:
        split = f"NPU {counts['npu']}, CPU {counts['cpu']}, VITIS_EP_CPU {counts['edge']}"
        rows["the report's counts"] = f"all {counts['all']}: {split}"
    latency = report.get("latency")
    if latency is not None:
        rows["one inference"] = _milliseconds(latency)
    console.print(labelled(rows))


_DISAGREE = 8  # half of one formula against double of another that is twice as long


def _milliseconds(latency: Tree) -> str:
    guess = f"NPU about {latency['npu_ms']:.1f} ms"
    near = latency["most_ms"] <= _DISAGREE * latency["least_ms"]
    kind = "a guess within a factor of 2" if near else "a rough guess"
    guess += f" ({latency['least_ms']:.1f} to {latency['most_ms']:.1f}: {kind})"
    measured = latency["cpu_ms"]
    here = "" if measured is None else f"; this CPU, in float, {measured:.1f} ms (measured)"
    return " ".join((f"{guess}{here}.", *latency["notes"]))


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _share(split: Tree) -> str:
    share = split["npu_share_of_macs"]
    return "no layers" if share is None else f"{share:.1%}"


def _strips(console: Console, report: Tree) -> None:
    blocks = _BLOCKS if (console.encoding or "").lower().startswith("utf") else _PLAIN_BLOCKS
    legend = Text.assemble(
        "graph, in execution order: ", (blocks["N"], "green"), " NPU  ", (blocks["C"], "red"), " CPU"
    )
    console.print(legend)
    before, after = report["before"]["places"], report["after"]["places"]
    rows = [("now", before)] if before == after else [("now", before), ("after", after)]
    for label, places in rows:
        width = max(console.width - _MARGIN, 10)
        cells = _condense(places, width * _LINES)
        for start in range(0, len(cells), width):
            line = Text(f" {label if not start else '':<6}")
            for cell in cells[start : start + width]:
                line.append(blocks[cell], style="green" if cell == "N" else "red")
            console.print(line)
    if after != before:
        console.print(f"after: with what `roundel quantize --device {report['device']}` does by itself")


def _condense(places: str, most: int) -> str:
    """At most so many cells; a cell that holds any CPU node is a CPU cell."""
    if len(places) <= most:
        return places
    step = -(-len(places) // most)
    return "".join("C" if "C" in places[i : i + step] else "N" for i in range(0, len(places), step))


def _findings(findings: Sequence[Tree]) -> Table:
    groups: dict[tuple[str, str, str, bool], list[Tree]] = {}
    for finding in findings:
        key = (finding["rule"], finding["severity"], finding["fix"], finding["automatic"])
        groups.setdefault(key, []).append(finding)
    table = grid("rule", "level", ">n", "~what, why, fix")
    for (rule, level, fix, automatic), members in groups.items():
        first = members[0]
        lines = [f"[bold]{escape(first['title'])}[/]: {escape(first['message'])}"]
        subjects = [str(member["subject"]) for member in members if member["subject"]]
        lines += [f"[dim]at[/] {escape(listed(subjects, _FIRST_NODES))}"] if subjects else []
        lines.append(f"[dim]why[/] {escape(first['why'])}")
        done = " [green](quantize --device does this by itself)[/]" if automatic else ""
        lines.append(f"[dim]fix[/] {escape(fix)}{done}")
        table.add_row(rule, f"[{_COLOURS[level]}]{level}[/]", str(len(members)), "\n".join(lines))
    return table


def _nodes(before: Sequence[Tree], after: Sequence[Tree]) -> Table:
    table = grid("~node", "~operator", "~now", "~after", "~why")
    for old, new in zip(before, after, strict=True):
        why = old["reason"] and f"{old['rule']}: {old['reason']}"
        table.add_row(escape(old["name"]), old["op"], _place(old), _place(new), escape(why))
    return table


def _place(node: Tree) -> str:
    return f"[green]NPU {node['island']}[/]" if node["place"] == "npu" else "[red]CPU[/]"


_MOST_FILES = 20
_FILE_WIDTH = 36
_NAMES = {"cosine": "cosine", "l2": "L2", "psnr_db": "PSNR dB", "ssim": "SSIM"}


def show_folders(console: Console, tree: Tree) -> None:
    """Print what `FolderScores.to_dict` holds: the metrics, then the files, the worst of many only."""
    summary = grid("metric", ">mean", ">worst", "worst file")
    for name, metric in tree["metrics"].items():
        values = (figure(metric["mean"]), figure(metric["worst"]))
        summary.add_row(_NAMES[name], *values, escape(shortened(metric["worst_file"], _FILE_WIDTH)))
    console.print(summary)
    files = tree["files"]
    shown = files
    if len(files) > _MOST_FILES:
        shown = sorted(files, key=lambda file: float(file["cosine"]))[:_MOST_FILES]
    rest = f", the {len(shown)} worst by cosine (--csv FILE writes all)" if len(shown) < len(files) else ""
    headings = (f">{_NAMES[metric]}" for metric in tree["metrics"])
    table = grid("file", *headings, title=f"{len(files)} files{rest}")
    for file in shown:
        name = escape(shortened(file["name"], _FILE_WIDTH))
        table.add_row(name, *(figure(file[metric]) for metric in tree["metrics"]))
    console.print(table)


def show_models(console: Console, models: Sequence[Tree]) -> None:
    """Print what `ModelScore.to_dict` holds, side by side."""
    metrics = list(dict.fromkeys(name for model in models for name in model["metric"]))
    columns = {
        "top-1": [figure(m["top1"], ".2%") for m in models],
        "top-5": [figure(m["top5"], ".2%") for m in models],
        **{name: [figure(m["metric"].get(name)) for m in models] for name in metrics},
        "same top-1": [figure(m["agreement"], ".2%") for m in models],
        "SQNR dB": [figure(m["sqnr_db"]) for m in models],
        "size": [size(m["file_bytes"]) for m in models],
        "seconds": [f"{m['seconds']:.1f}" for m in models],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    table = grid("model", *(f">{escape(name)}" for name in shown), title=counted(models[0]["rows"], "row"))
    for index, model in enumerate(models):
        name = escape(shortened(model["model"], _FILE_WIDTH))
        table.add_row(name, *(cells[index] for cells in shown.values()))
    console.print(table)
    show_notes(
        console, dict.fromkeys(f"{model['model']}: {note}" for model in models for note in model["notes"])
    )


def show_findings(console: Console, tree: Tree) -> None:
    """Print what `DataReport.to_dict` holds."""
    console.print(counted(tree["samples"], "sample"))
    table = grid("input", ">mean", ">std", ">from", ">to")
    for name, profile in tree["inputs"].items():
        mean, std = (" ".join(f"{value:.3g}" for value in profile[key]) for key in ("mean", "std"))
        table.add_row(
            escape(shortened(name, _FILE_WIDTH)), mean, std, f"{profile['low']:.3g}", f"{profile['high']:.3g}"
        )
    console.print(table)
    for finding in tree["findings"]:
        colour = "yellow" if finding["level"] == "warning" else "cyan"
        console.print(
            f"[{colour}]{finding['level']}[/] [bold]{finding['rule']}[/]: {escape(finding['message'])}"
        )
        if finding["hint"]:
            console.print(f"  {escape(finding['hint'])}")
    if not tree["findings"]:
        console.print("[green]nothing odd was found[/]")


Words = Callable[[float], str]

_VERDICTS = {
    "chosen": "bold green",
    "meets": "green",
    "best": "bold yellow",
    "undecided": "yellow",
    "fails": "red",
}


def show_ladder(console: Console, tree: Tree, metric: Words, drop: Words) -> None:
    """Print what `AutoResult.to_dict` holds.

    Args:
        console: where to.
        tree: the ladder.
        metric: a value of the metric for people.
        drop: a loss in the unit of the budget for people.
    """
    console.print(
        f"{escape(tree['metric'])}: {escape(tree['metric_words'])}; float {metric(tree['float'])};"
        f" judged on {escape(tree['judged_on'])}"
    )
    metric_column = f">{escape(tree['metric'][:12])}"
    table = grid("rung", metric_column, ">drop", ">SQNR dB", ">NPU", ">size", ">sec.", "verdict", gap=1)
    for step in tree["ladder"]:
        colour = _VERDICTS.get(step["verdict"], "dim")
        table.add_row(*_cells(step, metric, drop), f"[{colour}]{step['verdict']}[/]")
    console.print(table)
    for step in tree["ladder"]:
        if step["reason"]:
            console.print(f"[dim]{escape(step['rung'])}:[/] {escape(step['reason'])}")
    _outcome(console, tree, metric, drop)
    show_notes(console, tree["notes"])


def step_line(step: Tree, metric: Words, drop: Words) -> str:
    """One rung in a line, for those who watch."""
    if step["metric"] is None:
        return f"{step['rung']}: {step['verdict']}, {step['reason']}"
    lost = "as good as float" if float(step["drop"]) <= 0 else f"drop {_interval(step, drop)}"
    took = f"{step['seconds']:.0f} s" + (f" ({step['forecast']:.0f} expected)" if step["forecast"] else "")
    verdict = step["verdict"]
    if verdict == "undecided":
        verdict += f" ({step['probability']:.0%} likely to be within the budget)"
    return f"{step['rung']}: {metric(step['metric'])}, {lost}, {verdict}, {took}"


def _interval(step: Tree, drop: Words) -> str:
    """A drop with what chance may add or take away."""
    margin = "" if step["margin"] is None else f" ±{drop(step['margin'])}"
    return drop(float(step["drop"])) + margin


def show_study(console: Console, tree: Tree) -> None:
    """Print what `SearchResult.to_dict` holds: the best trials and how to use the first."""
    console.print(
        f"{tree['finished']} of {tree['trials']} trials, {escape(tree['metric'])} on"
        f" {escape(tree['judged_on'])}; study {escape(tree['study'])}"
    )
    objectives: Sequence[str] = tree["objectives"]
    table = grid(">trial", *(f">{escape(name)}" for name in objectives), "~values", gap=1)
    for trial in tree["best"]:
        values = ", ".join(f"{key}={value}" for key, value in trial["parameters"].items())
        numbers = (f"{value:.5g}" for value in trial["values"])
        table.add_row(str(trial["number"]), *numbers, escape(values))
    console.print(table)
    for trial in tree["refused"][:3]:
        console.print(f"[dim]trial {trial['number']} refused:[/] {escape(trial['reason'])}")
    if tree["options"]:
        console.print("\n[bold]the best one again[/]")
        _verbatim(console, tree["options"])


def _cells(step: Tree, metric: Words, drop: Words) -> list[str]:
    value = "-" if step["metric"] is None else metric(step["metric"])
    lost = "-" if step["drop"] is None else _interval(step, drop)
    costs = (figure(step["npu_share"], ".0%"), size(step["file_bytes"]), f"{step['seconds']:.0f}")
    return [escape(step["rung"]), value, lost, figure(step["sqnr_db"], ".1f"), *costs]


_UNSURE = 0.025  # what a 95 % interval leaves to either side


def _outcome(console: Console, tree: Tree, metric: Words, drop: Words) -> None:
    chosen = next(step for step in tree["ladder"] if step["rung"] == tree["chosen"])
    where = f" in {tree['file']}" if tree["file"] else ""
    doubt = chosen["probability"] is not None and _UNSURE < chosen["probability"] < 1 - _UNSURE
    if tree["met"]:
        word = "[bold yellow]probably met:[/]" if doubt else "[bold green]met:[/]"
        text = f"{word} {escape(chosen['title'])}{escape(where)} stays within {tree['max_drop']}"
        if chosen["margin"] is not None:
            text += f": drop {_interval(chosen, drop)} (95 %)"
    else:
        word = "[bold yellow]undecided:[/]" if doubt else "[bold red]not met:[/]"
        whose = "no rung is likely to stay" if doubt else "no rung stays"
        text = (
            f"{word} {whose} within {tree['max_drop']}; the best, {escape(chosen['title'])}"
            f" ({metric(chosen['metric'])}, drop {_interval(chosen, drop)}), was handed over{escape(where)}"
        )
    if doubt:
        text += f"; within {tree['max_drop']} with a probability of {chosen['probability']:.0%}"
        if tree["rows_to_tell"]:
            text += f", and about {tree['rows_to_tell']} rows would tell"
    console.print(text)
