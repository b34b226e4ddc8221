"""Keep power-of-two scales within reach of the NPU's shifters.

Position p stands for scale 2**-p. Limits are solved as a fixpoint over positions, before any weight is
rounded, so that a moved position never changes what a weight or a bias means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from roundel.calibrate.state import QuantState
from roundel.errors import VerifyError
from roundel.model.graph import only_reader
from roundel.plan.stored import stored_input, stored_output
from roundel.plan.types import QuantPlan
from roundel.recipe import Npu
from roundel.targets.shifts import XINT8_LIMITS, ShiftLimits

_MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that does not hold: the quantity, its allowed range, and where."""

    rule: str
    node: str
    value: int
    low: int
    high: int


def position(scale: float) -> int:
    """-log2 of a power-of-two scale."""
    return int(-(np.frexp(np.float64(scale))[1] - 1))


def refine(model: ir.Model, state: QuantState, npu: Npu) -> QuantState:
    """Move positions until every limit that the recipe asks for holds.

    Raises:
        VerifyError: two limits contradict each other; the message names them.
    """
    if not npu.limits:
        return state
    solver = _Solver(model.graph, state, npu, XINT8_LIMITS)
    moved = solver.solve()
    params = dict(state.params)
    for name in params:
        key = solver.key(name)
        if key in moved:
            scale = np.asarray(2.0 ** -solver.positions[key], np.float32)
            params[name] = replace(params[name], scale=scale)
    notes = tuple(f"position of '{k}' moved from {old} to {solver.positions[k]}" for k, old in moved.items())
    return replace(state, params=params, notes=(*state.notes, *notes))


def breaches(graph: ir.Graph, state: QuantState, npu: Npu) -> tuple[Breach, ...]:
    """Every limit that does not hold."""
    return tuple(_Solver(graph, state, npu, XINT8_LIMITS).violations())


class _Solver:
    def __init__(self, graph: ir.Graph, state: QuantState, npu: Npu, limits: ShiftLimits) -> None:
        self.npu, self.limits, self.plan = npu, limits, state.plan
        self.positions: dict[str, int] = {}
        for name, params in state.params.items():
            self.positions[self.key(name)] = position(float(params.scale))
        self.sites = tuple(_sites(graph, state.plan))

    def key(self, name: str) -> str:
        """Tensors that share a scale share a variable."""
        tensor = self.plan.tensors.get(name)
        return name if tensor is None else min(self.plan.leaders(name))

    def solve(self) -> dict[str, int]:
        """Sweep until nothing moves; returns the former positions of what moved."""
        before = dict(self.positions)
        for _ in range(_MOST_ROUNDS):
            changed = False
            for site in self.sites:
                changed |= self._fix(site)
            if not changed:
                break
        left = next(iter(self.violations()), None)
        if left is not None:
            raise VerifyError(
                "No positions satisfy the NPU's shift limits.",
                where=f"{left.rule} at node '{left.node}'",
                observed=left.value,
                expected=f"{left.low} to {left.high}",
                hint=f"Keep the node in float with --exclude '{left.node}'.",
            )
        return {k: old for k, old in before.items() if self.positions[k] != old}

    def violations(self) -> Iterator[Breach]:
        """Limits that do not hold at the current positions."""
        for site in self.sites:
            for rule, value, (low, high), _ in self._limits(site):
                if not low <= value <= high:
                    yield Breach(rule, site.node, value, low, high)

    def _fix(self, site: _Site) -> bool:
        """Repair each broken limit in turn, by moving the variable that the limit names."""
        changed = False
        for rule in range(len(self._limits(site))):
            # Read afresh: an earlier repair may have moved what this limit depends on.
            _, value, (low, high), (name, sign) = self._limits(site)[rule]
            if low <= value <= high:
                continue
            wanted = low if value < low else high
            self.positions[self.key(name)] += sign * (wanted - value)
            changed = True
        return changed

    def _limits(self, site: _Site) -> list[tuple[str, int, tuple[int, int], tuple[str, int]]]:
        """(rule, value, allowed, (tensor to move, its sign in the value)) in the order of repair."""
        match site.kind:
            case "add":
                return self._add(site)
            case "mul":
                return self._mul(site)
            case "hard_sigmoid":
                return self._hard_sigmoid(site)
            case _:
                return self._layer(site)

    def _p(self, name: str) -> int:
        return self.positions[self.key(name)]

    def _add(self, site: _Site) -> list[tuple[str, int, tuple[int, int], tuple[str, int]]]:
        ranked = sorted(site.inputs, key=self._p)
        lowest, highest = ranked[0], ranked[-1]
        found = []
        if self.npu.adjust_shift_read and len(site.inputs) > 1:
            spread = self._p(highest) - self._p(lowest)
            found.append(("shift_read", spread, (0, self.limits.read), (highest, 1)))
        if self.npu.adjust_shift_write and site.output is not None:
            reach = self._p(lowest) - self._p(site.output)
            found.append(("shift_write", reach, self.limits.add_write, (site.output, -1)))
        return found

    def _mul(self, site: _Site) -> list[tuple[str, int, tuple[int, int], tuple[str, int]]]:
        if site.output is None:
            return []
        reach = sum(self._p(name) for name in site.inputs) - self._p(site.output)
        found = []
        if self.npu.adjust_shift_write:
            found.append(("shift_write", reach, self.limits.mul_write, (site.output, -1)))
        if self.npu.adjust_shift_swish and site.swish:
            found.append(("shift_swish", reach, self.limits.swish, (site.output, -1)))
        return found

    def _hard_sigmoid(self, site: _Site) -> list[tuple[str, int, tuple[int, int], tuple[str, int]]]:
        if not self.npu.adjust_hard_sigmoid or site.output is None:
            return []
        given, made = site.inputs[0], site.output
        top = self._p(given) + self.limits.hard_sigmoid_reach
        return [
            ("hard_sigmoid input", self._p(given), self.limits.hard_sigmoid_input, (given, 1)),
            ("hard_sigmoid output", self._p(made), (self.limits.hard_sigmoid_output, top), (made, 1)),
        ]

    def _layer(self, site: _Site) -> list[tuple[str, int, tuple[int, int], tuple[str, int]]]:
        assert site.weight is not None
        accumulator = self._p(site.inputs[0]) + self._p(site.weight)
        cut = 0 if site.output is None else accumulator - self._p(site.output)
        found = []
        if self.npu.adjust_shift_cut and site.output is not None:
            found.append(("shift_cut", cut, self.limits.cut, (site.weight, 1)))
        if self.npu.adjust_shift_bias and site.bias is not None and site.output is not None:
            allowed = self.limits.bias(cut, leaky=site.leaky)
            found.append(("shift_bias", accumulator - self._p(site.bias), allowed, (site.bias, -1)))
        return found


