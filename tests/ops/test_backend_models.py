"""ONNX's own node tests, all of them: quantized, passed through with the reason, or refused; no crash."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase as BackendCase
from onnx.backend.test.loader import load_model_tests

import roundel
from roundel.recipe_file import load_recipe

CHUNKS = 16
RECIPE = load_recipe("a8w8", {"verify": {"samples": 1}})


@cache
def _cases() -> list[BackendCase]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases divide by zero on purpose
        return [*load_model_tests(kind="node"), *load_model_tests(kind="simple")]


def _model(case: BackendCase) -> onnx.ModelProto:
    return case.model if case.model is not None else onnx.load(Path(case.model_dir) / "model.onnx")


def _samples(case: BackendCase, model: onnx.ModelProto) -> list[dict[str, np.ndarray]] | None:
    """The case's own inputs, where all of them are plain arrays."""
    sets = [inputs for inputs, _ in case.data_sets or ()]
    if case.model_dir is not None:
        folders = sorted(Path(case.model_dir).glob("test_data_set_*"))
        sets = [
            [_tensor(folder / f"input_{i}.pb") for i in range(len(model.graph.input))] for folder in folders
        ]
    named = [dict(zip((v.name for v in model.graph.input), inputs, strict=False)) for inputs in sets]
    plain = all(isinstance(a, np.ndarray | np.generic) for sample in named for a in sample.values())
    return [{k: np.asarray(a) for k, a in sample.items()} for sample in named] if plain and named else None


def _tensor(path: Path) -> Any:
    tensor = onnx.TensorProto()
    if not path.exists():
        return None
    tensor.ParseFromString(path.read_bytes())
    return numpy_helper.to_array(tensor)


def _outcome(case: BackendCase) -> str:
    """What became of the model; raises where it is none of the three allowed outcomes."""
    model = _model(case)
    data = _samples(case, model) or roundel.RandomData()
    try:
        result = roundel.quantize(model, recipe=RECIPE, data=data, samples=1)
    except roundel.RoundelError as error:
        return "refused" if error.details() else "refused without any detail"
    record = result.record
    if record.quantized:
        assert any(n.op_type == "QuantizeLinear" or n.op_type == "DequantizeLinear" for n in result.ir.graph)
        return "quantized"
    assert any("nothing to quantize" in note for note in record.notes)
    assert len(record.float_nodes) == len(result.ir.graph), "a node was left in float without a reason"
    return "passed through"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_backend_models(chunk: int) -> None:
    outcomes: Counter[str] = Counter()
    crashes = []
    for case in _cases()[chunk::CHUNKS]:
        try:
            outcomes[_outcome(case)] += 1
        except Exception as error:  # noqa: BLE001  whatever it is, the report must name the model
            crashes.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not crashes, "\n".join(crashes)
    # Each chunk is a fair sample of the whole; a sweep in which nothing is quantized proves nothing.
    assert outcomes.keys() == {"quantized", "passed through", "refused"}
    assert outcomes["quantized"] > 15
    assert outcomes["passed through"] > 15
