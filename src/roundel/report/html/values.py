"""What a report is made of, and the values and words of its page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from roundel.recipe.load import dump_yaml
from roundel.recipe.settings import Recipe

if TYPE_CHECKING:
    from roundel.measure.types import Comparison, Difference, TensorComparison, WeightComparison
    from roundel.report.verdict import Verdict
    from roundel.rules.types import CheckReport, Finding, NodePlace

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReportContent:
    """Everything that is known about a quantized model.

    Attributes:
        comparison: tensor by tensor against the float model.
        record: of the run that wrote it, as in its JSON file; None for a model of unknown origin.
        check: the predicted split between NPU and CPU.
        unchecked: why there is no prediction.
        scores: float and quantized model on labelled data, as `ModelScore.to_dict` has them.
    """

    comparison: Comparison
    record: Tree | None = None
    check: CheckReport | None = None
    unchecked: str | None = None
    scores: Sequence[Tree] = field(default=())


_DIGITS = 5


def short(value: float | str | None) -> float | int | str | None:
    """At most five digits; numbers that are not finite become the words that the page's scripts know."""
    if value is None or not math.isfinite(float(value)):
        return None if value is None else str(float(value))
    rounded = float(f"{float(value):.{_DIGITS}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def percent(share: float) -> str:
    """A share of 0 to 1 in words."""
    number = 100 * share
    if number == 0 or number >= 99.95:
        return f"{number:.0f} %"
    if number < 0.01:
        return "less than 0.01 %"
    return f"{number:.0f} %" if number >= 10 else f"{number:.2g} %"


_MUCH = 0.5
_CUT_OFF = 0.0005
_POOR_USE = 0.5
_ONE_CHANNEL = 0.25


def causes(tensor: TensorComparison, weights: tuple[WeightComparison, ...]) -> tuple[str, ...]:
    """What the error that a layer introduces comes from, and what its range does to it."""
    return (*_making(tensor, weights), *_range(tensor), *_channels(tensor))


def origin(t: TensorComparison) -> str:
    """How much of the tensor's error its layer makes, and how much comes with its inputs."""
    if t.introduced is None:
        return "Error made here cannot be told apart from error of its inputs."
    made, passed = _power(t.introduced), _power(t.inherited)
    if made == passed == 0:
        return "Exact: no error here, and none from its inputs."
    if made == 0:
        return "Exact: all of its error comes from its inputs."
    if t.place == "input":
        return "A model input: all of its error is made by storing it."
    share = made / (made + passed)
    if share >= _MUCH:
        return f"{percent(share)} of its error power is made here."
    return f"{percent(1 - share)} of its error power comes from its inputs."


def _power(difference: Difference | None) -> float:
    return 0.0 if difference is None else difference.mse


def _making(t: TensorComparison, weights: tuple[WeightComparison, ...]) -> Iterator[str]:
    """What the introduced error is made of: storing the result, or the layer's weights and arithmetic."""
    made, stored = _power(t.introduced), _power(t.rounding)
    if made == 0 or t.place == "input" or t.rounding is None:
        return
    share, what = min(1.0, stored / made), "its weights" if weights else "its arithmetic"
    if share >= _MUCH:
        kind = t.storage.dtype if t.storage is not None else "float"
        yield f"{percent(share)} of what it adds comes from storing the result as {kind}."
    else:
        yield f"{percent(1 - share)} of what it adds comes from {what}, not from storing the result."


def _range(t: TensorComparison) -> Iterator[str]:
    if t.saturated is not None and t.saturated >= _CUT_OFF:
        yield f"The range cuts off {percent(t.saturated)} of the values."
    if t.range_use is not None and t.range_use < _POOR_USE:
        yield f"The values span only {percent(t.range_use)} of the stored range."


def _channels(t: TensorComparison) -> Iterator[str]:
    if t.worst_channels and t.channel_axis is not None:
        worst = t.worst_channels[0]
        many = t.shape[t.channel_axis] if t.channel_axis < len(t.shape) else 0
        if worst.share >= _ONE_CHANNEL and many >= 4 / _ONE_CHANNEL:
            yield f"Channel {worst.channel} alone holds {percent(worst.share)} of the error."


def verdict_values(verdict: Verdict) -> list[Any]:
    """Its level and rows; of paths in the command only the last part, as everywhere in a report."""
    words = [PurePath(word).name or word for word in shlex.split(verdict.next)]
    return [verdict.level, *({**verdict.rows(), "next": shlex.join(words)}).items()]


def npu_values(check: CheckReport) -> dict[str, Any]:
    """Islands, the nodes that stay outside, and the findings by rule."""
    split = check.before
    return {
        "device": check.device,
        "format": check.format,
        "islands": split.islands,
        "npu": split.npu_nodes,
        "cpu": split.cpu_nodes,
        "macs": split.macs,
        "share": short(split.npu_share),
        "strip": [[node.name, node.op, -1 if node.island is None else node.island] for node in split.nodes],
        "outside": _outside(split.nodes),
        "findings": _findings(check.findings),
        "notes": list(check.notes),
    }


def _outside(nodes: tuple[NodePlace, ...]) -> list[dict[str, Any]]:
    """Nodes on the CPU, by reason."""
    groups: dict[tuple[str, str], list[NodePlace]] = {}
    for node in nodes:
        if node.island is None:
            groups.setdefault((node.rule or "", node.reason), []).append(node)
    return [
        {"rule": rule, "reason": reason, "nodes": [[node.name, node.op] for node in members]}
        for (rule, reason), members in groups.items()
    ]


def _findings(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.severity.value, finding.fix), []).append(finding)
    return [
        {
            "rule": rule,
            "level": level,
            "title": members[0].title,
            "why": members[0].why,
            "fix": fix,
            "hits": [[hit.subject, hit.message] for hit in members],
        }
        for (rule, level, fix), members in groups.items()
    ]


