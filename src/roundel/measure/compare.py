"""`roundel.compare`: a float model and its quantized form, tensor by tensor and weight by weight."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from roundel.data.lint import record_findings
from roundel.errors import ModelError
from roundel.heads import load_whole
from roundel.measure import points, reference, types
from roundel.measure.effects import SAMPLES, output_effects
from roundel.measure.paired import PairTally, Subject, compare_samples
from roundel.measure.runner import Travelling
from roundel.measure.sums import TensorSums, channel_errors, closeness, coarse_histogram
from roundel.model import ModelSource
from roundel.model.graph import attribute_int, constant_array, is_constant, op_key, upstream
from roundel.model.layers import read_layer
from roundel.model.memory import collector_paused
from roundel.passes import refresh_shapes
from roundel.passes.cleanup import lift_constants
from roundel.plan.float_parts import joined_outputs
from roundel.qdq.nodes import CODES, QUARK, bare_name
from roundel.qdq.read import StoredTensors, strip_stored
from roundel.recipe.settings import Data
from roundel.stages import open_data
from roundel.targets.operators import is_operand
from roundel.twin import become_twin
from roundel.types import Array, Doubles, Listener, heard_by
from roundel.work.executors import Work

_STRANGE_DB = 3.0  # the coarsest formats stay above; a weight below is another weight


def compare_models(
    float_model: ModelSource,
    quantized_model: ModelSource,
    data: object,
    options: Data | None = None,
    *,
    as_npu: str | None = None,
    work: Work | None = None,
    listener: Listener | None = None,
) -> types.Comparison:
    """`roundel.compare`, once it is settled how files become samples and where the work is done."""
    started = time.perf_counter()
    with heard_by(listener) as told:
        told.step("match tensors")
        with collector_paused():
            pair = _Pair(float_model, quantized_model, as_npu)
        samples = open_data(pair.reference.model, options or Data(), data)
        few = samples.first(SAMPLES)
        loaded = time.perf_counter()
        told.step("compare", samples.count)
        tally = compare_samples(pair.subject, samples, told.advance, work or Work())
        told.step("effect on the outputs")
        pair.effects = output_effects(pair.subject, tally, few)
        finished = time.perf_counter()
    seconds = {"load": loaded - started, **tally.seconds, "total": finished - started}
    notes = [*(str(finding) for finding in record_findings(pair.file, samples)), *pair.notes]
    return pair.comparison(tally, samples.description, seconds, notes)


class _Pair:
    """Both models, matched, and the words that describe them."""

    def __init__(self, float_model: ModelSource, quantized_model: ModelSource, as_npu: str | None) -> None:
        loaded, _ = load_whole(quantized_model, opaque=QUARK)
        self.name, self.quantized_bytes, self.file = loaded.name, loaded.file_bytes, loaded.path
        lift_constants(loaded.model)
        stripped = loaded.model.clone()
        stored = strip_stored(stripped)
        refresh_shapes(stripped)
        ours = reference.find_reference(float_model, stripped, stored, loaded.path)
        self.reference, self.matches = ours, reference.match(ours.model, stripped)
        factors, rescaled = ({}, {}) if ours.explained else reference.find_factors(stripped, self.matches)
        plain = points.with_plain_constants(loaded.model)
        found = points.find_points(plain, self.matches)
        if not found:
            raise ModelError(
                "The two models have no tensor in common.",
                where=loaded.name,
                expected=f"a quantized form of {ours.name}",
            )
        self.weights = compare_weights(loaded.model, stripped, stored, self.matches, rescaled, ours.plain)
        self.notes = () if as_npu is None else become_twin(plain, quantized_model, as_npu).lines()
        extended, fetches = points.extend(plain, found)
        storages = {point.name: types.describe(stored.tensors.get(point.raw)) for point in found}
        known = {name: storage for name, storage in storages.items() if storage is not None}
        models, joints = (Travelling(ours.model), Travelling(extended)), joined_outputs(ours.model.graph)
        self.subject = Subject(*models, fetches, found, known, factors, joints)
        self.effects: Mapping[str, float] = {}

    def comparison(
        self, tally: PairTally, data: Mapping[str, Any], seconds: Mapping[str, float], notes: list[str]
    ) -> types.Comparison:
        """Everything put together."""
        seen = [(point, tally.sums[point.name]) for point in self.subject.points if point.name in tally.sums]
        tensors = [self._tensor(point, sums) for point, sums in seen if sums.total.sums.count]
        unmatched = dict.fromkeys(self.matches.unmatched, "no tensor of the float model corresponds to it")
        weights = [weight for group in self.weights.values() for weight in group]
        outputs = [(t, tally.sums[t.name]) for t in tensors if t.place == "output"]
        broken = [point.name for point, sums in seen if sums.broken]
        return types.Comparison(
            float_model=self.reference.name,
            quantized_model=self.name,
            float_bytes=self.reference.file_bytes,
            quantized_bytes=self.quantized_bytes,
            samples=tally.samples,
            data=data,
            outputs=tuple(part for t, sums in outputs for part in _parts(t, sums)),
            tensors=tuple(tensors),
            weights=tuple(weights),
            unmatched=unmatched | tally.mismatched,
            seconds=seconds,
            notes=(
                *notes,
                *_unlike([w.node for w in weights if w.role == "weight" and w.error.sqnr_db < _STRANGE_DB]),
                *(f"{name} holds NaN or infinity in the quantized model" for name in broken),
            ),
        )

    def _tensor(self, point: points.Point, sums: TensorSums) -> types.TensorComparison:
        storage = self.subject.storages.get(point.name)
        weights = [w for node in point.nodes for w in self.weights.get(node, ())]
        one_range = storage is not None and storage.one_range
        main = sums.introduced if sums.introduced.sums.count else sums.total
        total = sums.total.difference
        assert total is not None
        return types.TensorComparison(
            name=point.name,
            quantized_name=point.raw,
            place=point.place,
            node=point.node,
            op=point.op,
            nodes=point.nodes,
            sources=point.sources,
            weights=tuple(weight.name for weight in weights),
            shape=sums.shape,
            storage=storage,
            total=total,
            introduced=sums.introduced.difference,
            inherited=sums.inherited.difference,
            rounding=sums.rounding.difference,
            saturated=sums.saturated / sums.count if sums.count and one_range else None,
            range_use=_range_use(sums, storage),
            float_low=sums.low,
            float_high=sums.high,
            channel_axis=points.output_channel_axis(point.op, len(sums.shape)),
            worst_channels=channel_errors(main.noise, sums.signal),
            histogram=coarse_histogram(sums),
            effect=self.effects.get(point.name),
            rescaled=point.name in self.subject.factors or any(weight.rescaled for weight in weights),
        )


def _parts(tensor: types.TensorComparison, sums: TensorSums) -> Iterator[types.OutputComparison]:
    """An output; one that joins boxes and scores in parts, since the larger numbers would hide the others."""
    if len(sums.parts) > 1:
        for name, s in sums.parts.items():
            difference = types.Difference(s.sqnr_db, s.cosine, s.noise / max(s.count, 1), s.worst)
            yield types.OutputComparison(name, difference, None)
        return
    yield types.OutputComparison(tensor.name, tensor.total, sums.same_top / sums.rows if sums.rows else None)


def _unlike(nodes: list[str]) -> Iterator[str]:
    if nodes:
        yield (
            f"the weights of {len(nodes)} layers ({', '.join(nodes[:3])} …) are not those of the float model,"
            " not even rescaled: where a tool has rotated them, the tensors around them do not compare"
        )


def _range_use(sums: TensorSums, storage: types.TensorStorage | None) -> float | None:
    if storage is None or not storage.one_range:
        return None
    used = min(sums.high, storage.high) - max(sums.low, storage.low)
    return max(0.0, min(1.0, used / (storage.high - storage.low)))


Role = Literal["weight", "bias", "constant"]


@dataclass(frozen=True, slots=True, eq=False)
class WeightPair:
    """One constant operand in both models.

    Attributes:
        node: of the float graph.
        index: of the operand.
        quantized: the value that the partner node reads.
        stored: its name in the stripped graph.
    """

    node: ir.Node
    index: int
    quantized: ir.Value
    stored: str


def compare_weights(
    quantized: ir.Model,
    stripped: ir.Model,
    stored: StoredTensors,
    matches: reference.Matches,
    rescaled: Mapping[str, tuple[Doubles, Doubles]],
    plain: reference.Arrays,
) -> dict[str, list[types.WeightComparison]]:
    """All weights, by name of the quantized model's node that reads them.

    Args:
        quantized: the quantized model.
        stripped: the same without Q/DQ pairs.
        stored: what the pairs held.
        matches: partners of its nodes.
        rescaled: factors on rows and columns of layers that another tool has equalized.
        plain: constants before equalization, by node and index of the float graph.
    """
    bare = {str(node.name): node for node in stripped.graph}
    pairs = [(str(n.name), p) for n in quantized.graph for p in _pairs(n, bare.get(str(n.name)), matches)]
    contents = _contents(quantized, [pair.quantized for _, pair in pairs])
    found: dict[str, list[types.WeightComparison]] = {}
    for name, pair in pairs:
        array = contents.get(str(pair.quantized.name))
        wanted = constant_array(pair.node.inputs[pair.index])
        if array is None or wanted is None or array.shape != wanted.shape or not array.size:
            continue
        storage = types.describe(stored.tensors.get(pair.stored))
        if storage is None and _role(op_key(pair.node), pair.index) == "constant":
            continue  # a batch norm's parameters, say: float in both
        before = plain.get((str(pair.node.name), pair.index), wanted)
        factors = rescaled.get(str(pair.node.name))
        found.setdefault(name, []).append(_compare(pair, wanted, array, storage, (before, factors)))
    return found


def _pairs(node: ir.Node, bare: ir.Node | None, matches: reference.Matches) -> Iterator[WeightPair]:
    """Constant operands that a node shares with its float partner."""
    partner = matches.nodes.get(str(node.name))
    if partner is None or bare is None:
        return
    for index, value in enumerate(node.inputs[: len(partner.inputs)]):
        ours = constant_array(partner.inputs[index])
        if value is None or ours is None or ours.dtype.kind != "f" or not is_operand(op_key(node), index):
            continue
        inner = bare.inputs[index]
        yield WeightPair(partner, index, value, str(inner.name) if inner is not None else "")


def _contents(quantized: ir.Model, values: list[ir.Value]) -> dict[str, Array]:
    """What constants come to behind their DQ or Cast nodes: ONNX Runtime computes them."""
    found, behind = {}, []
    for value in values:
        array = constant_array(value)
        if array is not None:
            found[str(value.name)] = array
        elif _depends_on_constants(quantized.graph, value):
            behind.append(str(value.name))
    names = list(dict.fromkeys(behind))
    return found | dict(zip(names, reference.fixed_values(quantized, names), strict=True)) if names else found


def _depends_on_constants(graph: ir.Graph, value: ir.Value) -> bool:
    maker = value.producer()
    nodes = () if maker is None else upstream(graph, [maker])
    read = (v for node in nodes for v in node.inputs if v is not None)
    return maker is not None and all(is_constant(v) or v.producer() is not None for v in read)


def _compare(
    pair: WeightPair,
    wanted: Array,
    array: Array,
    storage: types.TensorStorage | None,
    history: tuple[Array, tuple[Doubles, Doubles] | None],
) -> types.WeightComparison:
    before, factors = history
    node, op = pair.node, op_key(pair.node)
    role = _role(op, pair.index)
    axis = _channel_axis(node, role, storage, wanted.ndim)
    floats, stored = (wanted, array) if factors is None else _rescaled(pair, role, wanted, array, factors)
    own_axis = axis if floats.shape == wanted.shape else 0
    cut = 0 if storage is None else storage.beyond(floats, floats.min(), floats.max())
    floats, stored = (np.ascontiguousarray(values, np.float32) for values in (floats, stored))
    gap, signal = closeness(floats, stored, own_axis)
    assert gap.difference is not None
    return types.WeightComparison(
        name=_stored_name(pair.quantized),
        float_name=str(node.inputs[pair.index].name),  # type: ignore[union-attr]
        node=str(node.name),
        op=op,
        role=role,
        shape=tuple(wanted.shape),
        storage=storage,
        error=gap.difference,
        saturated=cut / floats.size if storage is not None and storage.one_range else None,
        channel_axis=axis,
        float_ranges=_ranges(before if before.shape == wanted.shape else wanted, axis),
        stored_ranges=_ranges(array, axis),
        worst_channels=channel_errors(gap.noise, signal),
        rescaled=factors is not None or not np.array_equal(before, wanted),
    )


def _stored_name(value: ir.Value) -> str:
    """The name of a constant that stands before DQ or Cast nodes, without what quantizers append."""
    maker = value.producer()
    while maker is not None and maker.inputs and maker.inputs[0] is not None:
        value = maker.inputs[0]
        maker = value.producer()
    return bare_name(str(value.name)).removesuffix(CODES)


def _role(op: str, index: int) -> Role:
    if op not in points.LAYER_OPS:
        return "constant"
    return "weight" if index < 2 else "bias"


def _channel_axis(node: ir.Node, role: Role, storage: types.TensorStorage | None, rank: int) -> int | None:
    if storage is not None and storage.axis is not None and rank:
        return storage.axis % rank
    if role == "constant" or rank == 0:
        return None
    if rank == 1 or op_key(node) == "Conv":
        return 0
    if op_key(node) == "ConvTranspose":
        return 1
    turned = op_key(node) == "Gemm" and attribute_int(node, "transB", 0)
    return 0 if turned else rank - 1


def _rescaled(
    pair: WeightPair, role: Role, wanted: Array, array: Array, factors: tuple[Doubles, Doubles]
) -> tuple[Array, Array]:
    """Float and stored values in the quantized model's coordinates, one row for each output channel."""
    rows, columns = factors
    if role == "bias":
        return wanted * rows.astype(wanted.dtype), array
    layer = read_layer(pair.node)
    assert layer is not None
    ours, theirs = layer.blocks(layer.stored), layer.blocks(array)
    groups, outputs, inputs, _ = ours.shape
    scaled = ours * rows.reshape(groups, outputs, 1, 1) / columns.reshape(groups, 1, inputs, 1)
    return scaled.reshape(groups * outputs, -1), theirs.reshape(groups * outputs, -1)


def _ranges(array: Array, axis: int | None) -> tuple[tuple[float, float], ...]:
    rows = array[None] if axis is None else np.moveaxis(array, axis, 0)
    rows = rows.reshape(len(rows), -1)
    return tuple(zip(rows.min(axis=1).tolist(), rows.max(axis=1).tolist(), strict=True))
