"""What the VAIML compiler left behind: its log, its reasons, its summaries, read into one view.

The formats are those of AMD's public documents and of logs that users have published. What is not known is
kept as it stands and shown so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from roundel.report.console import grid
from roundel.targets.vaiml import Explanation, explain_message

REASON_FILES = ("aie_unsupported_original_ops_with_reasons.json", "get_capability_v5.json")
SUMMARIES = ("preliminary-vaiml-pass-summary.txt", "final-vaiml-pass-summary.txt")
BACKEND_LOGS = ("AIECompiler.log", "aiecompiler-flexml.log")
TRACE = "graph_partition_trace.csv"
MLIR = ".chained_kernel.tosa.mlir"

_KERNEL = re.compile(r"^\s*(kernel|templatedGraph):(\S+)\s+\((.*?)\)\s*->\s*\((.*?)\)\s*,\s*(\d+)\s*$")
_CENSUS = "Operation statistics for"
_PARTITIONS = re.compile(r"Partition completed with (\d+) partitions?\b")
_SHARE = re.compile(r"([\d.]+)% of operations will run on AIE, ([\d.]+)% of operations will run on CPU")
_BREAKS = re.compile(r"CpuBecause\(\s*\"{1,2}(.*?)\"{1,2}\s*\)")  # a table doubles the quotes
_SUPPORTED = re.compile(r"Number of operators supported by VAIML:\s*(\d+)\s*\(\s*([\d.]+)\s*%\s*\)")
_GOPS = re.compile(r"GOPs (?:supported|offloaded) by VAIML:\s*([\d.]+)\s*\(\s*([\d.]+)\s*%\s*\)")
_BELOW = re.compile(r"Number of subgraphs below [\d.]+% GOPs threshold \(fall back to CPU\):\s*[1-9]\d*")
_TROUBLE = re.compile(
    r"\b(ERROR|FATAL)\b\s*:|fall back to CPU|NON-STATIC SHAPE|completed with errors", re.IGNORECASE
)
_BACKEND_ERROR = re.compile(r"^\W*(error|fatal)\b", re.IGNORECASE)
_FIELD = re.compile(r"\b(Reason|Op|LayerName|Message)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
_ESCAPED = re.compile(r"\\(.)")
_MOST_LINES = 20
_MARKS = ("[VAIML-", "VAIP-VAIML-PASS", "CpuBecause", "supported by VAIML", "offloaded by VAIML")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One line of the census: what operators became, and how often.

    Attributes:
        kind: kernel or templatedGraph.
        name: the compiler's.
        signature: types in and out.
        count: how often.
    """

    kind: str
    name: str
    signature: str
    count: int

    @property
    def floating(self) -> bool:
        """Whether a float32 is left in it: an operator that was not converted."""
        return re.search(r"\b(f32|float32)\b", self.signature) is not None


@dataclass(frozen=True, slots=True)
class Told:
    """One message of the compiler, explained.

    Attributes:
        message: verbatim.
        op: the operator concerned; empty where it does not say.
        nodes: names of the nodes concerned.
        count: how often it was said.
        explanation: what it means.
    """

    message: str
    op: str
    nodes: tuple[str, ...]
    count: int
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Compilation:
    """What one compilation came to.

    Attributes:
        partitions: how many pieces the compiler made; None where it does not say.
        planned: share of the operators that its plan puts on the NPU.
        supported: the same after support was checked (the pass summary), which is the one to trust.
        gops: share of the work on the NPU, from the summary.
        kernels: the census.
        breaks: nodes at which partitions end.
        told: messages, the most frequent first.
        reasoned: whether a file with the reason of each operator was among those read.
    """

    partitions: int | None = None
    planned: float | None = None
    supported: float | None = None
    gops: float | None = None
    kernels: tuple[Kernel, ...] = ()
    breaks: tuple[str, ...] = ()
    told: tuple[Told, ...] = ()
    reasoned: bool = False

    @property
    def share(self) -> float | None:
        """Share of the operators on the NPU, as well as it is known."""
        return self.planned if self.supported is None else self.supported

    @property
    def failed(self) -> bool:
        """Whether the back end gave up, which ONNX Runtime does not report."""
        return any("Failed to compile" in t.message or "with errors" in t.message for t in self.told)

    def verdicts(self) -> Iterator[str]:
        """What the numbers mean, in sentences."""
        if self.share is not None:
            pieces = "" if self.partitions is None else f", in {self.partitions} partition(s)"
            word = "planned for" if self.supported is None else "supported on"
            yield f"{self.share:.2%} of the operators are {word} the NPU{pieces}."
        if self.supported is not None and self.planned is not None and self.supported < self.planned:
            yield (
                f"The console says {self.planned:.2%}: that is a plan. What the compiler supports is in the"
                f" pass summary: {self.supported:.2%}."
            )
        elif self.supported is None and self.planned is not None:
            yield f"That line is a plan: {SUMMARIES[0]} in the cache says what is supported."
        if self.failed:
            yield "The back end failed, so the CPU computes these partitions: no error reaches ONNX Runtime."
        floating = [kernel for kernel in self.kernels if kernel.floating]
        if floating:
            named = ", ".join(f"{kernel.name} ({kernel.count}x)" for kernel in floating[:3])
            yield f"float32 is left in {len(floating)} kernels: {named}. Set enable_f32_to_bf16_conversion."
        if self.partitions == 1 and self.supported == 1.0 and not self.failed:
            yield "One partition, everything on the NPU: as good as it gets."


