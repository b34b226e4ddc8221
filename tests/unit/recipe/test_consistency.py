"""A setting that the element types leave without effect is refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

import roundel
from roundel.recipe.load import load_recipe

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bf16", {"activations": {"symmetric": False}}, "activations.symmetric means integers"),
    ("bf16", {"activations": {"scale": "power_of_two"}}, "activations.scale means integers"),
    ("bf16", {"weights": {"per_channel": True}}, "weights.per_channel means integers"),
    ("bf16", {"weights": {"method": "mse"}}, "weights.method means integers"),
    ("bf16", {"weights": {"reduce_range": True}}, "weights.reduce_range means integers"),
    ("bf16", {"placement": {"domain": "com.microsoft"}}, "placement.domain is of integer"),
    ("bf16", {"placement": {"fold_relu": True}}, "need saturation"),
    ("bf16", {"npu": {"clip_to_relu": True}}, "need saturation"),
    ("bf16", {"placement": {"align_concat": True}}, "placement.align_concat aligns scales"),
    ("bf16", {"mode": "dynamic"}, "mode dynamic needs integers"),
    ("bf16", {"bias": {"type": "int32"}}, "bias.type int32 needs integer"),
    ("bf16", {"bias": {"type": "int8"}}, "bias.type int8 needs integer weights"),
    ("bf16", {"calibration": {"method": "percentile"}}, "calibration has nothing to do"),
    (
        "bf16",
        {"activations": {"scaled": True}, "calibration": {"method": "mse"}},
        "searches integer codes",
    ),
    ("bf16", {"effort": "fast", "improve": {"rounding": True}}, "improve.rounding works on integers"),
    (
        "bf16",
        {"effort": "high", "improve": {"finetune": {"algorithm": "adaround"}}},
        "AdaRound rounds integer codes",
    ),
    ("bf16", {"effort": "high", "improve": {"ranges": True}}, "improve.ranges works on integers"),
    ("mx9_int8", {"effort": "fast"}, "improve.rounding works on integers"),
    ("bf16", {"floats": {"form": "plain", "clip": True}}, "no place for a scale or a clip"),
    ("vaiml_bf16", {"weights": {"scaled": True}}, "no place for a scale or a clip"),
    ("bf16_cast", {"output": {"strip_functions": True}}, "this recipe writes none"),
    ("a8w8", {"floats": {"form": "cast"}}, "the section 'floats' means bfloat16"),
    ("a8w8", {"output": {"half_weights": True}}, "needs bfloat16 or float16 weights"),
    ("a8w8", {"output": {"strip_functions": True}}, "this recipe writes none"),
    ("a8w8", {"activations": {"scaled": True}}, "activations.scaled means bfloat16"),
    ("a8w8", {"weights": {"scaled": True}}, "weights.scaled means bfloat16"),
    (
        "a8w8",
        {"overrides": [{"tensors": ["x"], "type": "bfloat16", "symmetric": False}]},
        "do not apply to bfloat16",
    ),
]


@pytest.mark.parametrize(("preset", "changes", "reason"), REFUSED)
def test_it_is_refused(preset: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(roundel.RecipeError) as caught:
        load_recipe(preset, changes)
    assert reason in str(caught.value)


def test_scaled_floats_may_share_a_scale_and_choose_a_range() -> None:
    changes = {
        "activations": {"scaled": True},
        "placement": {"align_concat": True},
        "calibration": {"method": "percentile"},
    }
    assert load_recipe("bf16", changes).activations.scaled


def test_an_integer_override_gives_integer_words_a_meaning() -> None:
    changes = {"overrides": [{"tensors": ["w"], "type": "int8"}], "weights": {"method": "mse"}}
    assert load_recipe("bf16", changes).weights.method == "mse"
