"""Whether equalization stays: the model is calibrated with and without it, and its outputs are compared.

Equalization takes its factors from weights alone and comes before calibration, so that no later step can tell
what it was worth. A small trial can, and any sample may judge: none has chosen a factor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from roundel.algorithms.judge import StepReport, as_if_rounded, output_sqnr, verdict
from roundel.calibrate.collect import collect
from roundel.calibrate.positions import refine
from roundel.calibrate.resolve import requests_for, resolve
from roundel.calibrate.state import QuantState
from roundel.plan import build_plan
from roundel.recipe import Recipe
from roundel.types import Sample

_LEAST, _MOST = 16, 64  # samples
_FINER = (2, 4, 8)  # one rounding of the weights is one draw; with other steps it is another
_ELEMENTS = 3_600_000  # of their inputs: 24 images of 224 x 224; smaller ones are cheap, so there are more


def try_equalization(
    plain: ir.Model, evened: ir.Model, samples: Sequence[Sample], outputs: Sequence[Sample], recipe: Recipe
) -> StepReport:
    """Compare the two models, each calibrated on the same samples.

    Args:
        plain: the prepared float model.
        evened: the same, equalized.
        samples: inputs.
        outputs: the float model's outputs for them.
        recipe: how to calibrate.
    """
    start = time.perf_counter()
    chosen = _spread(samples)
    some, wanted = [samples[i] for i in chosen], [outputs[i] for i in chosen]
    without, with_it = (_sqnr(model, some, wanted, recipe) for model in (plain, evened))
    took = time.perf_counter() - start
    return verdict("equalization", (without, with_it), took, foreseen=recipe.improve.rounding)


def _sqnr(model: ir.Model, samples: Sequence[Sample], outputs: Sequence[Sample], recipe: Recipe) -> float:
    """The mean over weights of several finenesses, which share the samples, where rounding follows."""
    state = _calibrated(model, samples, recipe)
    if not recipe.improve.rounding or len(samples) < len(_FINER):
        return output_sqnr(model, state, recipe, samples, outputs)
    found = []
    for first, finer in enumerate(_FINER):
        ahead, part = as_if_rounded(model.graph, state, finer), slice(first, None, len(_FINER))
        found.append(output_sqnr(model, ahead, recipe, samples[part], outputs[part]))
    return sum(found) / len(found)  # infinities of both signs make nan, which never wins


def _spread(samples: Sequence[Sample]) -> list[int]:
    """The numbers of the samples to use, evenly spread."""
    size = max(1, sum(array.size for array in samples[0].values()))
    count = min(len(samples), _MOST, max(_LEAST, _ELEMENTS // size))
    return [int(index) for index in np.linspace(0, len(samples) - 1, count).round()]


def _calibrated(model: ir.Model, samples: Sequence[Sample], recipe: Recipe) -> QuantState:
    plan = build_plan(model, recipe)
    seen = collect(model, requests_for(plan, recipe), samples, keep=0)
    return refine(model, resolve(model, plan, seen.stats, recipe), recipe.npu)