Said = tuple[str, str, str]
"""A message, the operator and the node that it is about."""


def compilation_of(texts: Iterable[tuple[str, str]]) -> Compilation | None:
    """What files say together; None where none of them is of this compiler.

    Args:
        texts: name and content of each.
    """
    said: list[Said] = []
    kernels: list[Kernel] = []
    breaks: list[str] = []
    numbers: dict[str, float] = {}
    known = reasoned = False
    for path, text in texts:
        name = Path(path).name
        if name in REASON_FILES or name.endswith(".json"):
            reasons = list(_json_reasons(text))
            reasoned |= bool(reasons) or name in REASON_FILES
            said += reasons
        elif name.endswith(MLIR) or name.endswith(".mlir"):
            reasons = list(_mlir_reasons(text))
            reasoned |= bool(reasons) or name.endswith(MLIR)
            said += reasons
        elif name in BACKEND_LOGS:
            known = True
            errors = [line.strip() for line in text.splitlines() if _BACKEND_ERROR.search(line)]
            said += [(line, "", "") for line in errors[:_MOST_LINES]]
        elif any(mark in text for mark in _MARKS):
            known = True
            kernels = _census(text) or kernels
            breaks += _BREAKS.findall(text)
            numbers |= _numbers(text)
            said += [(line, "", "") for line in _troubles(text)]
    if not known and not reasoned:
        return None
    return Compilation(
        partitions=int(numbers["partitions"]) if "partitions" in numbers else None,
        planned=numbers.get("planned"),
        supported=numbers.get("supported"),
        gops=numbers.get("gops"),
        kernels=tuple(kernels),
        breaks=tuple(dict.fromkeys(breaks)),
        told=_gathered(said),
        reasoned=reasoned,
    )


def _gathered(said: list[Said]) -> tuple[Told, ...]:
    """Each message once for each operator; several files repeat the same node."""
    nodes: dict[tuple[str, str], dict[str, None]] = {}
    loose: Counter[tuple[str, str]] = Counter()
    for message, op, node in said:
        key = (message, op)
        names = nodes.setdefault(key, {})
        if node:
            names[node] = None
        else:
            loose[key] += 1
    found = [
        Told(message, op, tuple(names), len(names) or loose[message, op], explain_message(message))
        for (message, op), names in nodes.items()
    ]
    return tuple(sorted(found, key=lambda told: -told.count))


def _census(text: str) -> list[Kernel]:
    """The last census of the whole model; others are of its parts."""
    found: list[Kernel] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if _CENSUS in line and "CPU partitions" not in line:
            block = []
            for row in lines[number + 1 :]:
                match = _KERNEL.match(row)
                if match is not None:
                    kind, name, ins, outs, count = match.groups()
                    block.append(Kernel(kind, name, f"({ins}) -> ({outs})", int(count)))
                elif block or row.strip().startswith(("INFO", "WARNING", "ERROR")):
                    break
            if block and (not found or "the model" in line):
                found = block
    return found


