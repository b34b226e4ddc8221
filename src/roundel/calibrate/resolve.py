"""From statistics to scales: every tensor of the plan gets its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate import ranges
from roundel.calibrate.observers import Observer, StatKind
from roundel.model.graph import attribute_float, constant_array, op_key
from roundel.numerics.affine import bias_params, params_from_range, round_scale
from roundel.numerics.floats import held, overflows, scale_to_range
from roundel.numerics.scales import ReaderFunction
from roundel.plan.adjust import with_own_scales
from roundel.plan.types import Derived, Fixed, QuantPlan, Role, Shared, TensorPlan
from roundel.recipe.settings import Recipe, Weights
from roundel.state import State
from roundel.targets.operators import OPERATORS
from roundel.types import Array, Doubles, FloatScheme, QParams, QType, Range, ScaleKind, Scheme

_INT32_ROOM = 2.0**31 - 2**8  # float32 scales round: stay clear of the very edge
_TINY = float(np.finfo(np.float32).tiny)
_FINER = 4  # bits by which a bias is finer than the codes that it ends in
_SENSIBLE = (2.0**-96, 2.0**96)  # for a scale: its product with another is still a float32


def method_of(recipe: Recipe) -> ranges.Method:
    """The recipe's words as a method."""
    calibration = recipe.calibration
    power_of_two = recipe.activations.scale == "power_of_two"
    match calibration.method:
        case "minmax" if power_of_two:
            return ranges.NonOverflow()
        case "minmax":
            return ranges.MinMax(calibration.moving_average)
        case "percentile":
            return ranges.Percentile(calibration.percentile, calibration.symmetric_range)
        case "entropy":
            return ranges.Entropy(calibration.symmetric_range)
        case "distribution":
            return ranges.Distribution(calibration.scenario)
        case "layerwise_percentile":
            tried, metric = calibration.candidates, calibration.metric
            return ranges.LayerWisePercentile(tried, metric, calibration.symmetric_range)
        case "mse" if power_of_two and calibration.mode == "percentile":
            return ranges.PowerOfTwoMse(calibration.percentile)
        case "mse" if power_of_two and calibration.mode == "most_common":
            return ranges.MostCommonPowerOfTwo()
        case "mse":
            return ranges.Mse()


def weight_method(weights: Weights) -> ranges.Method:
    """How constants get their scales."""
    if weights.method == "mse":
        return ranges.Mse()
    return ranges.NonOverflow() if weights.scale == "power_of_two" else ranges.MinMax()


def requests_for(plan: QuantPlan, recipe: Recipe) -> dict[str, StatKind]:
    """The statistics that must be collected for this plan."""
    return dict.fromkeys(plan.observed_activations(), method_of(recipe).needs)


def resolve(state: State) -> State:
    """Scales and zero points for the whole plan, from what was seen of `plan.observed_activations()`."""
    graph, stats = state.model.graph, state.stats
    readers = reader_functions(graph) if state.recipe.errors_behind_reader else {}
    aligned = _Resolver(state, state.plan, readers)
    plan, reads = with_own_scales(graph, state.plan, aligned.scale_of, stats)
    resolver = _Resolver(state, plan, readers)
    for tensor in plan.tensors.values():
        if isinstance(tensor.scheme, FloatScheme):
            resolver.short_float(tensor, tensor.scheme)
        elif isinstance(tensor.scheme, Scheme) and not isinstance(tensor.source, Derived):
            resolver.params[tensor.name] = resolver.independent(tensor)
    for tensor in plan.tensors.values():
        if isinstance(tensor.source, Derived):
            resolver.bias(tensor)
    kept = replace(plan, tensors=resolver.plans)
    done = replace(state, plan=kept, params=resolver.params, float_scales=resolver.scales)
    return replace(done, values=resolver.values, codes={}, reads=reads).noted(*resolver.notes)


