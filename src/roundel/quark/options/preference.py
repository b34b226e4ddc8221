"""The one option that stands for several; those that are given by themselves win over it."""

from __future__ import annotations

from typing import Any

from roundel.quark.request import Request
from roundel.quark.rows import Effect, Kind, Option, computed

_PREFERENCES = ("accuracy", "speed", "resource_efficiency")
_PREFERENCE = Kind(" or ".join(map(repr, _PREFERENCES)), lambda v: v in _PREFERENCES)


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


PREFERENCE: tuple[Option, ...] = (
    computed("QuantizationPreference", None, _PREFERENCE, "improve.*, calibration.mode", _preference),
)
