"""How far a layer's scales may still move without leaving the NPU's shift limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from roundel.calibrate.statistics import QuantState
from roundel.errors import RecipeError, VerifyError
from roundel.model.graph import only_reader
from roundel.numerics.affine import bias_params
from roundel.numerics.scales import largest_exponent
from roundel.plan.adjust import becomes_hard_sigmoid, stored_input, stored_output
from roundel.plan.types import Derived, Observed, QuantPlan
from roundel.recipe.settings import Npu
from roundel.targets.shifts import XINT8_LIMITS, ShiftLimits
from roundel.types import QParams, QType

_MOST_ROUNDS = 500
_HIGHEST = 126  # position of the smallest normal float32 scale
_LOWEST = -largest_exponent(QType.INT8)
_YIELD = 4  # bits that a layer's output gives up before its weights saturate
_ANY = 1 << 10
_GATE_SCALE = 2.0**-5  # holds 3.97: a HardSigmoid is 0 or 1 from 3 on


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
    state = replace(state, reads={**state.reads, **_own_reads(model.graph, state, npu)})
    solver = _Solver(model.graph, state, npu, XINT8_LIMITS)
    moved = solver.solve()
    params = dict(state.params)
    for name in params:
        key = solver.key(name)
        if key in moved:
            scale = np.asarray(2.0 ** -solver.positions[key], np.float32)
            params[name] = replace(params[name], scale=scale)
    for name, tensor in state.plan.tensors.items():
        if isinstance(tensor.source, Derived):
            source = tensor.source
            derived = bias_params(params[source.input].scale, params[source.weight], source.factor)
            params[name] = replace(params[name], scale=derived.scale)
    reads = dict(state.reads)
    for read in state.reads:
        own, key = state.read_params(*read), _read_key(*read)
        if own is not None and key in moved:
            reads[read] = replace(own, scale=np.asarray(2.0 ** -solver.positions[key], np.float32))
    notes = tuple(f"position of '{k}' moved from {old} to {solver.positions[k]}" for k, old in moved.items())
    return replace(state, params=params, reads=reads, notes=(*state.notes, *notes))


def _read_key(tensor: str, node: str) -> str:
    """The variable for a tensor that a node reads in a scale of its own."""
    return f"{tensor} as {node} reads it"


def _own_reads(graph: ir.Graph, state: QuantState, npu: Npu) -> dict[tuple[str, str], QParams]:
    """The tensors that a HardSigmoid cannot take as others need them, in a scale for it alone.

    Its input may reach no further than 127. It needs no more than 3, where it ends; what else reads the
    tensor, as the product of a SiLU does, would be cut off.
    """
    found = {}
    limit = XINT8_LIMITS.hard_sigmoid_input[0]
    readers = Counter(str(v.name) for node in graph for v in node.inputs if v is not None)
    readers.update(str(value.name) for value in graph.outputs)
    for site in _sites(graph, state.plan, npu):
        given = site.inputs[0]
        params = state.params[given]
        coarse = position(float(params.scale.max())) < limit
        shared = readers[given] > 1 or state.plan.tensors[given].source != Observed()
        if npu.adjust_hard_sigmoid and site.kind == "hard_sigmoid" and coarse and shared:
            found[given, site.node] = replace(params, scale=np.asarray(_GATE_SCALE, np.float32))
    return found


def breaches(graph: ir.Graph, state: QuantState, npu: Npu) -> tuple[Breach, ...]:
    """Every limit that does not hold."""
    return tuple(_Solver(graph, state, npu, XINT8_LIMITS).violations())


@dataclass(frozen=True, slots=True)
class _Limit:
    """low <= sum of sign x position <= high; the terms stand in the order in which they give way."""

    rule: str
    terms: tuple[tuple[str, int], ...]
    low: int
    high: int
    room: int = _HIGHEST - _LOWEST  # how far a term may fall below its first position


class _Solver:
    def __init__(self, graph: ir.Graph, state: QuantState, npu: Npu, limits: ShiftLimits) -> None:
        self.npu, self.limits, self.plan = npu, limits, state.plan
        self.positions: dict[str, int] = {}
        for name, params in state.params.items():
            if params.scale.ndim:
                raise RecipeError(
                    "The NPU's shift limits need one scale for each tensor.",
                    where=f"tensor '{name}'",
                    observed=f"{params.scale.size} scales",
                    hint="Drop 'per_channel' from the override that names it.",
                )
            self.positions[self.key(name)] = position(float(params.scale))
        self.before = dict(self.positions)
        self.floors: dict[str, int] = {}
        self.sites = tuple(self._as_read(site, state) for site in _sites(graph, state.plan, npu))

    def _as_read(self, site: _Site, state: QuantState) -> _Site:
        """The site, where an input that it reads in a scale of its own is a variable of its own."""
        own = state.read_params(site.inputs[0], site.node)
        if site.kind != "hard_sigmoid" or own is None:
            return site
        name = _read_key(site.inputs[0], site.node)
        self.positions[name] = self.before[name] = position(float(own.scale))
        return replace(site, inputs=(name,))

    def key(self, name: str) -> str:
        """Tensors that share a scale share a variable."""
        tensor = self.plan.tensors.get(name)
        return name if tensor is None else min(self.plan.leaders(name))

    def solve(self) -> dict[str, int]:
        """Sweep until nothing moves; returns the former positions of what moved."""
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
        return {k: old for k, old in self.before.items() if self.positions[k] != old}

    def violations(self) -> Iterator[Breach]:
        """Limits that do not hold at the current positions."""
        for site in self.sites:
            for limit in self._limits(site):
                value = self._value(limit)
                if not limit.low <= value <= limit.high:
                    yield Breach(limit.rule, site.node, value, limit.low, limit.high)

    def _fix(self, site: _Site) -> bool:
        """Repair each broken limit of a node in turn."""
        changed = False
        for index in range(len(self._limits(site))):
            # Read afresh: an earlier repair may have moved what this limit depends on.
            limit = self._limits(site)[index]
            value = self._value(limit)
            if not limit.low <= value <= limit.high:
                changed |= self._repair(limit, value)
        return changed

    def _repair(self, limit: _Limit, value: int) -> bool:
        need = value - limit.high if value > limit.high else limit.low - value
        factors: dict[str, int] = {}
        for name, sign in limit.terms:
            factors[self.key(name)] = factors.get(self.key(name), 0) + sign
        if value < limit.low:
            factors = {key: -factor for key, factor in factors.items()}
        # The sum is to fall: terms that count positively are lowered, then the others raised.
        asked = need
        for key, factor in factors.items():
            if factor > 0 and need > 0:
                floor = max(self.floors.get(key, self.before[key] - limit.room), _LOWEST)
                steps = min(-(-need // factor), max(self.positions[key] - floor, 0))
                self.positions[key] -= steps
                need -= steps * factor
        for key, factor in factors.items():
            if factor < 0 and need > 0:
                steps = min(-(need // factor), _HIGHEST - self.positions[key])
                self.positions[key] += steps
                self.floors[key] = self.positions[key]
                need += steps * factor
        return need != asked

    def _value(self, limit: _Limit) -> int:
        return sum(sign * self._p(name) for name, sign in limit.terms)

    def _p(self, name: str) -> int:
        return self.positions[self.key(name)]

    def _limits(self, site: _Site) -> list[_Limit]:
        """What must hold at a node, in the order of repair."""
        if site.output is None:
            return []
        match site.kind:
            case "add":
                return self._add(site, site.output)
            case "mul":
                return self._mul(site, site.output)
            case "hard_sigmoid":
                return self._hard_sigmoid(site.inputs[0], site.output)
            case _:
                return self._layer(site, site.output)

    def _add(self, site: _Site, output: str) -> list[_Limit]:
        ranked = sorted(site.inputs, key=self._p)
        lowest, highest = ranked[0], ranked[-1]
        found = []
        if self.npu.adjust_shift_read:
            found.append(_Limit("shift_read", ((highest, 1), (lowest, -1)), 0, self.limits.read))
        if self.npu.adjust_shift_write:
            found.append(_Limit("shift_write", ((lowest, 1), (output, -1)), *self.limits.add_write))
        return found

    def _mul(self, site: _Site, output: str) -> list[_Limit]:
        finest_first = sorted(site.inputs, key=self._p, reverse=True)
        terms = (*((name, 1) for name in finest_first), (output, -1))
        found = []
        if self.npu.adjust_shift_write:
            found.append(_Limit("shift_write", terms, *self.limits.mul_write))
        if self.npu.adjust_shift_swish and site.swish:
            found.append(_Limit("shift_swish", terms, *self.limits.swish))
        return found

    def _hard_sigmoid(self, given: str, made: str) -> list[_Limit]:
        if not self.npu.adjust_hard_sigmoid:
            return []
        limits = self.limits
        return [
            _Limit("hard_sigmoid input", ((given, 1),), *limits.hard_sigmoid_input),
            _Limit("hard_sigmoid output", ((made, 1),), limits.hard_sigmoid_output, _ANY),
            _Limit("hard_sigmoid reach", ((made, 1), (given, -1)), -_ANY, limits.hard_sigmoid_reach),
        ]

    def _layer(self, site: _Site, output: str) -> list[_Limit]:
        assert site.weight is not None
        accumulator = ((site.weight, 1), (site.inputs[0], 1))
        cut = _Limit("shift_cut", (*accumulator, (output, -1)), *self.limits.cut)
        found = []
        if self.npu.adjust_shift_cut:
            if self._value(cut) < cut.low:
                # The accumulator's steps are coarser than the output's, whose finer bits would stay empty.
                cut = replace(cut, room=_YIELD)
            found.append(cut)
        if self.npu.adjust_shift_bias and site.bias is not None:
            allowed = self.limits.bias(self._value(cut), leaky=site.leaky)
            found.append(_Limit("shift_bias", (*accumulator, (site.bias, -1)), *allowed))
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


def _sites(graph: ir.Graph, plan: QuantPlan, npu: Npu) -> Iterator[_Site]:
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
        elif node.op_type == "HardSigmoid" or becomes_hard_sigmoid(node, plan, npu):
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
    if bias is not None and isinstance(plan.tensors[bias].source, Derived):
        bias = None  # its scale is the accumulator's own
    return _Site("layer", str(node.name), (names[0],), out, names[1], bias, leaky=leaky)


def _is_swish(node: ir.Node) -> bool:
    """x * gate(x): one input also feeds the HardSigmoid that makes the other."""
    for gate, source in ((0, 1), (1, 0)):
        value, other = node.inputs[gate], node.inputs[source]
        maker = value.producer() if value is not None else None
        if maker is not None and maker.op_type in ("HardSigmoid", "Sigmoid") and maker.inputs[0] is other:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Reach:
    """A layer's fixed positions.

    Attributes:
        input: position of its input.
        output: position of the tensor that holds its result.
        leaky: whether a LeakyRelu follows.
    """

    input: int
    output: int
    leaky: bool

    def cut(self, weight_scale: float) -> int:
        """Bits dropped from the accumulator."""
        return self.input + position(weight_scale) - self.output

    def allows_weight(self, scale: float) -> bool:
        """Whether the weight may have this scale."""
        low, high = XINT8_LIMITS.cut
        return low <= self.cut(scale) <= high

    def allows_bias(self, scale: float, weight_scale: float) -> bool:
        """Whether the bias may have this scale, given the weight's."""
        low, high = XINT8_LIMITS.bias(self.cut(weight_scale), leaky=self.leaky)
        return low <= self.input + position(weight_scale) - position(scale) <= high


def layer_reach(graph: ir.Graph, state: QuantState) -> dict[str, Reach]:
    """The reach of every layer between two stored tensors with one scale each, by node name."""
    found = {}
    for node in graph:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or node.inputs[0] is None:
            continue
        out = stored_output(node, state.plan.tensors)
        given, made = state.params.get(str(node.inputs[0].name)), state.params.get(out or "")
        if given is None or made is None or _several(given, made):
            continue
        reader = only_reader(node.outputs[0])
        leaky = reader is not None and reader.op_type == "LeakyRelu"
        found[str(node.name)] = Reach(position(float(given.scale)), position(float(made.scale)), leaky)
    return found


def _several(*params: QParams) -> bool:
    return any(p.scale.ndim for p in params)
