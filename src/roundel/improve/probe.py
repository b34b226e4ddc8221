"""How far a model's outputs are off, all of which count alike.

Boxes in pixels and scores between 0 and 1 differ in power by millions: summed up as they are, nobody would
notice what becomes of the scores. So each output counts relative to its own power, and so does each part of
one that a detection head has joined. An output that a Softmax makes counts by what that reads: of answers
that are nearly certain nothing else shows an error, and the verdict would hang on the few others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.model.edit import Names, add_constant
from roundel.model.graph import attribute_int, constant_array, is_op, opset_version, rank, values_by_name
from roundel.model.session import Lanes, elements, open_session
from roundel.numerics.affine import dequantize
from roundel.numerics.metrics import Closeness, comparable
from roundel.numerics.packed import Packed
from roundel.plan.build import WeightLayer
from roundel.plan.float_parts import joined_outputs, paired_parts
from roundel.qdq import simulate, write_qdq
from roundel.qdq.half_up import round_half_up
from roundel.qdq.nodes import MICROSOFT, Chain, Dialect
from roundel.qdq.write import weight_codes
from roundel.recipe.settings import Recipe
from roundel.state import State
from roundel.targets.operators import is_operand
from roundel.types import QParams, Sample

Errors = Mapping[str, Closeness]
_LOGITS = "_logits"
_FLOOR = -60.0  # below the largest logarithm; float32 holds some more
_LEAST = 1e-37
_USUAL_DEPTH = 100  # elements in all activations for each one of the input


def run_size(graph: ir.Graph, sample: Sample) -> int:
    """What a run takes: elements of the input, or of one that would be usual for so many in between."""
    between = sum(elements(value) for node in graph for value in node.outputs)
    return max(1, sum(array.size for array in sample.values()), between // _USUAL_DEPTH)


def simulated(model: ir.Model, state: State, recipe: Recipe) -> ir.Model:
    """The model as a state quantizes it, with the NPU's arithmetic where the recipe has it."""
    return _as_computed(write_qdq(model, state, recipe), state, recipe)


def _as_computed(written: ir.Model, state: State, recipe: Recipe) -> ir.Model:
    simulate(written, state, recipe.npu)
    if recipe.npu.halves_up:
        round_half_up(written)
    return written


def judged(model: ir.Model, state: State, recipe: Recipe) -> ir.Model:
    """The same, with the outputs that `OutputErrors` asks for."""
    written = write_qdq(model, state, recipe)
    let_out_logits(written.graph, model.graph)
    return _as_computed(written, state, recipe)


def session_of(model: ir.Model, state: State, recipe: Recipe) -> ort.InferenceSession:
    """The same, ready to run."""
    return open_session(judged(model, state, recipe), simulate=True)


class Judged:
    """A quantized model that is ready to be compared with the float one.

    Args:
        model: with the outputs that `OutputErrors` asks for.
        plain: the float model.
        samples: how many there will be.
    """

    def __init__(self, model: ir.Model, plain: ir.Model, samples: int) -> None:
        self._lanes, self._errors = Lanes.of(plain, samples), OutputErrors(plain.graph)
        self._session = open_session(model, threads=self._lanes.threads, simulate=True)

    def error(self, samples: Iterable[Sample], outputs: Iterable[Sample]) -> Closeness:
        """At the outputs, over all samples; `outputs` are the float model's own."""
        return together(self.errors(samples, outputs))

    def errors(self, samples: Iterable[Sample], outputs: Iterable[Sample]) -> Iterator[Errors]:
        """The same sample by sample, output by output."""

        def one(pair: tuple[Sample, Sample]) -> Errors:
            return self._errors.of(pair[1], self._session.run(self._errors.names, pair[0]))

        return self._lanes.each(one, zip(samples, outputs, strict=True))


def _distributions(graph: ir.Graph) -> dict[str, str]:
    """The outputs that a Softmax over the last axis makes, each with that node's name."""
    found = {}
    for value in graph.outputs:
        node, dims = value.producer(), rank(value) or 1
        if node is not None and is_op(node, "Softmax") and attribute_int(node, "axis", -1) % dims == dims - 1:
            found[str(value.name)] = str(node.name)
    return found


def let_out_logits(graph: ir.Graph, plain: ir.Graph) -> None:
    """Add an output for each Softmax that makes one: what it reads, in a copy of the plain graph."""
    nodes = {str(node.name): node for node in graph if is_op(node, "Softmax")}
    for output, name in _distributions(plain).items():
        read = nodes[name].inputs[0]
        assert read is not None
        value = ir.Value(name=output + _LOGITS, shape=read.shape, type=ir.TensorType(ir.DataType.FLOAT))
        graph.insert_before(nodes[name], ir.Node("", "Identity", [read], outputs=[value], name=value.name))
        graph.outputs.append(value)


def _levels(logarithms: NDArray[Any]) -> NDArray[Any]:
    """What a Softmax tells apart: logarithms down to a floor, less their mean."""
    held = np.maximum(logarithms - logarithms.max(-1, keepdims=True), _FLOOR)
    return np.asarray(held - held.mean(-1, keepdims=True))


