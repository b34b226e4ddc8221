"""Options about what is done beyond calibration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roundel.quark.options.finetune import FINETUNE
from roundel.quark.options.nested import nested_effects
from roundel.quark.request import Request
from roundel.quark.rows import (
    COUNT,
    INTEGER,
    NOTHING,
    NUMBER,
    SWITCH,
    TABLE,
    Effect,
    Kind,
    Option,
    always,
    computed,
    refused,
    to_field,
    to_word,
)

_EQUALIZE = "improve.equalize."
_MOST_STEPS = 20
_USUAL_CHANGES = (2e-7, 1.9e-7)
_PREFERENCES = ("accuracy", "speed", "resource_efficiency")
_PREFERENCE = Kind(" or ".join(map(repr, _PREFERENCES)), lambda v: v in _PREFERENCES)


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


def _preference(value: Any, request: Request) -> Effect:
    tune = "improve.finetune."
    words: dict[str, dict[str, Any]] = {
        "accuracy": {
            "calibration.mode": "all",
            f"{tune}early_stop": False,
            f"{tune}update_bias": True,
            f"{tune}output_qdq": True,
        },
        "speed": {"improve.rounding": False, f"{tune}early_stop": True, f"{tune}mem_opt_level": 0},
        "resource_efficiency": {"improve.samples": 32, f"{tune}mem_opt_level": 2},
    }
    return Effect(recipe=words[value])


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
    computed("QuantizationPreference", None, _PREFERENCE, "improve.*", _preference),
)