class _Resolver:
    def __init__(self, state: State, plan: QuantPlan, readers: Mapping[str, ReaderFunction]) -> None:
        self.graph, self.stats, self.recipe = state.model.graph, state.stats, state.recipe
        self.plan, self._readers = plan, readers
        self.plans = dict(plan.tensors)
        self.params: dict[str, QParams] = {}
        self.scales: dict[str, NDArray[np.float32]] = {}
        self.values: dict[str, Array] = {}
        self.notes: list[str] = []
        self._method = method_of(state.recipe)
        self._groups: dict[tuple[str, ...], QParams] = {}
        self._known = state.known

    def scale_of(self, tensor: TensorPlan) -> QParams:
        """What the tensor would get with this plan, which need not be the whole plan's."""
        leaders = tensor.source.leaders if isinstance(tensor.source, Shared) else (tensor.name,)
        return self._group(leaders, tensor)

    def independent(self, tensor: TensorPlan) -> QParams:
        """Everything in integers but a derived bias."""
        if isinstance(tensor.source, Fixed):
            return _fixed(tensor.source.range, tensor)
        if tensor.role is not Role.ACTIVATION and not isinstance(tensor.source, Shared):
            return self._weight(tensor)
        leaders = self.plan.leaders(tensor.name)
        if leaders not in self._groups:
            self._groups[leaders] = self._group(leaders, tensor)
        return self._groups[leaders]

    def _weight(self, tensor: TensorPlan) -> QParams:
        """Remembered for the run: while steps are tried, one model is resolved several times."""
        constant = self.graph.initializers[tensor.name].const_value
        assert constant is not None
        key = (id(constant), self.recipe.weights.method, self.recipe.weights.scale, tensor.integer)
        if key not in self._known:
            method = weight_method(self.recipe.weights)
            params = ranges.choose_weight(method, self.array(tensor.name), tensor.integer)
            self._known[key] = (constant, params)  # as long as it lives, nothing else has its id
        return self._known[key][1]

    def short_float(self, tensor: TensorPlan, scheme: FloatScheme) -> None:
        """A scale where one is wanted; a constant beyond the type's range is brought to its end."""
        if scheme.scaled:
            self.scales[tensor.name] = scale_to_range(self._largest(tensor), scheme.ftype)
        elif tensor.role is not Role.ACTIVATION and overflows(self.array(tensor.name), scheme.ftype):
            self.values[tensor.name] = held(self.array(tensor.name), scheme.ftype)
            self.notes.append(f"'{tensor.name}' exceeds {scheme.ftype.value}: clipped to its largest value")

    def _largest(self, tensor: TensorPlan) -> float:
        if tensor.role is not Role.ACTIVATION:
            return self._magnitude(tensor.name)
        if isinstance(tensor.source, Fixed):
            return tensor.source.range.absmax
        return max(self._led(name) for name in self.plan.leaders(tensor.name))

    def _led(self, name: str) -> float:
        """Of one leader of a group."""
        led = self.plan.tensors.get(name)
        if led is not None and (led.role is not Role.ACTIVATION or isinstance(led.source, Fixed)):
            return self._largest(led)
        return ranges.choose_range(self._method, self.stats[name]).absmax

    def _magnitude(self, name: str) -> float:
        """Of a constant's largest number."""
        return float(np.abs(self.array(name)).max(initial=0.0))

    def array(self, name: str) -> Array:
        """A constant's content."""
        array = constant_array(self.graph.initializers[name])
        assert array is not None
        return array

    def _group(self, leaders: tuple[str, ...], tensor: TensorPlan) -> QParams:
        """One scale for a group: from the leaders' merged statistics, widened by their fixed ranges."""
        fixed: list[Range] = []
        observed: list[str] = []
        for name in leaders:
            led = self.plan.tensors.get(name)
            if led is not None and isinstance(led.source, Fixed):
                fixed.append(led.source.range)
            elif led is not None and led.role is not Role.ACTIVATION:
                if len(leaders) == 1:
                    return self.independent(led)
                content = self.array(name)
                fixed.append(Range(float(content.min()), float(content.max())))
            else:
                observed.append(name)
        if not fixed and tensor.integer.scale is ScaleKind.POWER_OF_TWO:
            # Tied by the NPU's alignment: each member's own best scale, and the largest of them for all.
            # A tensor that was zero throughout has no wish of its own.
            alive = [n for n in observed if not self._silent([n])] or observed
            each = [self._chosen([name], tensor) for name in alive]
            return max(each, key=lambda params: float(params.scale))
        if not fixed:
            return self._chosen(observed, tensor)
        whole = fixed[0]
        for more in fixed[1:]:
            whole = whole.union(more)
        for name in observed:
            whole = whole.union(Range(self.stats[name].low, self.stats[name].high))
        return _fixed(whole, tensor)

    def _silent(self, names: list[str]) -> bool:
        """Whether the data showed nothing but zeros."""
        return not any(self.stats[name].low or self.stats[name].high for name in names)

    def _unseen(self, tensor: TensorPlan) -> float:
        """A scale for a tensor that was zero throughout, from the biases of the layers that read it.

        Such a layer's output is its bias, whose steps are input scale x weight scale: they must be finer than
        the output's codes by some bits. 1 where there is no such bias.
        """
        leaders, wanted = self.plan.leaders(tensor.name), []
        for node in self.graph:
            first = (*node.inputs[:3], None, None, None)[:3]
            data, weight, bias = (self.plan.tensors.get(str(v.name)) if v else None for v in first)
            if data is None or weight is None or bias is None or bias.role is not Role.BIAS:
                continue
            if not isinstance(weight.scheme, Scheme):
                continue
            largest = self._magnitude(bias.name)
            if largest > 0 and self.plan.leaders(data.name) == leaders:
                bits = tensor.integer.qtype.bits + _FINER
                if isinstance(bias.scheme, Scheme) and bias.scheme.qtype is QType.INT16:
                    bits = min(bits, bias.scheme.qtype.bits - 2)
                wanted.append(largest / float(self.independent(weight).scale.max()) / 2.0**bits)
        return float(np.clip(min(wanted, default=1.0), *_SENSIBLE))

    def _chosen(self, names: list[str], tensor: TensorPlan) -> QParams:
        """By the recipe's method, with its margin for values that the data did not show."""
        reader = self._readers.get(names[0]) if len(names) == 1 else None
        params = ranges.choose(self._method, self._merged(names), tensor.integer, reader)
        if self._silent(names):
            return replace(params, scale=round_scale(self._unseen(tensor), tensor.integer.scale))
        margin = self.recipe.calibration.margin
        if margin == 1:
            return params
        return replace(params, scale=round_scale(params.scale * margin, tensor.integer.scale))

    def _merged(self, names: list[str]) -> Observer:
        if len(names) == 1:
            return self.stats[names[0]]
        merged = type(self.stats[names[0]])()
        for name in names:
            merged.merge(self.stats[name])
        return merged

    def bias(self, tensor: TensorPlan) -> None:
        """Scale of a bias; where its codes would overflow, the weight's scale makes room."""
        source = tensor.source
        assert isinstance(source, Derived)
        if source.input not in self.params or source.weight not in self.params:
            del self.plans[tensor.name]  # an override took one of them back to float
            return
        content = np.abs(self.array(tensor.name).astype(np.float64))
        params = self._derived(source)
        limit = 32767.0 if tensor.integer.qtype is QType.INT16 else _INT32_ROOM
        excess = _excess(content, params, limit)
        if tensor.integer.qtype is QType.INT16:
            if (excess > 1).any():
                self.notes.append(f"bias '{tensor.name}' does not fit 16 bits: kept in 32")
                self.plans[tensor.name] = replace(tensor, scheme=replace(tensor.integer, qtype=QType.INT32))
            else:
                zero = params.zero_point.astype(np.int16)
                params = replace(params, zero_point=zero, qtype=QType.INT16)
        elif (excess > 1).any():
            self._widen(source, excess)
            self.notes.append(f"bias '{tensor.name}' would overflow 32 bits: widened its weight's scale")
            params = self._derived(source)
        self.params[tensor.name] = params

    def _derived(self, source: Derived) -> QParams:
        params = bias_params(self.params[source.input].scale, self.params[source.weight], source.factor)
        if source.repeats > 1 and params.scale.ndim:
            scale, zero = (np.tile(a, source.repeats) for a in (params.scale, params.zero_point))
            params = replace(params, scale=scale, zero_point=zero)
        return params

    def _widen(self, source: Derived, excess: Doubles) -> None:
        weight = self.params[source.weight]
        if weight.scale.ndim:
            factor = excess.reshape(source.repeats, -1).max(0) if source.repeats > 1 else excess
        else:
            factor = excess.max()
        wider = weight.scale.astype(np.float64) * np.maximum(factor, 1.0)
        self.params[source.weight] = replace(weight, scale=np.asarray(wider, np.float32))