class OutputErrors:
    """The errors of one model's outputs.

    Attributes:
        outputs: the float model's.
        names: what is compared with them: the same, or what the Softmax behind reads (`let_out_logits`).
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.outputs = [str(value.name) for value in graph.outputs]
        self._distributions = _distributions(graph)
        self.names = [name + _LOGITS if name in self._distributions else name for name in self.outputs]
        self._joints = joined_outputs(graph)

    def of(self, wanted: Mapping[str, NDArray[Any]], given: Sequence[NDArray[Any]]) -> Errors:
        """For one sample, by output and part; what is not float, infinite or of another shape is left out."""
        found = {}
        for name, value in zip(self.outputs, given, strict=True):
            if comparable(wanted.get(name), value):
                if name in self._distributions:
                    found[name] = Closeness.of(_levels(np.log(wanted[name] + _LEAST)), _levels(value))
                    continue
                for part, whole, other in paired_parts(name, wanted[name], value, self._joints):
                    found[part] = Closeness.of(whole, other)
        return found


def together(errors: Iterable[Errors]) -> Closeness:
    """Over all samples; of several parts the sum of their noise, each relative to its power."""
    total: dict[str, Closeness] = {}
    for some in errors:
        for key, close in some.items():
            total[key] = total.get(key, Closeness()).merge(close)
    if len(total) == 1:
        return next(iter(total.values()))
    shares = [close.noise / close.signal for close in total.values() if close.signal > 0]
    return Closeness(signal=float(len(shares)), noise=float(sum(shares)), count=len(shares))


class QuantizerProbe:
    """The float model with a switch at each quantizer, in one session: with all of them on, it is quantized.

    Building one for each quantizer would take longer than running it.

    Args:
        model: the prepared float model.
        state: says how each tensor is stored.
        groups: tensors, all stored in integers, that are switched together; those of one group that are not
            constants have one scale. A group is called by its first tensor.
        recipe: the domain of Q/DQ nodes.
        samples, outputs: inputs, and the float model's own outputs for them.
        lanes: samples that run at once; as many as the machine has room for where this is not said.

    Attributes:
        samples: how many.
        size: of one run (`run_size`).
    """

    def __init__(
        self,
        model: ir.Model,
        state: State,
        groups: Sequence[Sequence[str]],
        recipe: Recipe,
        samples: Sequence[Sample],
        outputs: Sequence[Sample],
        *,
        lanes: Lanes | None = None,
    ) -> None:
        self._samples, self._wanted = samples, outputs
        self._lanes = lanes or Lanes.of(model, len(samples))
        self.samples, self.size = len(samples), run_size(model.graph, samples[0])
        self._errors = OutputErrors(model.graph)
        let_out_logits((copy := model.clone()).graph, model.graph)
        wired = _Wiring(copy, state, recipe)
        self._switches = {names[0]: wired.group(names) for names in groups}
        self._off: dict[str, NDArray[Any]] = {}
        for name, (switch, scale) in self._switches.items():
            self._off[switch] = np.asarray(False)
            if scale is not None:
                self._off[scale] = np.asarray(state.params[name].scale)
        # An output that is quantized comes from its switch, under another name.
        made = [str(value.name) for value in wired.model.graph.outputs]
        asked = zip(self._errors.names, self._errors.outputs, made, strict=False)
        self._names = [now if name == plain else name for name, plain, now in asked]
        self._session = open_session(wired.model, threads=self._lanes.threads, simulate=True)

    def error(self, scales: Mapping[str, NDArray[np.float32] | None], count: int) -> Closeness:
        """What quantizing some groups does to the outputs of the first `count` samples.

        Args:
            scales: the groups with their scales; None for the one that the state has.
            count: samples.
        """
        feeds = dict(self._off)
        for group, given in scales.items():
            switch, scale = self._switches[group]
            feeds[switch] = np.asarray(True)
            if scale is not None and given is not None:
                feeds[scale] = np.asarray(given, np.float32)

        def one(index: int) -> Errors:
            given = self._session.run(self._names, {**feeds, **self._samples[index]})
            return self._errors.of(self._wanted[index], given)

        return together(self._lanes.each(one, range(min(count, len(self._samples)))))


class _Wiring:
    """Puts an If around each quantizer: only the branch that is taken costs time."""

    def __init__(self, model: ir.Model, state: State, recipe: Recipe) -> None:
        self.model, self.state = model, state
        self._values = values_by_name(model.graph)
        self._names = Names(model.graph)
        self._dialect = Dialect.of(recipe, opset_version(model))

    def group(self, tensors: Sequence[str]) -> tuple[str, str | None]:
        """Names of the inputs that switch the tensors and that give the scale of those that are computed."""
        switch, scale = self._input(f"{tensors[0]}_switch", ir.DataType.BOOL), None
        for name in tensors:
            array = constant_array(self._values[name])
            if array is not None:
                self._constant(name, switch, array)
                continue
            scale = scale or self._input(f"{tensors[0]}_step", ir.DataType.FLOAT)
            self._tensor(name, switch, scale)
        return str(switch.name), None if scale is None else str(scale.name)

    def _input(self, name: str, dtype: ir.DataType) -> ir.Value:
        value = ir.Value(name=self._names(name), shape=ir.Shape(()), type=ir.TensorType(dtype))
        self.model.graph.inputs.append(value)
        return value

    def _tensor(self, name: str, switch: ir.Value, scale: ir.Value) -> None:
        graph, value = self.model.graph, self._values[name]
        params = self.state.params[name]
        zero = add_constant(graph, self._names(f"{name}_zero"), np.asarray(params.zero_point))
        uses = [use for use in value.uses() if use.node.graph is graph]
        out = self._either(name, switch, value, self._stored(name, value, (scale, zero), params))
        for use in uses:
            use.node.replace_input_with(use.idx, out)
        for index, old in enumerate(graph.outputs):
            if old is value:
                graph.outputs[index] = out

    def _constant(self, name: str, switch: ir.Value, array: NDArray[Any]) -> None:
        """Only nodes that read the stored constant in the quantized model read it here."""
        value, tensor = self._values[name], self.state.plan.tensors[name]
        read = dequantize(weight_codes(array, tensor, self.state), self.state.params[name])
        rounded = add_constant(self.model.graph, self._names(f"{name}_rounded"), read)
        uses = [
            use for use in value.uses() if self._quantized(use.node) and is_operand(use.node.op_type, use.idx)
        ]
        out = self._either(name, switch, value, self._same(f"{name}_on", rounded))
        for use in uses:
            use.node.replace_input_with(use.idx, out)

    def _quantized(self, node: ir.Node) -> bool:
        verdict = self.state.plan.nodes.get(str(node.name))
        return node.graph is self.model.graph and verdict is not None and verdict.quantized

    def _either(self, name: str, switch: ir.Value, value: ir.Value, on: ir.Graph) -> ir.Value:
        """What the branch gives when the switch is on, else the value itself."""
        graph = self.model.graph
        out = ir.Value(name=self._names(f"{name}_switched"), shape=value.shape, type=value.type)
        branches = [
            ir.AttrGraph("then_branch", on),
            ir.AttrGraph("else_branch", self._same(f"{name}_off", value)),
        ]
        node = ir.Node("", "If", [switch], branches, outputs=[out], name=self._names(f"{name}_if"))
        producer = value.producer()
        if producer is None:
            graph.insert_before(graph[0], node)
        else:
            graph.insert_after(producer, node)
        return out

    def _stored(
        self, name: str, value: ir.Value, constants: tuple[ir.Value, ir.Value], params: QParams
    ) -> ir.Graph:
        domain = self._dialect.domain(params.qtype)
        if domain == MICROSOFT:
            self.model.graph.opset_imports.setdefault(MICROSOFT, 1)
        chain = Chain(value, self._names, name)
        chain.pair(domain, constants, params)
        return ir.Graph([], [chain.value], nodes=chain.nodes, name=self._names(f"{name}_on"))

    def _same(self, name: str, value: ir.Value) -> ir.Graph:
        out = ir.Value(name=self._names(f"{name}_same"), shape=value.shape, type=value.type)
        node = ir.Node("", "Identity", [value], outputs=[out], name=self._names(f"{name}_id"))
        return ir.Graph([], [out], nodes=[node], name=self._names(name))


class Carried:
    """A copy of the float model whose layers read weights of their own, float until packed ones come.

    Packed weights are restored each time they are read: they stay small in memory.

    Args:
        model: the prepared float model.
        layers: those whose weights will be packed.
    """

    def __init__(self, model: ir.Model, layers: Sequence[WeightLayer]) -> None:
        self.model = model.clone()
        graph, names = self.model.graph, Names(self.model.graph)
        nodes = {str(node.name): node for node in graph}
        self._values: dict[tuple[str, bool], ir.Value] = {}
        for layer in layers:
            node = nodes[layer.node]
            old = node.inputs[1]
            assert old is not None
            if layer.key not in self._values:
                name = names(f"{layer.weight}_carried")
                value = ir.Value(name=name, shape=old.shape, type=old.type, const_value=old.const_value)
                graph.register_initializer(value)
                self._values[layer.key] = value
            node.replace_input_with(1, self._values[layer.key])
            if not old.uses() and not old.is_graph_output():
                del graph.initializers[layer.weight]

    def take(self, layer: WeightLayer, stored: Packed) -> None:
        """From now on, compute this layer, and all with the same key, with a packed weight."""
        value = self._values[layer.key]
        assert value.shape is not None
        value.const_value = ir.LazyTensor(
            lambda: ir.tensor(layer.tensor(stored.restored())),
            dtype=ir.DataType.FLOAT,
            shape=value.shape,
            name=value.name,
        )
