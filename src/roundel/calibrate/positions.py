"""How far a layer's scales may still move without leaving the NPU's shift limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.errors import RecipeError, VerifyError
from roundel.model.graph import only_reader, op_key
from roundel.numerics.affine import bias_params
from roundel.numerics.scales import largest_exponent
from roundel.plan.adjust import becomes_hard_sigmoid, stored_input, stored_output
from roundel.plan.types import Derived, Observed, QuantPlan
from roundel.recipe.settings import Npu
from roundel.state import State
from roundel.targets.operators import BIASED_LAYERS
from roundel.targets.shifts import FAMILIES, XINT8_LIMITS, Breach, Limit, Site, family
from roundel.types import QParams, QType

_MOST_ROUNDS = 500
_HIGHEST = 126  # position of the smallest normal float32 scale
_LOWEST = -largest_exponent(QType.INT8)
_YIELD = 4  # bits that a layer's output gives up before its weights saturate
_GATE_SCALE = 2.0**-5  # holds 3.97: a HardSigmoid is 0 or 1 from 3 on


def position(scale: float) -> int:
    """-log2 of a power-of-two scale."""
    return int(-(np.frexp(np.float64(scale))[1] - 1))


def refine(model: ir.Model, state: State, npu: Npu) -> State:
    """Move positions until every limit that the recipe asks for holds.

    Raises:
        VerifyError: two limits contradict each other; the message names them.
    """
    if not npu.limits:
        return state
    state = replace(state, reads={**state.reads, **_own_reads(model.graph, state, npu)})
    solver = _Solver(model.graph, state, npu)
    moved = solver.solve()
    params = dict(state.params)
    for name in params:
        key = solver.key(name)
        if key in moved:
            params[name] = replace(params[name], scale=solver.scale(key))
    for name, tensor in state.plan.tensors.items():
        source = tensor.source
        if isinstance(source, Derived):
            derived = bias_params(params[source.input].scale, params[source.weight], source.factor)
            params[name] = replace(params[name], scale=derived.scale)
    reads = dict(state.reads)
    for read in state.reads:
        own, key = state.read_params(*read), _read_key(*read)
        if own is not None and key in moved:
            reads[read] = replace(own, scale=solver.scale(key))
    notes = tuple(f"position of '{k}' moved from {old} to {solver.positions[k]}" for k, old in moved.items())
    return replace(state, params=params, reads=reads, notes=(*state.notes, *notes))


def _read_key(tensor: str, node: str) -> str:
    """The variable for a tensor that a node reads in a scale of its own."""
    return f"{tensor} as {node} reads it"


def _own_reads(graph: ir.Graph, state: State, npu: Npu) -> dict[tuple[str, str], QParams]:
    """The tensors that a HardSigmoid cannot take as others need them, in a scale for it alone.

    Its input may reach no further than 127. It needs no more than 3, where it ends; what else reads the
    tensor, as the product of a SiLU does, would be cut off.
    """
    found = {}
    limit = XINT8_LIMITS.hard_sigmoid_input[0]
    readers = Counter(str(v.name) for node in graph for v in node.inputs if v is not None)
    readers.update(str(value.name) for value in graph.outputs)
    for site in planned_sites(graph, state.plan, npu):
        given = site.inputs[0]
        params = state.params[given]
        coarse = position(float(params.scale.max())) < limit
        shared = readers[given] > 1 or state.plan.tensors[given].source != Observed()
        if npu.adjust_hard_sigmoid and site.kind == "hard_sigmoid" and coarse and shared:
            found[given, site.node] = replace(params, scale=np.asarray(_GATE_SCALE, np.float32))
    return found


def breaches(graph: ir.Graph, state: State, npu: Npu) -> tuple[Breach, ...]:
    """Every limit that does not hold."""
    return tuple(_Solver(graph, state, npu).breaches())


def asked_for(npu: Npu) -> frozenset[str]:
    """The families of limits that the recipe asks for."""
    return frozenset(name for name in FAMILIES if getattr(npu, f"adjust_{name}"))


class _Solver:
    def __init__(self, graph: ir.Graph, state: State, npu: Npu) -> None:
        self.asked, self.plan = asked_for(npu), state.plan
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
        self.sites = tuple(self._as_read(site, state) for site in planned_sites(graph, state.plan, npu))

    def _as_read(self, site: Site, state: State) -> Site:
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

    def scale(self, key: str) -> NDArray[np.float32]:
        """Of the tensors that share a variable."""
        return np.asarray(2.0 ** -self.positions[key], np.float32)

    def solve(self) -> dict[str, int]:
        """Sweep until nothing moves; returns the former positions of what moved."""
        for _ in range(_MOST_ROUNDS):
            if not sum(self._fix(site) for site in self.sites):
                break
        left = next(iter(self.breaches()), None)
        if left is not None:
            raise VerifyError(
                "No positions satisfy the NPU's shift limits.",
                where=f"{left.rule} at node '{left.node}'",
                observed=left.value,
                expected=f"{left.low} to {left.high}",
                hint=f"Keep the node in float with --exclude '{left.node}'.",
            )
        return {k: old for k, old in self.before.items() if self.positions[k] != old}

    def breaches(self) -> Iterator[Breach]:
        """Limits that do not hold at the current positions."""
        for site in self.sites:
            yield from XINT8_LIMITS.breaches(site, self._p, self.asked)

    def _limits(self, site: Site) -> list[Limit]:
        return [limit for limit in XINT8_LIMITS.at(site, self._p) if family(limit) in self.asked]

    def _fix(self, site: Site) -> bool:
        """Repair each broken limit of a node in turn."""
        changed = False
        for index in range(len(self._limits(site))):
            # Read afresh: an earlier repair may have moved what this limit depends on.
            limit = self._limits(site)[index]
            value = limit.value(self._p)
            if not limit.low <= value <= limit.high:
                changed |= self._repair(limit, value)
        return changed

    def _repair(self, limit: Limit, value: int) -> bool:
        need = value - limit.high if value > limit.high else limit.low - value
        factors: dict[str, int] = {}
        for name, sign in limit.terms:
            factors[self.key(name)] = factors.get(self.key(name), 0) + sign
        if value < limit.low:
            factors = {key: -factor for key, factor in factors.items()}
        # Below a cut's range the accumulator's steps are coarser than the output's, whose finer bits would
        # stay empty.
        room = _YIELD if limit.rule == "shift_cut" and value < limit.low else _HIGHEST - _LOWEST
        # The sum is to fall: terms that count positively are lowered, then the others raised.
        asked = need
        for key, factor in factors.items():
            if factor > 0 and need > 0:
                floor = max(self.floors.get(key, self.before[key] - room), _LOWEST)
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

    def _p(self, name: str) -> int:
        return self.positions[self.key(name)]


Before = Callable[[ir.Value | None], str | None]
Behind = Callable[[ir.Node], str | None]


def find_sites(
    nodes: Iterable[ir.Node], before: Before, behind: Behind, gate: Callable[[ir.Node], bool]
) -> Iterator[Site]:
    """The nodes that shift.

    Args:
        nodes: those that the NPU computes.
        before: the stored tensor that a node reads by way of a value, or None.
        behind: the stored tensor that holds a node's result, or None.
        gate: whether a node is the NPU's HardSigmoid.
    """
    for node in nodes:
        op, out = op_key(node), behind(node)
        given = [before(value) for value in node.inputs]
        name = str(node.name)
        if out is None or not given or given[0] is None:
            continue
        if op in BIASED_LAYERS and given[1] is not None:
            bias = given[2] if len(given) > 2 else None
            reader = only_reader(node.outputs[0])
            leaky = reader is not None and op_key(reader) == "LeakyRelu"
            yield Site("layer", name, (given[0],), out, given[1], bias, leaky=leaky)
        elif op in ("Add", "Sub") and given[1] is not None:
            yield Site("add", name, (given[0], given[1]), out)
        elif op == "Mul" and given[1] is not None:
            yield Site("mul", name, (given[0], given[1]), out, swish=_is_swish(node))
        elif gate(node):
            yield Site("hard_sigmoid", name, (given[0],), out)


def planned_sites(graph: ir.Graph, plan: QuantPlan, npu: Npu) -> Iterator[Site]:
    """Those of a float graph that is to be quantized."""
    # A derived bias has the accumulator's own scale.
    own = {name for name, tensor in plan.tensors.items() if not isinstance(tensor.source, Derived)}
    nodes = [node for node in graph if (v := plan.nodes.get(str(node.name))) and v.quantized]
    return find_sites(
        nodes,
        lambda value: stored_input(value, own),
        lambda node: stored_output(node, plan.tensors),
        lambda node: op_key(node) == "HardSigmoid" or becomes_hard_sigmoid(node, plan, npu),
    )


def _is_swish(product: ir.Node) -> bool:
    """Whether one of its inputs also feeds a sigmoid: x * gate(x)."""
    others = (node for value in product.inputs if value is not None for node in value.consumers())
    return any(op_key(node) in ("HardSigmoid", "Sigmoid") for node in others if node is not product)


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """What the scales of a layer's constants may be while those of its input and output stay.

    Attributes:
        site: the layer.
        input: position of its input.
        output: position of what holds its result.
        asked: the families of limits that the recipe asks for.
    """

    site: Site
    input: int
    output: int
    asked: frozenset[str]

    def allows_weight(self, scale: float) -> bool:
        """Whether the weight may have this scale."""
        return self._hold({"shift_cut"}, position(scale), 0)

    def allows_bias(self, scale: float, weight_scale: float) -> bool:
        """Whether the bias may have this scale, given the weight's."""
        return self._hold({"shift_bias"}, position(weight_scale), position(scale))

    def _hold(self, families: set[str], weight: int, bias: int) -> bool:
        site = self.site
        known = {site.inputs[0]: self.input, site.output: self.output, site.weight: weight, site.bias: bias}
        return not any(XINT8_LIMITS.breaches(site, known.__getitem__, self.asked & families))


def layer_limits(graph: ir.Graph, state: State, npu: Npu) -> dict[str, LayerLimits]:
    """Those of every layer between two stored tensors with one scale each, by node name."""
    found, asked = {}, asked_for(npu)
    for site in planned_sites(graph, state.plan, npu):
        given, made = state.params.get(site.inputs[0]), state.params.get(site.output)
        if site.kind != "layer" or given is None or made is None or given.scale.ndim or made.scale.ndim:
            continue
        sides = position(float(given.scale)), position(float(made.scale))
        found[site.node] = LayerLimits(site, *sides, asked)
    return found