def _excess(content: Doubles, params: QParams, limit: float) -> Doubles:
    """How many times too large the codes would be; one number for each scale."""
    scale = np.abs(params.scale.astype(np.float64))
    needed = (content if scale.ndim else np.asarray(content.max(initial=0.0))) / limit
    floor = np.where(needed > 0, np.maximum(needed, _TINY), 0.0)
    return np.asarray(floor / np.maximum(scale, 5e-324))


def _fixed(range_: Range, tensor: TensorPlan) -> QParams:
    return params_from_range(range_.low, range_.high, tensor.integer)


def reader_functions(graph: ir.Graph) -> dict[str, ReaderFunction]:
    """For each tensor that only such a function reads, the function."""
    found = {}
    for node in graph:
        row = OPERATORS.get(op_key(node))
        value = None if row is None or row.function is None else node.inputs[0]
        if row is None or row.function is None or value is None or value.is_graph_output():
            continue
        given = {name: attribute_float(node, name, usual) for name, usual in row.attributes.items()}
        function: ReaderFunction = partial(row.function, **given)
        others = [use.node for use in value.uses() if use.node is not node]
        if not others:
            found[str(value.name)] = function
        elif len(others) == 1 and _gates(node, others[0], value):
            found[str(value.name)] = partial(_gated, function)
    return found


def _gates(node: ir.Node, product: ir.Node, value: ir.Value) -> bool:
    """Whether the product of the value and what the node makes of it is all that is seen of either."""
    made = node.outputs[0]
    alone = not made.is_graph_output() and [use.node for use in made.uses()] == [product]
    return alone and op_key(product) == "Mul" and set(product.inputs) == {value, made}


def _gated(gate: ReaderFunction, x: Doubles) -> Doubles:
    return x * gate(x)
