"""`roundel.compare`: a float model and its quantized form, tensor by tensor, in one pass over the data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roundel.data.lint import record_findings
from roundel.errors import ModelError
from roundel.measure import types
from roundel.measure.paired import PairTally, Subject, compare_samples
from roundel.measure.points import Point, extend, find_points, output_channel_axis, with_plain_constants
from roundel.measure.reference import Matches, Reference, find_factors, find_reference, match
from roundel.measure.runner import Travelling
from roundel.measure.sums import TensorSums, channel_errors, coarse_histogram
from roundel.measure.weights import compare_weights
from roundel.model import load_model
from roundel.model.memory import collector_paused
from roundel.model.structure import ModelSource
from roundel.passes import refresh_shapes
from roundel.passes.cleanup import lift_constants
from roundel.qdq.nodes import QUARK
from roundel.qdq.read import StoredTensors, strip_stored
from roundel.recipe.settings import Data
from roundel.stages import open_data
from roundel.types import Listener, Silent
from roundel.work.executors import Work

_STRANGE_DB = 3.0  # the coarsest formats stay above; a weight below is another weight


def compare_models(
    float_model: ModelSource,
    quantized_model: ModelSource,
    data: object,
    options: Data | None = None,
    *,
    work: Work | None = None,
    listener: Listener | None = None,
) -> types.Comparison:
    """`roundel.compare`, once it is settled how files become samples and where the work is done."""
    told, started = listener or Silent(), time.perf_counter()
    try:
        told.step("match tensors")
        with collector_paused():
            pair = _Pair(float_model, quantized_model)
        samples = open_data(pair.reference.model, options or Data(), data)
        loaded = time.perf_counter()
        told.step("compare", samples.count)
        tally = compare_samples(pair.subject, samples, told.advance, work or Work())
        finished = time.perf_counter()
    finally:
        told.close()
    seconds = {"load": loaded - started, **tally.seconds, "total": finished - started}
    notes = [str(finding) for finding in record_findings(pair.file, samples)]
    return pair.comparison(tally, samples.description, seconds, notes)


class _Pair:
    """Both models, matched, and the words that describe them."""

    def __init__(self, float_model: ModelSource, quantized_model: ModelSource) -> None:
        self.names = _name(float_model), _name(quantized_model)
        loaded = load_model(quantized_model, allow_quantized=True, opaque=QUARK)
        self.quantized_bytes, self.file = loaded.file_bytes, loaded.path
        lift_constants(loaded.model)
        stripped = loaded.model.clone()
        stored = strip_stored(stripped)
        refresh_shapes(stripped)
        self.reference: Reference = find_reference(float_model, stripped, stored, loaded.path)
        self.matches: Matches = match(self.reference.model, stripped)
        factors, rescaled = ({}, {}) if self.reference.explained else find_factors(stripped, self.matches)
        plain = with_plain_constants(loaded.model)
        points = find_points(plain, self.matches)
        if not points:
            raise ModelError(
                "The two models have no tensor in common.",
                where=self.names[1],
                expected=f"a quantized form of {self.names[0]}",
            )
        self.weights = compare_weights(
            loaded.model, stripped, stored, self.matches, rescaled, self.reference.plain
        )
        extended, fetches = extend(plain, points)
        models = Travelling(self.reference.model), Travelling(extended)
        self.subject = Subject(*models, fetches, points, _storages(points, stored), factors)

    def comparison(
        self, tally: PairTally, data: Mapping[str, Any], seconds: Mapping[str, float], notes: list[str]
    ) -> types.Comparison:
        """Everything put together."""
        seen = [(point, tally.sums[point.name]) for point in self.subject.points if point.name in tally.sums]
        tensors = [self._tensor(point, sums) for point, sums in seen if sums.total.sums.count]
        unmatched = dict.fromkeys(self.matches.unmatched, "no tensor of the float model corresponds to it")
        strange = [
            w.node for w in self._all_weights() if w.role == "weight" and w.error.sqnr_db < _STRANGE_DB
        ]
        if strange:
            notes = [*notes, _unlike(strange)]
        broken = [point.name for point, sums in seen if sums.broken]
        notes = [*notes, *(f"{name} holds NaN or infinity in the quantized model" for name in broken)]
        return types.Comparison(
            float_model=self.names[0],
            quantized_model=self.names[1],
            float_bytes=self.reference.file_bytes,
            quantized_bytes=self.quantized_bytes,
            samples=tally.samples,
            data=data,
            outputs=tuple(_outputs(tensors, tally.sums)),
            tensors=tuple(tensors),
            weights=tuple(self._all_weights()),
            unmatched=unmatched | tally.mismatched,
            seconds=seconds,
            notes=tuple(notes),
        )

    def _all_weights(self) -> list[types.WeightComparison]:
        return [weight for group in self.weights.values() for weight in group]

    def _tensor(self, point: Point, sums: TensorSums) -> types.TensorComparison:
        storage = self.subject.storages.get(point.name)
        weights: list[types.WeightComparison] = [
            w for node in point.nodes for w in self.weights.get(node, ())
        ]
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
            saturated=_saturated(sums, storage),
            range_use=_range_use(sums, storage),
            float_low=sums.low,
            float_high=sums.high,
            channel_axis=output_channel_axis(point.op, len(sums.shape)),
            worst_channels=channel_errors(main.noise, sums.signal),
            histogram=coarse_histogram(sums),
            rescaled=point.name in self.subject.factors or any(weight.rescaled for weight in weights),
        )


def _unlike(nodes: list[str]) -> str:
    return (
        f"the weights of {len(nodes)} layers ({', '.join(nodes[:3])} …) are not those of the float model, not"
        " even rescaled: where a tool has rotated them, the tensors around them do not compare"
    )


def _name(source: ModelSource) -> str:
    return Path(source).name if isinstance(source, str | Path) else "in memory"


def _storages(points: Iterable[Point], stored: StoredTensors) -> dict[str, types.TensorStorage]:
    found = {point.name: types.describe(stored.tensors.get(point.raw)) for point in points}
    return {name: storage for name, storage in found.items() if storage is not None}


def _outputs(
    tensors: Iterable[types.TensorComparison], sums: Mapping[str, TensorSums]
) -> Iterable[types.OutputComparison]:
    for tensor in tensors:
        if tensor.place == "output":
            seen = sums[tensor.name]
            yield types.OutputComparison(
                tensor.name, tensor.total, seen.same_top / seen.rows if seen.rows else None
            )


def _plain_range(storage: types.TensorStorage | None) -> bool:
    """Whether the tensor has one finite range."""
    return storage is not None and storage.scales == 1 and storage.scale > 0


def _saturated(sums: TensorSums, storage: types.TensorStorage | None) -> float | None:
    return sums.saturated / sums.count if _plain_range(storage) and sums.count else None


def _range_use(sums: TensorSums, storage: types.TensorStorage | None) -> float | None:
    if storage is None or not _plain_range(storage):
        return None
    used = min(sums.high, storage.high) - max(sums.low, storage.low)
    return max(0.0, min(1.0, used / (storage.high - storage.low)))
