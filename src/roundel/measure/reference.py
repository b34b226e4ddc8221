"""Which tensors of two models are the same, and the float graph that a quantized one is measured against."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.errors import ModelError
from roundel.heads import joined
from roundel.improve.channel_rules import Trace
from roundel.improve.channels import rescalable
from roundel.improve.equalize import equalize
from roundel.model import ModelSource
from roundel.model.graph import constant_array, is_constant, iter_values, only_reader, op_key, values_by_name
from roundel.model.session import open_session
from roundel.qdq import attach
from roundel.qdq.nodes import bare_name
from roundel.qdq.read import StoredTensors
from roundel.recipe.load import known_recipe, read_record
from roundel.recipe.settings import Prepare, Recipe
from roundel.stages import prepare
from roundel.targets.operators import FUSING_CONSUMERS as ACTIVATIONS
from roundel.types import Array, Doubles


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Partners, by the names of the quantized graph.

    Attributes:
        tensors: name in the quantized graph -> value of the float graph.
        nodes: name in the quantized graph -> node of the float graph.
        unmatched: computed float tensors of the quantized graph without a partner.
    """

    tensors: Mapping[str, ir.Value]
    nodes: Mapping[str, ir.Node]
    unmatched: tuple[str, ...]


def match(reference: ir.Model, stripped: ir.Model) -> Matches:
    """Find partners for the tensors and nodes of the quantized model.

    Args:
        reference: the float model.
        stripped: the quantized model without its Q/DQ pairs.

    Raises:
        ModelError: the models do not have the same inputs or outputs.
    """
    work = _Matcher(reference.graph, stripped.graph)
    work.ends()
    work.names()
    # Where a quantizer has taken a Relu's or a Clip's place, its tensor is the activation's output.
    for value in _computed(stripped.graph):
        work.absorb(value)
    work.structure()
    left = [str(v.name) for v in _computed(stripped.graph) if v.name not in work.partners]
    return Matches(work.partners, work.node_pairs(), tuple(left))


