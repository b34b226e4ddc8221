"""What each layer's own error does to the outputs: a layer may lose much where nothing depends on it.

The error that a layer introduces is added to its tensor in the float model, and nothing else: what then
happens to the outputs is that layer's effect. That takes a run for each layer, so it is measured only for
those that cost most by an estimate. This needs no run: error passes from layer to layer as it did in the
comparison (inherited error over the error of the inputs), and errors of several layers add up in power.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from roundel.calibrate.runner import run_session
from roundel.measure.paired import PairedGroup, PairTally, Subject, open_group
from roundel.measure.points import Point
from roundel.measure.sums import TensorSums
from roundel.model.graph import is_float32, values_by_name
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness, comparable, decibels
from roundel.plan.float_parts import paired_parts
from roundel.types import Array, Sample

SAMPLES = 2  # that an effect is measured on: the ranking hardly moves with more
_MEASURED = 24
# Each factor's error counts by its share of that factor, and so does that of boxes and scores in one output.
_PRODUCTS = frozenset({"Mul", "Div", "MatMul"})
_DELTA, _MOVED = "roundel_delta:", "roundel_moved:"


def estimated_effects(points: Sequence[Point], sums: Mapping[str, TensorSums]) -> dict[str, float]:
    """About how much of each layer's own error arrives at the outputs, over their power; by tensor."""
    found: dict[str, float] = {}
    weight = dict.fromkeys(sums, 0.0)  # error power at the outputs for each unit of it here
    for point in reversed([point for point in points if point.name in sums]):
        here = sums[point.name]
        if point.place == "output" and here.total.sums.signal > 0:
            weight[point.name] += 1 / here.total.sums.signal
        found[point.name] = here.introduced.sums.noise * weight[point.name]
        before = [name for name in point.sources if name in sums and name != point.name]
        apart = point.op in _PRODUCTS or len(here.parts) > 1
        units = {name: sums[name].total.sums.signal if apart else 1.0 for name in before}
        arriving = sum(sums[name].total.sums.noise / unit for name, unit in units.items() if unit > 0)
        passed = here.inherited.sums.noise / arriving if arriving > 0 else 0.0
        for name, unit in units.items():
            weight[name] += passed * weight[point.name] / unit if unit > 0 else 0.0
    return found


def output_effects(subject: Subject, tally: PairTally, samples: Sequence[Sample]) -> dict[str, float]:
    """SQNR at the outputs, in dB, with the error of one layer alone; of the layers that cost most.

    Args:
        subject: both models.
        tally: what was compared.
        samples: a few.

    Raises:
        ModelError: ONNX Runtime cannot run a model.
    """
    estimate = estimated_effects(subject.points, tally.sums)
    floats = values_by_name(subject.reference.model.graph)
    known = [
        point
        for point in subject.points
        if estimate.get(point.name, 0.0) > 0 and is_float32(floats.get(point.name))
    ]
    chosen = sorted(known, key=lambda point: -estimate[point.name])[:_MEASURED]
    if not chosen or not samples:
        return {}
    group = open_group(subject, chosen, threads=0)
    session, outputs = _movable(subject.reference.model, [point.name for point in chosen])
    noise: dict[str, dict[str, Closeness]] = {point.name: {} for point in chosen}
    # As many runs as the comparison takes, or few in all.
    for index, sample in enumerate(samples if tally.samples >= _MEASURED else samples[:1]):
        moves = _moves(subject, group, sample, index)
        still = {_DELTA + point.name: np.zeros((), np.float32) for point in chosen}
        feed = {**sample, **still}
        wanted = run_session(session, outputs, feed, index)
        for name, delta in moves.items():
            results = run_session(session, outputs, {**feed, _DELTA + name: delta}, index)
            _add(noise[name], subject, zip(outputs, wanted.values(), results.values(), strict=True))
    shares = {
        name: [c.noise / c.signal for c in parts.values() if c.signal > 0] for name, parts in noise.items()
    }
    return {name: decibels(1.0, sum(some) / len(some)) for name, some in shares.items() if some}


def _moves(subject: Subject, group: PairedGroup, sample: Sample, index: int) -> dict[str, Array]:
    """What each layer of the group adds to its tensor by itself, in the float model's scale."""
    floats = group.floats(subject, sample, index)
    results = group.quantized(subject, sample, floats, index)
    found = {}
    for point in group.points:
        shadow = subject.fetches[point.name].shadow
        if shadow is None or results[shadow].shape != floats[point.name].shape:
            continue
        delta = results[shadow] - floats[point.name]
        factors = subject.factors.get(point.name)
        delta = delta if factors is None else factors.undo(delta)
        found[point.name] = np.where(np.isfinite(delta), delta, 0).astype(np.float32)
    return found


def _movable(model: ir.Model, names: Iterable[str]) -> tuple[ort.InferenceSession, list[str]]:
    """The model with an input for each of these tensors that is added to it; and the names of its outputs."""
    copy = model.clone()
    values = values_by_name(copy.graph)
    for name in names:
        value = values[name]
        delta = ir.Value(name=_DELTA + name, type=ir.TensorType(ir.DataType.FLOAT))
        copy.graph.inputs.append(delta)
        moved = ir.Node("", "Add", [], num_outputs=1, name=_MOVED + name)
        moved.outputs[0].name, moved.outputs[0].type = _MOVED + name, value.type
        ir.convenience.replace_all_uses_with(value, moved.outputs[0], replace_graph_outputs=True)
        moved.resize_inputs(2)
        moved.replace_input_with(0, value)
        moved.replace_input_with(1, delta)
        maker = value.producer()
        if maker is None:
            copy.graph.insert_before(copy.graph[0], moved)
        else:
            copy.graph.insert_after(maker, moved)
    return open_session(copy), [str(value.name) for value in copy.graph.outputs]


def _add(noise: dict[str, Closeness], subject: Subject, outputs: Iterable[tuple[str, Array, Array]]) -> None:
    """Sum up each part of each output by itself: boxes and scores count alike."""
    for name, wanted, result in outputs:
        plain = name.removeprefix(_MOVED)
        if not comparable(wanted, result):
            continue
        for part, one, other in paired_parts(plain, wanted, result, subject.joints):
            noise[part] = noise.get(part, Closeness()).merge(Closeness.of(one, other))
