"""Options about what is done beyond calibration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roundel.quark.options.finetune import FINETUNE
from roundel.quark.options.mixed import MIXED
from roundel.quark.options.nested import nested_effects
from roundel.quark.request import Request
from roundel.quark.rows import (
    COUNT,
    INTEGER,
    NOTHING,
    NUMBER,
    PATH,
    SWITCH,
    TABLE,
    TEXT,
    Effect,
    Option,
    always,
    computed,
    refusal,
    refused,
    to_field,
    to_word,
)

_EQUALIZE = "improve.equalize."
_MOST_STEPS = 20
_USUAL_CHANGES = (2e-7, 1.9e-7)


def _finetune(value: Any, request: Request) -> Effect:
    found = nested_effects("FastFinetune", FINETUNE, value, request)
    if request.config.include_fast_ft:
        return found
    note = "FastFinetune is given, so the model is fine-tuned, although include_fast_ft is not set"
    return replace(found, note=f"{found.note}; {note}" if found.note else note)


def _steps(value: Any, request: Request) -> Effect:
    """-1 means until nothing changes; 1, the default, leaves Roundel its own number."""
    if value == 1:
        return NOTHING
    return Effect(recipe={f"{_EQUALIZE}steps": _MOST_STEPS if value < 1 else value})


def _threshold(value: Any, request: Request) -> Effect:
    return NOTHING if value in _USUAL_CHANGES else Effect(recipe={f"{_EQUALIZE}threshold": value})


def _bias_correction(value: Any, request: Request) -> Effect:
    """Biases are fitted where rounding is chosen, layer by layer."""
    return Effect(recipe={"effort": "fast", "improve.rounding": True} if value else {})


def _gptq(value: Any, request: Request) -> Effect:
    """Error-compensating rounding of weights alone; activations stay float."""
    if not value:
        return NOTHING
    return Effect(recipe={"placement.weights_only": True, "effort": "fast", "improve.rounding": True})


def _gptq_details(value: Any, request: Request) -> Effect:
    return nested_effects("GPTQParams", GPTQ, value, request)


_SOLVED = "the rounding is solved layer by layer; it needs no such setting."
GPTQ = {
    row.key: row
    for row in (
        refused("Bits", 8, "weights have 8 bits here.", "For 4 bits use the preset MATMUL_NBITS.", COUNT),
        refused("GroupSize", -1, "a scale is for a tensor or a channel.", "Use MATMUL_NBITS.", INTEGER),
        to_field("PerChannel", False, SWITCH, "weights.per_channel"),
        to_field("WeightSymmetric", True, SWITCH, "weights.symmetric"),
        always("MSE", False, SWITCH, "scales are chosen by error."),
        always("BlockSize", 128, INTEGER, _SOLVED),
        always("PercDamp", 0.01, NUMBER, _SOLVED),
        always("ActOrder", False, SWITCH, _SOLVED),
    )
}


def _few_bits(value: Any, request: Request) -> Effect:
    return Effect(recipe={"mode": "weight_only"} if value else {})


def _few_bits_details(value: Any, request: Request) -> Effect:
    return nested_effects("MatMulNBitsParams", FEW_BITS, value, request) if request.few_bits else NOTHING


def _few_bits_algorithm(value: Any, request: Request) -> Effect:
    words = {"DEFAULT": "round", "GPTQ": "gptq"}
    if value not in words:
        why = "weights are rounded to the nearest code or by GPTQ."
        raise refusal("MatMulNBitsParams", value, why, "Use 'DEFAULT' or 'GPTQ'.")
    return Effect(recipe={"weight_only.algorithm": words[value]})


FEW_BITS = {
    row.key: row
    for row in (
        computed("Algorithm", "DEFAULT", TEXT, "weight_only.algorithm", _few_bits_algorithm),
        to_field("GroupSize", 128, COUNT, "weight_only.group_size"),
        to_field("Symmetric", True, SWITCH, "weight_only.symmetric"),
        to_field("Bits", 4, COUNT, "weight_only.bits"),
        to_field("AccuracyLevel", 0, INTEGER, "weight_only.accuracy_level"),
    )
}


def _mixed(value: Any, request: Request) -> Effect:
    return nested_effects("AutoMixprecision", MIXED, value, request)


_FOUND = "the residual stream and its size are found in the graph."

ALGORITHMS: tuple[Option, ...] = (
    computed("FastFinetune", {}, TABLE, "improve.finetune.*", _finetune),
    computed("CLESteps", 1, INTEGER, "improve.equalize.steps", _steps),
    to_word("CLEBalanceMethod", "max", "improve.equalize.enabled", {"max": True}),
    refused(
        "CLEWeightThreshold",
        0.5,
        "channels of any size are balanced, relative to the largest of their layer.",
        "Leave it out, or set include_cle=False.",
        NUMBER,
    ),
    to_field("CLEScaleAppendBias", True, SWITCH, "improve.equalize.append_bias"),
    always("CLEScaleUseThreshold", True, SWITCH, "ranges are relative, so no threshold is needed."),
    computed("CLETotalLayerDiffThreshold", 2e-7, NUMBER, "improve.equalize.threshold", _threshold),
    computed("BiasCorrection", False, SWITCH, "improve.rounding", _bias_correction),
    computed("UseGPTQ", False, SWITCH, "placement.weights_only, improve.rounding", _gptq),
    computed("GPTQParams", {}, TABLE, "weights.*", _gptq_details),
    to_field("SmoothAlpha", 0.5, NUMBER, "improve.smooth.alpha"),
    always("RMatrixDim", 4096, COUNT, _FOUND),
    always("RConfigPath", None, PATH, _FOUND),
    always("UseRandomHad", False, SWITCH, "the signs of the matrix are random, by a seed."),
    computed("UseMatMulNBits", False, SWITCH, "mode", _few_bits),
    computed("MatMulNBitsParams", {}, TABLE, "weight_only.*", _few_bits_details),
    computed("AutoMixprecision", {}, TABLE, "mixed.*", _mixed),
)