class _Matcher:
    def __init__(self, reference: ir.Graph, quantized: ir.Graph) -> None:
        self.reference, self.quantized = reference, quantized
        self.partners: dict[str, ir.Value] = {}
        self._taken: set[ir.Value] = set()

    def ends(self) -> None:
        """Graph inputs and outputs, by name where the names agree, else by position."""
        sides = (
            ("inputs", self.reference.inputs, self.quantized.inputs),
            ("outputs", self.reference.outputs, self.quantized.outputs),
        )
        for what, ours, theirs in sides:
            if len(ours) != len(theirs):
                float_names, names = (", ".join(str(v.name) for v in values) for values in (ours, theirs))
                raise ModelError(
                    f"The two models do not have the same {what}.",
                    observed=f"float: {float_names}; quantized: {names}",
                    expected="a quantized model that was made from this float model",
                )
            by_name = {bare_name(str(v.name)): v for v in ours}
            for position, value in enumerate(theirs):
                self._pair(by_name.get(bare_name(str(value.name)), ours[position]), value)

    def names(self) -> None:
        """Tensors of the same name."""
        ours = {bare_name(str(v.name)): v for v in _computed(self.reference)}
        for value in _computed(self.quantized):
            partner = ours.get(bare_name(str(value.name)))
            if partner is not None:
                self._pair(partner, value)

    def structure(self) -> None:
        """Renamed tensors: the same operator reads partners of the same tensors."""
        for node in self.quantized:
            if all(str(out.name) in self.partners or not is_real(out) for out in node.outputs):
                continue
            twins = sorted(self._twins(node), key=lambda twin: twin.name != node.name)
            if twins:
                for ours, theirs in zip(twins[0].outputs, node.outputs, strict=False):
                    self._pair(ours, theirs)
                    self.absorb(theirs)

    def node_pairs(self) -> dict[str, ir.Node]:
        """Nodes that make partners with the same operator."""
        pairs = {}
        for node in self.quantized:
            for out in node.outputs:
                ours = self.partners.get(str(out.name))
                maker = None if ours is None else ours.producer()
                if maker is not None and op_key(maker) in ACTIVATIONS and op_key(maker) != op_key(node):
                    source = maker.inputs[0]
                    maker = None if source is None else source.producer()
                if maker is not None and op_key(maker) == op_key(node):
                    pairs[str(node.name)] = maker
                    break
        return pairs

    def absorb(self, value: ir.Value) -> None:
        """Move a partner behind its activation, where the quantized graph has none there."""
        ours = self.partners.get(str(value.name))
        node = None if ours is None else only_reader(ours)
        if ours is None or node is None or op_key(node) not in ACTIVATIONS or node.inputs[0] is not ours:
            return
        kept = any(op_key(use.node) in ACTIVATIONS for use in value.uses())
        if not kept and node.outputs[0] not in self._taken:
            self._taken.remove(ours)
            self._taken.add(node.outputs[0])
            self.partners[str(value.name)] = node.outputs[0]

    def _twins(self, node: ir.Node) -> Iterator[ir.Node]:
        """Nodes of the float graph that could be this one."""
        data = [(i, v) for i, v in enumerate(node.inputs) if v is not None and not is_constant(v)]
        if not data or any(str(value.name) not in self.partners for _, value in data):
            return
        wanted = [(index, self.partners[str(value.name)]) for index, value in data]
        first_index, first = wanted[0]
        for use in first.uses():
            twin = use.node
            if use.idx != first_index or op_key(twin) != op_key(node) or twin.graph is not self.reference:
                continue
            same = all(index < len(twin.inputs) and twin.inputs[index] is value for index, value in wanted)
            if same and _weights(twin) == _weights(node) and self._taken.isdisjoint(twin.outputs):
                yield twin

    def _pair(self, ours: ir.Value, theirs: ir.Value) -> None:
        name = str(theirs.name)
        if name in self.partners or ours in self._taken or not (is_real(ours) and is_real(theirs)):
            return
        self.partners[name] = ours
        self._taken.add(ours)


def is_real(value: ir.Value) -> bool:
    """Whether the value may be a 32-bit float tensor: known to be one, or of unknown type."""
    return value.dtype in (None, ir.DataType.FLOAT)


def _weights(node: ir.Node) -> list[tuple[int, ...]]:
    """Shapes of the constants that the node reads."""
    arrays = (constant_array(value) for value in node.inputs)
    return [array.shape for array in arrays if array is not None]


def _computed(graph: ir.Graph) -> Iterator[ir.Value]:
    return (v for v in iter_values(graph) if not is_constant(v) and v.name and is_real(v))


def cut_to(model: ir.Model, outputs: Sequence[str], *, drop_inputs: Collection[str] = ()) -> ir.Model:
    """A copy with these outputs and nothing that they do not need; AMD's operators have their bodies.

    Args:
        model: it is not changed.
        outputs: tensors of the main graph.
        drop_inputs: graph inputs to leave out; none of the outputs may depend on them.
    """
    inputs = [value for value in model.graph.inputs if value.name not in drop_inputs]
    graph = ir.convenience.extract(model.graph, inputs, outputs)
    for value in graph.outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    return attach(ir.Model(graph, ir_version=model.ir_version))


def fixed_values(model: ir.Model, names: Sequence[str]) -> list[Array]:
    """What tensors that depend on no input come to: ONNX Runtime computes them."""
    inputs = {str(value.name) for value in model.graph.inputs}
    return list(open_session(cut_to(model, names, drop_inputs=inputs), simulate=True).run(names, {}))


Arrays = Mapping[tuple[str, int], Array]

_EXPLAINED = 0.1  # of a weight's power may be rounding; what was rescaled besides differs by more

