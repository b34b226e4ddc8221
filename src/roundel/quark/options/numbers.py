"""Options about element types, symmetry, scales and biases."""

from __future__ import annotations

from typing import Any

from roundel.quark.blocks import OPTIONS as BLOCK_OPTIONS
from roundel.quark.blocks import block_values
from roundel.quark.request import Request
from roundel.quark.rows import (
    SWITCH,
    TABLE,
    Effect,
    Option,
    Work,
    always,
    computed,
    refusal,
    refused,
    to_field,
)


def _bias(value: Any, request: Request) -> Effect:
    """QuantizeBias, Int16Bias and Int32Bias together say how biases are stored."""
    if not request.asked("QuantizeBias", True):
        return Effect(recipe={"bias.type": "float"})
    if not (request.integer_activations and request.integer_weights):
        return Effect(recipe={"bias.type": "weights"})
    if request.asked("Int16Bias"):
        return Effect(recipe={"bias.type": "int16"})
    if request.asked("Int32Bias", not request.npu):
        return Effect(recipe={"bias.type": "int32"})
    return Effect(recipe={"bias.type": "int8" if request.weight == "int8" else "weights"})


def _int16_scale(value: Any, request: Request) -> Effect:
    paths = ("activations.scale", "weights.scale")
    return Effect(recipe=dict.fromkeys(paths, "int16") if value else {})


def _power_of_two(value: Any, request: Request) -> Effect:
    """False asks for float scales where the method is one of power-of-two scales."""
    if value or request.scale != "power_of_two":
        return Effect()
    if request.npu:
        why = "the NPU's 8-bit engine shifts instead of multiplying."
        raise refusal("UsePowerOf2Scale", value, why, "Use the preset A8W8 for float scales.")
    return Effect(recipe=dict.fromkeys(("activations.scale", "weights.scale"), "float"))


def _form(value: Any, request: Request) -> Effect:
    if request.asked("EnableVaimlBF16"):
        return Effect(recipe={"floats.form": "plain"})
    return Effect(recipe={"floats.form": "cast" if request.casts else "pair"})


def _blocks(option: str) -> Work:
    """The element type follows from the same attributes; see `blocks.block_type`."""

    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe=dict(block_values(option, value)))

    return work


def _scaled(side: str) -> Work:
    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe={f"{side}.scaled": value} if request.short_floats else {})

    return work


NUMBERS: tuple[Option, ...] = (
    to_field("ActivationSymmetric", False, SWITCH, "activations.symmetric"),
    to_field("WeightSymmetric", True, SWITCH, "weights.symmetric"),
    computed("QuantizeBias", True, SWITCH, "bias.type", _bias),
    computed("Int32Bias", True, SWITCH, "bias.type", _bias),
    computed("Int16Bias", False, SWITCH, "bias.type", _bias),
    always(
        "AdjustBiasScale",
        True,
        SWITCH,
        "a bias of 16 or 32 bits has the step of its layer's products.",
        refuse=(False,),
    ),
    always(
        "AdjustWeightScaleForInt32Bias",
        False,
        SWITCH,
        "a weight's scale grows where its bias would not fit into 32 bits.",
    ),
    computed("Int16Scale", False, SWITCH, "activations.scale, weights.scale", _int16_scale),
    computed("UsePowerOf2Scale", True, SWITCH, "activations.scale, weights.scale", _power_of_two),
    refused(
        "UseUnsignedReLU",
        False,
        "it belongs to the QOperator format.",
        "Use activation_type=QuantType.QUInt8.",
        SWITCH,
    ),
    refused(
        "QuantizeFP16",
        False,
        "float16 models become float32 models first, value by value, and are quantized then.",
        "Leave it out; for a float16 result use the preset FP16 or `roundel convert`.",
        SWITCH,
    ),
    always("UseFP32Scale", False, SWITCH, "scales are float32."),
    computed("WeightScaled", False, SWITCH, "weights.scaled", _scaled("weights")),
    computed("ActivationScaled", False, SWITCH, "activations.scaled", _scaled("activations")),
    computed("BF16QDQToCast", False, SWITCH, "floats.form", _form),
    computed("EnableVaimlBF16", False, SWITCH, "floats.form", _form),
    to_field("BF16WithClip", False, SWITCH, "floats.clip"),
    *(
        computed(option, {}, TABLE, "activations.type, weights.type, blocks.*", _blocks(option))
        for option in BLOCK_OPTIONS
    ),
    to_field("RefineBlockAxis", True, SWITCH, "blocks.refine_axis"),
)
