"""The plan and the graph of the embedded example, preset by preset, against the files beside this test.

After a change that is meant: `pytest tests/golden --regenerate`, then read the difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

import roundel
from golden.behaviour import HEADLINE, differences, observed, plan_text
from roundel.example import load_example
from roundel.model.graph import constant_array, op_key
from roundel.plan import build_plan
from roundel.recipe.load import load_recipe
from roundel.stages import prepare

HERE = Path(__file__).parent
PRESETS = ("xint8", "bf16", "a8w8", "a16w8", "s8s8_aaws", "u8s8_aaws", "int8_transformer_default")


@pytest.mark.parametrize("preset", PRESETS)
def test_plan(preset: str, request: pytest.FixtureRequest) -> None:
    recipe = load_recipe(preset)
    text = plan_text(build_plan(prepare(load_example().model_path, recipe).model, recipe))
    file = HERE / f"{preset}.txt"
    if request.config.getoption("--regenerate"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "run with --regenerate if the change is meant"


def _value(value: ir.Value | None) -> str:
    """A tensor's name; a scale or zero point as a short number, alike on every machine."""
    array = constant_array(value)
    if value is None or array is None or array.size != 1 or array.ndim:
        return "-" if value is None else str(value.name)
    return f"{float(array):.4g}"


def _graph_text(graph: ir.Graph) -> str:
    """One line for each node, weights left out."""
    lines = []
    for node in graph:
        attributes = " ".join(f"{name}={attr.value}" for name, attr in sorted(node.attributes.items()))
        given, made = (", ".join(map(_value, values)) for values in (node.inputs, node.outputs))
        lines.append(f"{op_key(node)} ({given}) -> {made} {attributes}".rstrip())
    return "\n".join([*lines, ""])


@pytest.mark.parametrize("preset", ["xint8_plain", "a8w8_minmax", "a16w8_minmax", "bf16"])
def test_graph(preset: str, request: pytest.FixtureRequest) -> None:
    example = load_example()
    result = roundel.quantize(
        str(example.model_path), recipe=preset, data=example.calibration[:4], effort="none"
    )
    text = _graph_text(ir.from_proto(result.model).graph)
    file = HERE / f"{preset}.graph.txt"
    if request.config.getoption("--regenerate"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "run with --regenerate if the change is meant"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_the_lock_leaves_the_threads_of_other_tests_alone(name: str) -> None:
    code = f"import os, golden.behaviour; print({name!r} in os.environ)"
    bare = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=HERE.parent, env=bare, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("preset", HEADLINE)
def test_the_behaviour_lock_holds_for_the_example(preset: str) -> None:
    case = ("example", "digits", preset)
    assert differences([case], [observed(case)]) == []