# Only what every tool does: each pass less is a name of the float model more.
_FOREIGN_LACKS = (
    *("fuse_instance_norm", "fuse_layer_norm", "fuse_gelu", "fuse_l2_norm", "fold_pad"),
    *("decompose_hard_swish", "unshare_biases", "explicit_conv_attributes"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The float side of a comparison.

    Attributes:
        model: float, computing what the model as given computes.
        plain: constants by node and input index, before equalization.
        name: of the file it came from.
        file_bytes: size of that.
        explained: whether its weights are the quantized model's but for rounding, not rescaled any further.
    """

    model: ir.Model
    plain: Arrays
    name: str
    file_bytes: int | None
    explained: bool


def find_reference(
    source: ModelSource, quantized: ir.Model, stored: StoredTensors, file: Path | None
) -> Reference:
    """Prepare the float model as the quantized one was.

    Args:
        source: the float model as given.
        quantized: the quantized model, stripped of its Q/DQ pairs: its weights decide.
        stored: what the pairs held.
        file: where it was read from; the record beside it tells the recipe.
    """
    ours = quantized.producer_name == "roundel"
    recipe = known_recipe(read_record(file)) if ours else None
    if recipe is None:
        # Another tool's model: batch norms are folded where it has none left.
        kept = any(node.op_type == "BatchNormalization" for node in quantized.graph)
        foreign = {**dict.fromkeys(_FOREIGN_LACKS, False), "fold_batch_norm": not kept}
        recipe = Recipe() if ours else Recipe(prepare=Prepare.model_validate(foreign))
    ready = prepare(source, recipe)
    model = _with_tail(ready.model, ready.tail)
    plain, wanted = layer_constants(model), layer_constants(quantized)
    distances = _distances(plain, wanted)
    if ours and recipe.improve.equalize.enabled and recipe.mode == "static":
        rescaled = ready.model.clone()
        weights = [t for t in stored.tensors.values() if t.constant and t.dtype != "int32"]
        power_of_two = bool(weights) and all(t.power_of_two for t in weights)
        equalize(rescaled, recipe.improve.equalize, power_of_two=power_of_two)
        # Whether it was equalized, and as this version does it, shows in the weights.
        rescaled = _with_tail(rescaled, ready.tail)
        others = _distances(layer_constants(rescaled), wanted)
        if sum(others.values()) < sum(distances.values()):
            model, distances = rescaled, others
    layers = [key for key, array in wanted.items() if array.ndim > 1]
    explained = all(distances.get(key, 1.0) < _EXPLAINED for key in layers)
    return Reference(model, plain, ready.loaded.name, ready.loaded.file_bytes, explained)


def _with_tail(model: ir.Model, tail: ir.Model | None) -> ir.Model:
    return model if tail is None else joined(model, tail)


def layer_constants(model: ir.Model) -> dict[tuple[str, int], Array]:
    """Float constants that nodes read, by node name and input index."""
    found = {}
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            array = constant_array(value)
            if array is not None and array.dtype.kind == "f" and array.size:
                found[str(node.name), index] = array
    return found


def _distances(one: Arrays, other: Arrays) -> dict[tuple[str, int], float]:
    """Squared differences relative to the values, of each constant that both have."""
    found = {}
    for key, array in one.items():
        partner = other.get(key)
        if partner is not None and partner.shape == array.shape and array.size > 1:
            power = float(np.square(partner, dtype=np.float64).sum())
            gap = float(np.square(array - partner, dtype=np.float64).sum())
            found[key] = gap / power if power else 0.0
    return found


_FEWEST = 4  # weights in a row; fewer are fitted by chance
_GAIN_DB = 10.0  # rounding alone gains less than 2 dB from one factor for each row
_GOOD_DB = 15.0
_BY_ROW, _BY_COLUMN = (2, 3), (1, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What the channels of a float tensor are multiplied by.

    Attributes:
        axis: of the channels.
        values: one for each channel.
    """

    axis: int
    values: NDArray[np.float32]

    def apply(self, array: Array) -> Array:
        """The tensor as the quantized model has it."""
        shape = [1] * array.ndim
        shape[self.axis] = -1
        return np.asarray(array * self.values.reshape(shape))

    def undo(self, array: Array) -> Array:
        """The inverse of `apply`."""
        inverse = 1 / np.where(self.values == 0, 1, self.values)
        return Factors(self.axis, inverse.astype(np.float32)).apply(array)


def find_factors(
    stripped: ir.Model, matches: Matches
) -> tuple[dict[str, Factors], dict[str, tuple[Doubles, Doubles]]]:
    """Factors of tensors and layers of the float graph.

    The quantized graph is the one that was equalized: where its tool has put a Relu in place of a Clip,
    channels are free that the float graph would hold.

    Args:
        stripped: the quantized model without Q/DQ pairs, shapes known: its weights are the stored ones.
        matches: partners of its tensors and nodes.

    Returns:
        Factors by tensor name; and (rows, columns) by node name, for layers that were rescaled.
    """
    trace = Trace(stripped.graph, absorb=False)
    settled = trace.channels.settle()
    factors, known = np.ones(len(settled.roots)), settled.fixed.copy()
    layers: dict[str, tuple[Doubles, Doubles]] = {}
    tensors: dict[str, Factors] = {}
    for rescaled, (given, made) in zip(trace.layers, trace.sides, strict=True):
        node = matches.nodes.get(str(rescaled.layer.node.name))
        plain = None if node is None else rescalable(node)
        if node is None or plain is None or plain.weight.shape != rescaled.weight.shape:
            continue
        if given is not None:
            columns = factors[settled.roots[given]]
        else:  # behind a norm, which may have taken the factors: smoothing
            columns = 1 / _fit(plain.weight, rescaled.weight, _BY_COLUMN)
            source = matches.tensors.get(rescaled.layer.data)
            if source is not None and np.any(columns != 1):
                tensors[str(source.name)] = Factors(rescaled.data_axis, columns.astype(np.float32))
        groups, _, inputs, _ = rescaled.weight.shape
        stored = rescaled.weight * columns.reshape(groups, 1, inputs, 1)
        roots = settled.roots[made]
        rows = np.where(known[roots], factors[roots], _fit(plain.weight, stored, _BY_ROW))
        factors[roots], known[roots] = rows, True
        if np.any(rows != 1) or np.any(columns != 1):
            layers[str(node.name)] = rows, columns
    for name, value in values_by_name(stripped.graph).items():
        ours, flow = matches.tensors.get(name), trace.flow(value)
        if ours is not None and flow.ids is not None and np.any(factors[settled.roots[flow.ids]] != 1):
            tensors[str(ours.name)] = Factors(flow.axis, factors[settled.roots[flow.ids]].astype(np.float32))
    return tensors, layers


def _fit(plain: Array, stored: Array, summed: tuple[int, int]) -> Doubles:
    """The factor of each row, or of each column; ones where the layer was not rescaled.

    Args:
        plain: float weights, (groups, outputs, inputs, kernel).
        stored: stored weights, likewise.
        summed: the axes that share a factor.
    """
    a, b = plain.astype(np.float64), stored.astype(np.float64)
    power = np.square(a).sum(axis=summed, keepdims=True)
    one = np.ones(power.size)
    if a.size < _FEWEST * power.size:
        return one
    live = power > 0
    factors = np.where(live, (a * b).sum(axis=summed, keepdims=True) / np.where(live, power, 1), 1.0)
    factors = np.where(factors > 0, factors, 1.0)  # a row of zeros, or nonsense: not a factor
    before, after = np.square(b - a).sum(), np.square(b - a * factors).sum()
    signal = np.square(b).sum()
    explained = after == 0 or 10 * np.log10(signal / after) >= _GOOD_DB
    if before == 0 or not explained or (after > 0 and 10 * np.log10(before / after) < _GAIN_DB):
        return one
    return np.asarray(factors.reshape(-1))