@dataclass(frozen=True, slots=True)
class _Site:
    """A node with the stored tensors around it."""

    kind: str
    node: str
    inputs: tuple[str, ...]
    output: str | None
    weight: str | None = None
    bias: str | None = None
    leaky: bool = False
    swish: bool = False


def _sites(graph: ir.Graph, plan: QuantPlan) -> Iterator[_Site]:
    for node in graph:
        verdict = plan.nodes.get(str(node.name))
        if verdict is None or not verdict.quantized or node.domain not in ("", "ai.onnx"):
            continue
        out = stored_output(node, plan.tensors)
        name = str(node.name)
        if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
            site = _layer_site(node, plan, out)
            if site is not None:
                yield site
        elif node.op_type in ("Add", "Sub", "Mul"):
            given = tuple(filter(None, (stored_input(v, plan.tensors) for v in node.inputs)))
            if len(given) == 2:
                swish = node.op_type == "Mul" and _is_swish(node)
                yield _Site("mul" if node.op_type == "Mul" else "add", name, given, out, swish=swish)
        elif node.op_type in ("HardSigmoid", "Sigmoid"):
            source = stored_input(node.inputs[0], plan.tensors)
            if source is not None:
                yield _Site("hard_sigmoid", name, (source,), out)


def _layer_site(node: ir.Node, plan: QuantPlan, out: str | None) -> _Site | None:
    names = [str(v.name) if v is not None and v.name in plan.tensors else None for v in node.inputs]
    if names[0] is None or names[1] is None:
        return None
    reader = only_reader(node.outputs[0])
    leaky = reader is not None and reader.op_type == "LeakyRelu"
    bias = names[2] if len(names) > 2 else None
    return _Site("layer", str(node.name), (names[0],), out, names[1], bias, leaky=leaky)


def _is_swish(node: ir.Node) -> bool:
    """x * gate(x): one input also feeds the HardSigmoid that makes the other."""
    for gate, source in ((0, 1), (1, 0)):
        value, other = node.inputs[gate], node.inputs[source]
        maker = value.producer() if value is not None else None
        if maker is not None and maker.op_type in ("HardSigmoid", "Sigmoid") and maker.inputs[0] is other:
            return True
    return False
