"""The plan of the embedded example, preset by preset, against the files beside this test.

After a change that is meant: `pytest tests/golden --regenerate`, then read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from roundel.example import load_example
from roundel.plan import QuantPlan, build_plan
from roundel.recipe.load import load_recipe
from roundel.stages import prepare as load_prepared

HERE = Path(__file__).parent
PRESETS = ("a8w8", "a16w8", "s8s8_aaws", "u8s8_aaws", "int8_transformer_default")


def _text(plan: QuantPlan) -> str:
    """One line for each node and tensor: small enough to read in a difference."""
    lines = ["nodes"]
    lines += [f"  {n.name} [{n.op}]: {n.reason}" for n in plan.nodes.values()]
    lines += ["", "tensors"]
    for t in plan.tensors.values():
        lines.append(f"  {t.name}: {t.role.value}, {t.scheme}; {t.source}; by {t.decided_by}: {t.reason}")
    lines += ["", "kept in float"]
    lines += [f"  {name}: {why}" for name, why in plan.kept_float.items()]
    lines += ["", f"folded: {', '.join(plan.folded) or 'none'}", ""]
    return "\n".join(lines)


@pytest.mark.parametrize("preset", PRESETS)
def test_plan(preset: str, request: pytest.FixtureRequest) -> None:
    recipe = load_recipe(preset)
    text = _text(build_plan(load_prepared(load_example().model_path, recipe).model, recipe))
    file = HERE / f"{preset}.txt"
    if request.config.getoption("--regenerate"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "run with --regenerate if the change is meant"