_PHASES = {  # what the stages' names mean to a reader; steps have names for people
    "prepare": "load and prepare",
    "first samples": "run the first samples",
    "collect": "calibrate",
    "resolve": "choose scales",
    "gate": "verify",
}


_WORTH_SHOWING = 0.005  # seconds


def record_values(record: Tree | None) -> dict[str, Any]:
    """What a record tells: the recipe, how many nodes it quantized, every improving step, kept or not."""
    if record is None:
        return dict.fromkeys(("preset", "counts", "steps", "recipe", "command"))
    counts = record["counts"]
    return {
        "preset": {key: record["recipe"].get(key, "") for key in ("name", "title", "mode", "effort")},
        "counts": {
            "quantized": sum(counts["quantized_nodes"].values()),
            "float": sum(counts["float_nodes"].values()),
            "left": [[name, reason] for name, reason in record["float_nodes"].items()],
            "prepared": [[name, count] for name, count in record["prepare"].items()],
        },
        "steps": [_step(step) for step in record["improvements"]],
        "recipe": _recipe_text(record),
        "command": _command(record),
    }


def _step(step: Tree) -> dict[str, Any]:
    return {
        "name": step["step"],
        "before": short(step["before_db"]),
        "after": short(step["after_db"]),
        "refused": short(step.get("refused_db")),
        "kept": step["kept"],
        "foreseen": step.get("foreseen", False),
        "seconds": short(step["seconds"]),
        "layers": [
            [each["layer"], each["op"], short(each["before_db"]), short(each["after_db"]), each["kept"]]
            for each in step["layers"]
        ],
    }


def steps_by_layer(record: Tree | None) -> dict[str, list[list[Any]]]:
    """(step, before, after, kept) of every layer, by name of its node."""
    found: dict[str, list[list[Any]]] = {}
    for step in () if record is None else record["improvements"]:
        for each in step["layers"]:
            kept = each["kept"] and step["kept"]
            line = [step["step"], short(each["before_db"]), short(each["after_db"]), kept]
            for node in each["layer"].split("+"):  # a block of layers that were tuned together
                found.setdefault(node, []).append(line)
    return found


def time_values(record: Tree | None, compared: Mapping[str, float]) -> list[list[Any]]:
    """(what, seconds) of the run and of the comparison for this report."""
    phases = {} if record is None else record["seconds"]
    times = [[_PHASES.get(name, name), short(s)] for name, s in phases.items() if s >= _WORTH_SHOWING]
    return [*times, ["compare for this report", short(compared["total"])]]


def _recipe_text(record: Tree) -> str:
    """The recipe as a file that `--recipe` reads."""
    try:
        return dump_yaml(Recipe.model_validate(record["recipe"]))
    except ValidationError:  # of another version: as it stands
        return yaml.safe_dump(dict(record["recipe"]), sort_keys=False)


def _command(record: Tree) -> str:
    """The command line that repeats the run."""
    data = record["data"]
    words = ["roundel", "quantize", record["model"]["name"]]
    words += ["-o", record["file"]["name"] or "quantized.onnx", "--recipe", "recipe.yaml"]
    if data.get("random"):
        words += ["--random", str(data.get("count") or data.get("samples_seen") or 1)]
    elif "path" in data:
        words += ["--data", PurePath(data["path"]).name]
    elif data.get("kind") != "none needed":
        words += ["--data", "DATA"]
    return shlex.join(words)


def data_title(description: Tree) -> str:
    """What the samples were; of a path only the last part, since a report is made to be handed on."""
    kind = str(description.get("kind", "samples"))
    return f"{kind} {PurePath(description['path']).name}" if "path" in description else kind
