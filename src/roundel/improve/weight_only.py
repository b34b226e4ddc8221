"""GPTQ over a whole model: each weight is rounded for what the packed weights before it let through."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.errors import DataError, RecipeError
from roundel.improve.moments import HeldMoments, InputMoments
from roundel.improve.probe import Carried, Errors, OutputErrors, let_out_logits, together
from roundel.improve.stepwise import StepwiseRunner
from roundel.model.graph import constant_array, values_by_name
from roundel.model.session import open_session
from roundel.numerics.metrics import layer_db
from roundel.numerics.packed import Packed
from roundel.numerics.rounding import ErrorSpread, gptq, one_blas_thread, spread
from roundel.plan.build import WeightLayer, weight_layers
from roundel.plan.types import QuantPlan
from roundel.recipe.settings import WeightOnly
from roundel.state import LayerReport, held_from
from roundel.types import Doubles, Listener, Sample

Key = tuple[str, bool]
Stage = tuple[WeightLayer, ...]

_RIDGES = (1.0, 0.1, 0.01)


@one_blas_thread()
def gptq_layers(
    model: ir.Model,
    layers: Sequence[WeightLayer],
    rounded: Mapping[Key, Packed],
    samples: Sequence[Sample],
    options: WeightOnly,
    progress: Listener,
) -> tuple[dict[Key, Packed], tuple[LayerReport, ...]]:
    """Improve on weights that were rounded to nearest, where held-out samples agree that it is better.

    Layers with the same input are solved together. A weight that several layers read is solved for all of
    them at once, on the float model's inputs, since its later readers have not been computed yet.

    Args:
        model: the prepared float model.
        layers: in graph order.
        rounded: each weight, rounded to nearest.
        samples: all enter the moments in the end; the last fifth judges before.
        options: format and settings.
        progress: told the number of layers, and how many are done.
    """
    progress.step("gptq layer by layer", len(layers))
    work = _LayerByLayer(model, layers, rounded, samples, options)
    reports: list[LayerReport] = []
    done = 0
    for stage in work.stages():
        reports += work.solve(stage)
        done += sum(len(work.readers[layer.key]) for layer in stage)
        progress.advance(done)
    return work.packed, tuple(reports)


class _LayerByLayer:
    def __init__(
        self,
        model: ir.Model,
        layers: Sequence[WeightLayer],
        rounded: Mapping[Key, Packed],
        samples: Sequence[Sample],
        options: WeightOnly,
    ) -> None:
        self.model, self.samples, self.options = model, samples, options
        self.layers, self.packed = layers, dict(rounded)
        self.readers: dict[Key, list[WeightLayer]] = defaultdict(list)
        for layer in layers:
            self.readers[layer.key].append(layer)
        self.carried = Carried(model, layers)
        self.seen = StepwiseRunner(self.carried.model, samples)
        self.plain = StepwiseRunner(model, samples)

    def stages(self) -> list[Stage]:
        """Layers to solve together, one for each weight, in the order in which the data reach them."""
        found: dict[Key | str, list[WeightLayer]] = {}
        for layer in self.layers:
            shared = len(self.readers[layer.key]) > 1
            stage = found.setdefault(layer.key if shared else layer.data, [])
            if not shared or not stage:
                stage.append(layer)
        return [tuple(stage) for stage in found.values()]

    def solve(self, stage: Stage) -> list[LayerReport]:
        """Solve on most samples, judge on the others, then solve what is better once more on all."""
        start = time.perf_counter()
        train, held = self._moments(stage)
        pull, ridge = self._target(stage, train, held)
        spreading = self._spread(train)
        judged = {}
        for layer in stage:
            weight = self._float(layer)
            tried = self._gptq(weight, pull, spreading)
            errors = [held.error(stored.restored(), weight) for stored in (self.packed[layer.key], tried)]
            judged[layer.key] = (held.signal(weight), errors[0], errors[1])
        better = [layer for layer in stage if judged[layer.key][2] < judged[layer.key][1]]
        train.take(held.moments)
        del held  # wide layers have large moments
        if better:
            pull = None if ridge is None else train.pull(ridge)
            spreading = self._spread(train)
            for layer in better:
                self.packed[layer.key] = self._gptq(self._float(layer), pull, spreading)
        for layer in stage:
            self.carried.take(layer, self.packed[layer.key])
        self.seen.release()
        self.plain.release()
        took = (time.perf_counter() - start) / len(stage)
        return [_report(layer, judged[layer.key], layer in better, took) for layer in stage]

    def _moments(self, stage: Stage) -> tuple[InputMoments, HeldMoments]:
        width = self.packed[stage[0].key].codes.shape[1]
        border = held_from(len(self.samples))
        train = InputMoments.of(self._inputs(stage, range(border)), width)
        held = HeldMoments.of(self._inputs(stage, range(border, len(self.samples))), width)
        for found in (train, held.moments):
            # A sum of squares that is finite has only finite terms.
            if not np.isfinite(np.trace(found.seen)) or not np.isfinite(found.cross).all():
                raise DataError(
                    "A layer's input is not finite on the calibration data.",
                    where=f"{stage[0].op} '{stage[0].node}', input '{stage[0].data}'",
                    hint="Check the samples, or keep the layer in float with --exclude.",
                )
        return train, held

    def _inputs(self, stage: Stage, chosen: range) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """What the packed prefix lets through, and what the float model has there, sample by sample."""
        readers = self.readers[stage[0].key]
        if len(readers) > 1:
            yield from self._float_inputs(readers, chosen)
            return
        seen, plain = (side.run_to(stage[0].data) for side in (self.seen, self.plain))
        yield from ((seen[index], plain[index]) for index in chosen)

    def _float_inputs(
        self, readers: Sequence[WeightLayer], chosen: range
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """What all readers of a weight get in the float model, sample by sample."""
        watched = self.model.clone()
        values = values_by_name(watched.graph)
        names = list(dict.fromkeys(layer.data for layer in readers))
        computed = [name for name in names if not values[name].is_graph_input()]
        shown = {value.name for value in watched.graph.outputs}
        watched.graph.outputs.extend(values[name] for name in computed if name not in shown)
        session = open_session(watched)
        for index in chosen:
            sample = self.samples[index]
            found = {**sample, **dict(zip(computed, session.run(computed, sample), strict=True))}
            yield from ((found[layer.data], found[layer.data]) for layer in readers)

    def _target(
        self, stage: Stage, train: InputMoments, held: HeldMoments
    ) -> tuple[Doubles | None, float | None]:
        """What to multiply the weights by first, against the errors that have come in before this layer.

        The weakest ridge that still pays on held-out rows; None for weights as they are.
        """
        best: Doubles | None = None
        chosen = None
        least = sum(held.error(self._float(layer), self._float(layer)) for layer in stage)
        for ridge in _RIDGES:
            pull = train.pull(ridge)
            error = sum(held.error(self._float(layer) @ pull, self._float(layer)) for layer in stage)
            if error >= least:
                break
            best, chosen, least = pull, ridge, error
        return best, chosen

    def _spread(self, moments: InputMoments) -> ErrorSpread:
        try:
            return spread(moments.seen, self.options.percdamp, act_order=self.options.act_order)
        except np.linalg.LinAlgError as error:
            raise RecipeError(
                "The damping is too small for these inputs.",
                where="weight_only.percdamp",
                observed=self.options.percdamp,
                hint="Use 0.01, the default, or more; or give more samples.",
            ) from error

    def _gptq(self, weight: NDArray[Any], pull: Doubles | None, spreading: ErrorSpread) -> Packed:
        target = weight if pull is None else weight @ pull
        return gptq(target, spreading, self.options.scheme, search=self.options.range == "mse")

    def _float(self, layer: WeightLayer) -> NDArray[Any]:
        array = constant_array(self.model.graph.initializers[layer.weight])
        assert array is not None
        return layer.matrix(array)


def _report(layer: WeightLayer, judged: tuple[float, float, float], kept: bool, took: float) -> LayerReport:
    power, *errors = judged
    before, after = (layer_db(power, error) for error in errors)
    return LayerReport(layer.node, layer.op, before, after if kept else before, kept, took)


def packed_sqnr(
    model: ir.Model, plan: QuantPlan, packed: Mapping[Key, Packed], samples: Sequence[Sample]
) -> float:
    """Of the whole model's float outputs, which count alike, in dB."""
    layers = weight_layers(model.graph, plan.nodes)
    carried = Carried(model, layers)
    for layer in layers:
        carried.take(layer, packed[layer.key])
    let_out_logits(carried.model.graph, model.graph)
    # A copy: to open a model changes it for a moment, and another verdict may read it meanwhile.
    plain, other = open_session(model.clone()), open_session(carried.model)
    errors = OutputErrors(model.graph)

    def one(sample: Sample) -> Errors:
        wanted = dict(zip(errors.outputs, plain.run(errors.outputs, sample), strict=True))
        return errors.of(wanted, other.run(errors.names, sample))

    return together(map(one, samples)).sqnr_db
