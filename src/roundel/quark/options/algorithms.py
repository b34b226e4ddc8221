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
    """Biases are fitted where rounding is chosen, layer by layer; those of short floats and blocks apart."""
    whole = request.integer_activations and request.integer_weights
    return Effect(recipe={"effort": request.effort, "improve.rounding": whole} if value else {})


def _gptq(value: Any, request: Request) -> Effect:
    """Weights of MatMul and Gemm in few bits, rounded by GPTQ; activations stay float."""
    if not value:
        return NOTHING
    return Effect(recipe={"weight_only.algorithm": "gptq", "weight_only.format": "qdq"})


def _gptq_details(value: Any, request: Request) -> Effect:
    found = nested_effects("GPTQParams", GPTQ, value, request)
    return found if request.asked("UseGPTQ") else Effect(note="GPTQParams counts only with UseGPTQ=True")


def _gptq_group(value: Any, request: Request) -> Effect:
    if value == -1:
        return Effect(note="GroupSize -1: weights share scales in groups of 128, not in whole channels")
    return Effect(recipe={"weight_only.group_size": value})


def _gptq_range(value: Any, request: Request) -> Effect:
    return Effect(recipe={"weight_only.range": "mse" if value else "minmax"})


_SOLVED = "the equations of a layer are solved as a whole."
GPTQ = {
    row.key: row
    for row in (
        to_field("Bits", 8, COUNT, "weight_only.bits"),
        computed("GroupSize", -1, INTEGER, "weight_only.group_size", _gptq_group),
        to_field("WeightSymmetric", True, SWITCH, "weight_only.symmetric"),
        to_field("PercDamp", 0.01, NUMBER, "weight_only.percdamp"),
        to_field("ActOrder", False, SWITCH, "weight_only.act_order"),
        computed("MSE", False, SWITCH, "weight_only.range", _gptq_range),
        always("PerChannel", False, SWITCH, "groups are finer than channels."),
        always("BlockSize", 128, INTEGER, _SOLVED),
    )
}


def _few_bits(value: Any, request: Request) -> Effect:
    return Effect(recipe={"mode": "weight_only"} if value else {})


def _few_bits_details(value: Any, request: Request) -> Effect:
    found = nested_effects("MatMulNBitsParams", FEW_BITS, value, request)
    if request.asked("UseMatMulNBits"):
        return found
    return Effect(note="MatMulNBitsParams counts only with UseMatMulNBits=True")


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
    computed("UseGPTQ", False, SWITCH, "mode, weight_only.algorithm", _gptq),
    computed("GPTQParams", {}, TABLE, "weight_only.*", _gptq_details),
    to_field("SmoothAlpha", 0.5, NUMBER, "improve.smooth.alpha"),
    always("RMatrixDim", 4096, COUNT, _FOUND),
    always("RConfigPath", None, PATH, _FOUND),
    always("UseRandomHad", False, SWITCH, "the signs of the matrix are random, by a seed."),
    computed("UseMatMulNBits", False, SWITCH, "mode", _few_bits),
    computed("MatMulNBitsParams", {}, TABLE, "weight_only.*", _few_bits_details),
    computed("AutoMixprecision", {}, TABLE, "mixed.*", _mixed),
)