def _numbers(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    if parts := _PARTITIONS.findall(text):
        found["partitions"] = float(parts[-1])
    if shares := _SHARE.findall(text):
        found["planned"] = float(shares[-1][0]) / 100
    if supported := _SUPPORTED.findall(text):
        found["supported"] = float(supported[-1][1]) / 100
    if gops := _GOPS.findall(text):
        found["gops"] = float(gops[-1][1]) / 100
    return found


def _troubles(text: str) -> Iterator[str]:
    """Lines that say that something goes to the CPU, each once."""
    seen: dict[str, None] = {}
    for line in text.splitlines():
        plain = line.strip()
        counted = "below" in plain and "GOPs threshold" in plain
        if (counted and _BELOW.search(plain)) or (not counted and _TROUBLE.search(plain)):
            seen[plain] = None
    yield from list(seen)[:_MOST_LINES]


def _mlir_reasons(text: str) -> Iterator[Said]:
    """Subgraphs with `Reason = "CpuBecause"`: their attributes stand together in one dictionary."""
    for part in text.split("xten_nn.subgraph")[1:]:
        head = part[: part.find("^bb")] if "^bb" in part else part
        fields: dict[str, str] = {}
        for name, value in _FIELD.findall(head):
            fields.setdefault(name, _ESCAPED.sub(r"\1", value))
        if fields.get("Reason") == "CpuBecause":
            yield fields.get("Message", "(no message)"), fields.get("Op", ""), fields.get("LayerName", "")


_MESSAGE_KEYS = ("reason", "Message", "message", "reasons")
_NODE_KEYS = ("node_name", "name", "LayerName", "node")
_OP_KEYS = ("op_type", "Op", "op", "type")


def _json_reasons(text: str) -> Iterator[Said]:
    """Any object in the tree that names a node and a reason; files and versions spell that differently."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return
    stack: list[Any] = [tree]
    while stack:
        current = stack.pop()
        if isinstance(current, list):
            stack.extend(reversed(current))
        elif isinstance(current, dict):
            yield from _one(current)
            incompatible = current.get("incompatible_map")
            if isinstance(incompatible, dict):
                yield from (
                    (str(why), "", str(node)) for node, all_ in incompatible.items() for why in _each(all_)
                )
            unsupported = current.get("unsupported_nodes")
            if isinstance(unsupported, list):
                named = set(incompatible) if isinstance(incompatible, dict) else set()
                plain = [node for node in unsupported if isinstance(node, str) and node not in named]
                yield from (("not supported, no reason given", "", node) for node in plain)
            stack.extend(value for key, value in current.items() if key != "incompatible_map")


def _one(entry: Mapping[str, Any]) -> Iterator[Said]:
    reason = next((entry[key] for key in _MESSAGE_KEYS if entry.get(key)), None)
    node, op = (next((entry[k] for k in keys if entry.get(k)), "") for keys in (_NODE_KEYS, _OP_KEYS))
    if reason is not None and (isinstance(node, str) and isinstance(op, str)) and (node or op):
        yield from ((str(why), op, node) for why in _each(reason))


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_MOST_NAMES = 3
_MOST_KERNELS = 12


def show_compilation(console: Console, found: Compilation) -> None:
    """The compiler's own account, each message with what it means."""
    if found.kernels:
        table = grid("kernel", "types", ">count", title="what the compiler made of the operators")
        for kernel in found.kernels[:_MOST_KERNELS]:
            table.add_row(Text(kernel.name), Text(kernel.signature), str(kernel.count))
        console.print(table)
        if len(found.kernels) > _MOST_KERNELS:
            console.print(
                Text(f"and {len(found.kernels) - _MOST_KERNELS} more kinds (see --json)", style="dim")
            )
    for sentence in found.verdicts():
        console.print(Text(sentence))
    if found.breaks:
        console.print(Text(f"Partitions break at: {_some(found.breaks)}"))
    for told in found.told:
        _show_told(console, told)
    if found.told:
        console.print(Text("Flags are documented for Vitis AI 6.3; Ryzen AI may not know all.", style="dim"))


def _show_told(console: Console, told: Told) -> None:
    known, where = told.explanation, f"at {_some(told.nodes)}" if told.nodes else ""
    words = [f"{told.count}x", told.op, where]
    console.print(Text(" ".join(filter(None, words)), style="bold"), Text(told.message))
    if known.cause:
        console.print(Text(f"  cause ({known.stage}): {known.cause}"))
        console.print(Text(f"  try: {known.remedy}"))
    else:
        console.print(Text("  not a message that is known here: the compiler's own words"))


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def known_files(folder: Path) -> list[Path]:
    """The files in a cache folder, at any depth, that say something about the compilation."""
    names = {*REASON_FILES, *SUMMARIES, *BACKEND_LOGS, TRACE}
    found = [path for path in sorted(folder.rglob("*")) if path.name in names or path.name.endswith(MLIR)]
    return found + [path for path in sorted(folder.glob("*.log")) if path.name not in names]
