"""What a check finds: findings, the predicted split, and the report that holds both."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import getdoc
from types import ModuleType
from typing import Any, Generic, TypeVar

from roundel.plain import Card, counted, to_plain


class Severity(enum.Enum):
    """How much a finding matters."""

    ERROR = "error"  # the NPU will not run the model, or will run it wrongly
    WARNING = "warning"  # it will run, but slower or less accurately than it could
    NOTE = "note"  # worth knowing


class Place(enum.Enum):
    """Where a node runs."""

    NPU = "npu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where a rule applies.

    Attributes:
        severity: how much it matters.
        message: what was observed, with the number.
        subject: the node or tensor concerned.
        fix: the remedy; the rule's, where a finding has none of its own.
        automatic: whether `roundel quantize --device` does it by itself.
        why: what happens on the NPU when nothing is done; the rule's, where it has none of its own.
        rule: the rule's number.
        title: the rule's, in two or three words.
    """

    severity: Severity
    message: str
    subject: str | None = None
    fix: str = ""
    automatic: bool = False
    why: str = ""
    rule: str = ""
    title: str = ""


Judged = TypeVar("Judged", contravariant=True)


@dataclass(frozen=True, slots=True)
class Rule(Generic[Judged]):
    """One rule: its number, why it exists, what helps, and the walk that finds it.

    Attributes:
        id: P01 to P22 for any model, Q01 and up for models that are quantized already.
        title: two or three words.
        why: what happens on the NPU when nothing is done.
        fix: what to do.
        find: yields the places where it applies.
    """

    id: str
    title: str
    why: str
    fix: str
    find: Callable[[Judged], Iterator[Finding]]

    def findings(self, judged: Judged) -> Iterator[Finding]:
        """What it finds, in full."""
        for found in self.find(judged):
            fix, why = found.fix or self.fix, found.why or self.why
            yield replace(found, rule=self.id, title=self.title, fix=fix, why=why)


def rule(
    number: str, title: str, fix: str
) -> Callable[[Callable[[Judged], Iterator[Finding]]], Rule[Judged]]:
    """Makes a rule of the function that finds it and that says why; `rules_of` its module then has it."""
    return lambda find: Rule(number, title, getdoc(find) or "", fix, find)


def rules_of(*modules: ModuleType) -> tuple[Rule[Any], ...]:
    """The rules that these modules define, by number."""
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Rule)]
    return tuple(sorted(found, key=lambda rule: rule.id))


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where one node is expected to run.

    Attributes:
        name: of the node.
        op: operator type.
        place: NPU or CPU.
        rule: the rule that sends it to the CPU, or None.
        reason: the same in words.
        macs: multiplications, None where a shape is not known.
        island: number of the NPU group, None on the CPU.
    """

    name: str
    op: str
    place: Place
    rule: str | None
    reason: str
    macs: int | None
    island: int | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """The split of a graph, in execution order."""

    nodes: tuple[NodePlace, ...]

    @property
    def islands(self) -> int:
        """NPU subgraphs."""
        return len({node.island for node in self.nodes if node.island is not None})

    @property
    def npu_nodes(self) -> int:
        """Nodes on the NPU."""
        return sum(1 for node in self.nodes if node.place is Place.NPU)

    @property
    def cpu_nodes(self) -> int:
        """Nodes on the CPU."""
        return len(self.nodes) - self.npu_nodes

    @property
    def macs(self) -> int:
        """Multiplications of all nodes whose shapes are known, for one sample."""
        return sum(node.macs or 0 for node in self.nodes)

    @property
    def npu_share(self) -> float | None:
        """Share of the multiplications on the NPU; None when there are none."""
        on_npu = sum(node.macs or 0 for node in self.nodes if node.place is Place.NPU)
        return on_npu / self.macs if self.macs else None

    def to_dict(self, *, nodes: bool) -> dict[str, Any]:
        """Plain values for JSON."""
        tree: dict[str, Any] = {
            "islands": self.islands,
            "npu_nodes": self.npu_nodes,
            "cpu_nodes": self.cpu_nodes,
            "macs": self.macs,
            "npu_share_of_macs": self.npu_share,
            "places": "".join("N" if node.place is Place.NPU else "C" for node in self.nodes),
        }
        if nodes:
            tree["nodes"] = to_plain(self.nodes)
        return tree


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """What the provider's report is expected to count.

    Attributes:
        all: nodes of the file without Constant nodes, and one DQ more for each further reader of a DQ.
        npu: on the NPU, Q/DQ included.
        cpu: on the CPU, without Q/DQ.
        edge: Q/DQ on the CPU, which the report calls VITIS_EP_CPU.
    """

    all: int
    npu: int
    cpu: int
    edge: int


@dataclass(frozen=True, slots=True)
class Latency:
    """What one inference takes.

    Attributes:
        npu_ms: the guess for the NPU.
        least_ms, most_ms: half and double of the two formulas.
        cpu_ms: of the float model on this machine's CPU; None where it could not be run.
        notes: what to make of it.
    """

    npu_ms: float
    least_ms: float
    most_ms: float
    cpu_ms: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(Card):
    """Everything that `roundel check` says.

    Attributes:
        model: the file's name.
        quantized: whether the model holds Q/DQ pairs already.
        format: the number format judged.
        device: the device judged.
        before: the split as the model or the plain preset stands.
        after: the split once `roundel quantize --device` has done what it does by itself.
        findings: errors first, then by rule.
        notes: what the report rests on.
        counts: what the provider's report should say of a finished model; None where that is not known.
        latency: what one inference may take on the first NPU; None for others.
    """

    model: str
    quantized: bool
    format: str
    device: str
    before: Prediction
    after: Prediction
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    counts: NodeCounts | None = None
    latency: Latency | None = None

    @property
    def passed(self) -> bool:
        """Whether there is no finding of severity error."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def card(self) -> Mapping[str, object]:
        """Where it runs, and what stands in the way."""
        split, levels = self.after, Counter(finding.severity.value for finding in self.findings)
        found = ", ".join(counted(levels[each.value], each.value) for each in Severity if levels[each.value])
        return {
            "model": f"{self.model}, {self.format} on {self.device}",
            "NPU": f"{counted(split.npu_nodes, 'node')} in {counted(split.islands, 'island')}",
            "CPU": counted(split.cpu_nodes, "node"),
            "findings": found or "none",
        }

    def to_dict(self, *, nodes: bool = False) -> dict[str, Any]:
        """Plain values for JSON; `nodes` adds the place of every node."""
        splits = {"before": self.before.to_dict(nodes=nodes), "after": self.after.to_dict(nodes=nodes)}
        return {**to_plain(self), "passed": self.passed, **splits}
