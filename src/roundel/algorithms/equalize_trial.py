"""Whether equalization stays: both models are calibrated alike and judged on other samples.

Equalization takes its factors from weights alone and comes before calibration, so that no later step can tell
what it was worth. A small trial can: a few dozen samples show a difference that matters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import onnx_ir as ir

from roundel.algorithms.judge import StepReport, output_sqnr, verdict
from roundel.calibrate.collect import collect
from roundel.calibrate.positions import refine
from roundel.calibrate.resolve import requests_for, resolve
from roundel.calibrate.state import QuantState
from roundel.plan import build_plan
from roundel.recipe import Recipe
from roundel.types import Sample

_RANGING = 16  # samples that calibrate
_JUDGING = 24  # other samples that judge
_EVERY = 3  # each third one


def try_equalization(
    plain: ir.Model, evened: ir.Model, samples: Sequence[Sample], outputs: Sequence[Sample], recipe: Recipe
) -> StepReport:
    """Compare the two models, each calibrated on the same part of the samples.

    Args:
        plain: the prepared float model.
        evened: the same, equalized.
        samples: inputs, four or more.
        outputs: the float model's outputs for them.
        recipe: how to calibrate.
    """
    start = time.perf_counter()
    judging = slice(_EVERY - 1, _EVERY * _JUDGING, _EVERY)
    ranging = [sample for index, sample in enumerate(samples) if index % _EVERY != _EVERY - 1][:_RANGING]
    errors = [
        output_sqnr(model, _calibrated(model, ranging, recipe), recipe, samples[judging], outputs[judging])
        for model in (plain, evened)
    ]
    return verdict("equalization", (errors[0], errors[1]), time.perf_counter() - start)


def _calibrated(model: ir.Model, samples: Sequence[Sample], recipe: Recipe) -> QuantState:
    plan = build_plan(model, recipe)
    seen = collect(model, requests_for(plan, recipe), samples, keep=0)
    return refine(model, resolve(model, plan, seen.stats, recipe), recipe.npu)
