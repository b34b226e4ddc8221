"""Mode weight_only: every chosen weight in few bits, one weight at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.algorithms.carried import Carried
from roundel.algorithms.gptq import Key, gptq_walk
from roundel.algorithms.held_out import FEWEST, held_out
from roundel.algorithms.judge import StepReport, verdict
from roundel.algorithms.layer_report import Progress
from roundel.algorithms.output_error import Errors, OutputErrors, together
from roundel.errors import DataError
from roundel.model.graph import constant_array
from roundel.model.session import open_session
from roundel.numerics.packed import Packed, round_packed
from roundel.plan.types import QuantPlan
from roundel.plan.weight_only import WeightLayer, weight_layers
from roundel.recipe import WeightOnly
from roundel.types import Sample


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The layers, their weights by key, and what was done beyond rounding to nearest."""

    layers: tuple[WeightLayer, ...]
    packed: Mapping[Key, Packed]
    steps: tuple[StepReport, ...] = ()


def pack_weights(
    model: ir.Model, plan: QuantPlan, samples: Sequence[Sample], options: WeightOnly, told: Progress
) -> PackedWeights:
    """Round the weights that the plan has chosen.

    Args:
        model: the prepared float model.
        plan: of mode weight_only.
        samples: for GPTQ; the last fifth judges.
        options: format and algorithm.
        told: hears about progress.

    Raises:
        DataError: GPTQ has too few samples, or a layer's input is not finite.
    """
    layers = weight_layers(model.graph, plan.nodes)
    rounded: dict[Key, Packed] = {}
    for layer in layers:
        if layer.key not in rounded:
            array = constant_array(model.graph.initializers[layer.weight])
            assert array is not None
            search = options.range == "mse"
            rounded[layer.key] = round_packed(layer.matrix(array), options.scheme, search=search)
    if options.algorithm == "round" or not layers:
        return PackedWeights(layers, rounded)
    if len(samples) < FEWEST:
        raise DataError(
            "GPTQ needs more samples.",
            where="weight_only.algorithm: gptq",
            observed=f"{len(samples)} samples",
            expected=f"at least {FEWEST}, and 100 are usual: the last fifth judges what the others taught",
        )
    return _gptq(model, layers, rounded, samples, options, told)


def _gptq(
    model: ir.Model,
    layers: tuple[WeightLayer, ...],
    rounded: Mapping[Key, Packed],
    samples: Sequence[Sample],
    options: WeightOnly,
    told: Progress,
) -> PackedWeights:
    start = time.perf_counter()
    solved, reports = gptq_walk(model, layers, rounded, samples, options, told)
    held = samples[-held_out(len(samples)) :]
    errors = _sqnr(model, layers, rounded, held), _sqnr(model, layers, solved, held)
    step = verdict("gptq", errors, time.perf_counter() - start, reports)
    return PackedWeights(layers, solved if step.kept else rounded, (step,))


def _sqnr(
    model: ir.Model,
    layers: Sequence[WeightLayer],
    packed: Mapping[Key, Packed],
    samples: Sequence[Sample],
) -> float:
    """Of the whole model's float outputs, which count alike, in dB."""
    carried = Carried(model, layers)
    for layer in layers:
        carried.take(layer, packed[layer.key])
    plain, other = open_session(model), open_session(carried.model)
    errors = OutputErrors(model.graph)

    def one(sample: Sample) -> Errors:
        wanted = dict(zip(errors.names, plain.run(errors.names, sample), strict=True))
        return errors.of(wanted, other.run(errors.names, sample))

    return together(map(one, samples)).sqnr_db
