"""`roundel.npu_session`: a written model with the numbers of a Phoenix NPU, where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from roundel.errors import ModelError, RecipeError
from roundel.model import ModelSource, load_model
from roundel.model.session import open_session
from roundel.passes import refresh_shapes
from roundel.passes.cleanup import lift_constants, remove_dead_code
from roundel.plain import Card, to_plain
from roundel.qdq.nodes import QUARK
from roundel.rules.facts import Facts, gather_facts
from roundel.rules.report import RULES
from roundel.rules.types import Place, Prediction, Severity
from roundel.targets.npu import DEVICES, Compiler, Device, device_named
from roundel.targets.x1 import Evidence, x1_row
from roundel.twin.silicon import Silicon
from roundel.types import Array

# What the NPU makes of such files is wrong, and nobody knows how wrong: there is nothing to imitate.
_UNKNOWN_NUMBERS = frozenset({"P03", "Q01", "Q03", "Q12", "Q13", "Q14", "Q16"})
_EXACT = (Evidence.MEASURED, Evidence.RULE, Evidence.COPIED, Evidence.CPU)


@dataclass(frozen=True, slots=True, repr=False)
class TwinSummary(Card):
    """How far the numbers of a twin are known to be the NPU's.

    Attributes:
        device: whose numbers they are.
        nodes: how many nodes there are of each kind of evidence.
        macs: multiplications of each kind, for one sample.
        assumed: what is taken to be computed, by operator.
        refused: why the NPU takes nothing of the graph, so that all numbers are the CPU's; else None.
    """

    device: str
    nodes: Mapping[str, int]
    macs: Mapping[str, int]
    assumed: Mapping[str, str]
    refused: str | None = None

    @property
    def exact_share(self) -> float:
        """Share of the multiplications whose arithmetic is known: that of Conv, or of the CPU."""
        known = sum(self.macs.get(each.value, 0) for each in _EXACT)
        whole = sum(self.macs.values())
        return known / whole if whole else 1.0

    @property
    def measured_share(self) -> float:
        """Share of the multiplications in the very setting of a fixture (1x1 Conv without an activation)."""
        whole = sum(self.macs.values())
        return self.macs.get(Evidence.MEASURED.value, 0) / whole if whole else 0.0

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        if self.refused is not None:
            return {"numbers": f"of the CPU: {self.device} takes nothing ({self.refused})"}
        words = [f"{op} ({how})" for op, how in self.assumed.items()]
        return {
            "numbers": f"of {self.device}, {self.exact_share:.1%} of the MACs by a known rule",
            "measured": f"{self.measured_share:.1%} of the MACs in the setting of a fixture",
            "assumed": "; ".join(words) or "nothing",
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        shares = {"exact_share": self.exact_share, "measured_share": self.measured_share}
        return {**to_plain(self), **shares}

    def lines(self) -> tuple[str, ...]:
        """For notes: one line each."""
        return tuple(f"{name}: {text}" for name, text in self.card().items())


@dataclass(frozen=True, slots=True, eq=False)
class Twin:
    """A graph that computes, in any ONNX Runtime, what the NPU computes from a file.

    Attributes:
        model: the graph.
        summary: how far that is known.
    """

    model: ir.Model
    summary: TwinSummary


class NpuSession:
    """Runs a written model with the NPU's arithmetic; of ONNX Runtime's sessions it has the usual methods.

    Attributes:
        summary: how far the numbers are known to be the NPU's.
    """

    def __init__(self, twin: Twin, *, threads: int | None = None) -> None:
        self.summary = twin.summary
        self._session = open_session(twin.model, threads=threads, simulate=True)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Array]) -> list[Array]:
        """The outputs, all of them where no names are given."""
        names = None if output_names is None else list(output_names)
        return list(self._session.run(names, dict(input_feed)))

    def get_inputs(self) -> list[ort.NodeArg]:
        """Name, shape and type of each input."""
        return list(self._session.get_inputs())

    def get_outputs(self) -> list[ort.NodeArg]:
        """Name, shape and type of each output."""
        return list(self._session.get_outputs())


def npu_session(model: ModelSource, device: str = "phx", *, threads: int | None = None) -> NpuSession:
    """A session that computes what the NPU computes, as far as that has been measured.

    Args:
        model: a quantized model of any tool: a file, bytes, a ModelProto or an onnx-ir model.
        device: phx or hpt.
        threads: that it computes with; None for every core.

    Raises:
        RecipeError: nobody has measured this device's arithmetic.
        ModelError: the model is not quantized, or the NPU computes it wrongly.
    """
    return NpuSession(twin_of(model, device), threads=threads)


def twin_of(model: ModelSource, device: str) -> Twin:
    """The graph of `npu_session`; raises what that raises."""
    loaded = load_model(model, allow_quantized=True, opaque=QUARK)
    summary = become_twin(loaded.model, model, device)
    remove_dead_code(loaded.model)
    return Twin(loaded.model, summary)


def become_twin(graph: ir.Model, source: ModelSource, device: str) -> TwinSummary:
    """Rewrite a loaded model, in place, into its twin; raises what `npu_session` raises.

    Args:
        graph: the model, as loading has made it.
        source: the same, as it is written.
        device: whose numbers are wanted.
    """
    machine = device_named(device)
    if machine.compiler is not Compiler.X1:
        measured = [each.name for each in DEVICES.values() if each.compiler is Compiler.X1]
        raise RecipeError(
            "The arithmetic of this device has not been measured.",
            where=f"device {machine.name}",
            expected=", ".join(measured),
        )
    facts = gather_facts(source, None, machine)
    if facts.float_model:
        raise ModelError(
            "The model is in float: there are no integers to compute with.",
            where=facts.loaded.name,
            expected="a model with Q/DQ nodes",
            hint="Quantize it: roundel quantize MODEL --preset xint8.",
        )
    split = facts.before
    if split.npu_nodes:
        _refuse_unknown(facts)
    lift_constants(graph)
    refresh_shapes(graph)
    silicon = Silicon(graph, {node.name for node in split.nodes if node.place is Place.NPU})
    silicon.run()
    return _summary(machine, split, silicon.evidence)


def _refuse_unknown(facts: Facts) -> None:
    """Files that are placed and computed wrongly have no twin."""
    for each in RULES:
        for found in each.findings(facts) if each.id in _UNKNOWN_NUMBERS else ():
            if found.severity is Severity.ERROR:
                raise ModelError(
                    f"The NPU takes this file and computes it wrongly: rule {found.rule} ({found.title}).",
                    where=found.subject,
                    observed=found.message,
                    expected=found.why,
                    hint=found.fix,
                )


def _summary(machine: Device, split: Prediction, evidence: Mapping[str, Evidence]) -> TwinSummary:
    nodes, macs, assumed = Counter[str](), Counter[str](), dict[str, str]()
    for place in split.nodes:
        kind = evidence.get(place.name, Evidence.CPU)
        nodes[kind.value] += 1
        macs[kind.value] += place.macs or 0
        if kind is Evidence.ASSUMED:
            assumed[place.op] = x1_row(place.op).how
    refused = None if split.npu_nodes or not split.nodes else split.nodes[0].reason
    counts = {kind: macs[kind] for kind in macs if macs[kind]}
    return TwinSummary(machine.name, dict(nodes), counts, assumed, refused)
