"""ONNX's own node tests, all of them: quantized, passed through with the reason, or refused; no crash.

`scripts/backend_models.py` does the same for every integer preset; here, each model meets one of them.
"""

from __future__ import annotations

from collections import Counter

import pytest

from backend_cases import cases, light_cases, outcome
from roundel.recipe.load import load_recipe

CHUNKS = 16
LIGHT = ("inception_v1", "shufflenet", "squeezenet")
OTHERS = ("xint8", "a16w8", "u8u8_aawa", "s16s8_asws", "uint8_dynamic_quant", "matmul_nbits")


def swept(chunk: int, preset: str) -> Counter[str]:
    recipe = load_recipe(preset, {"verify": {"samples": 1}})
    outcomes: Counter[str] = Counter()
    crashes = []
    for case in cases()[chunk::CHUNKS]:
        what, why = outcome(case, recipe)
        outcomes[what] += 1
        if what == "crashed":
            crashes.append(f"{case.name}: {why}")
    assert not crashes, "\n".join(crashes)
    return outcomes


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_backend_models(chunk: int) -> None:
    outcomes = swept(chunk, "a8w8")
    # Each chunk is a fair sample of the whole; a sweep in which nothing is quantized proves nothing.
    assert outcomes.keys() == {"quantized", "passed through", "refused"}
    assert outcomes["quantized"] > 15
    assert outcomes["passed through"] > 15


@pytest.mark.parametrize(("chunk", "preset"), list(enumerate(OTHERS)))
def test_backend_models_with_other_presets(chunk: int, preset: str) -> None:
    outcomes = swept(chunk, preset)
    assert outcomes["passed through"] + outcomes["quantized"] > 40
    # The models have their weights as inputs: modes that want constants pass them through.
    assert outcomes["quantized"] > 10 or load_recipe(preset).mode != "static"


@pytest.mark.parametrize("preset", ["xint8", "a8w8"])
@pytest.mark.parametrize("name", LIGHT)
def test_networks_with_weights_of_one_value(name: str, preset: str) -> None:
    """Activations grow from layer to layer, up to 1e12: positions have far to go."""
    (case,) = (case for case in light_cases() if case.model_name == name)
    assert outcome(case, load_recipe(preset, {"effort": "none"})) == ("quantized", "")
