"""ONNX's own test models, and what becomes of one: quantized, passed through with reasons, or refused."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase as BackendCase
from onnx.backend.test.loader import load_model_tests

import roundel

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")


@cache
def cases() -> list[BackendCase]:
    """Small models: of single operators, of graph features, and those that PyTorch exported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases divide by zero on purpose
        return [case for kind in KINDS for case in load_model_tests(kind=kind)]


@cache
def light_cases() -> list[BackendCase]:
    """Whole networks with real graphs, whose weights are made of one value each."""
    return [case for case in load_model_tests(kind="real") if "light" in (case.url or "")]


def model_of(case: BackendCase) -> onnx.ModelProto:
    """The case's model."""
    if case.model is not None:
        return case.model
    if case.model_dir is not None:
        return onnx.load(Path(case.model_dir) / "model.onnx")
    return onnx.load(Path(onnx.__file__).parents[1] / str(case.url))


def samples_of(case: BackendCase, model: onnx.ModelProto) -> list[dict[str, np.ndarray]] | None:
    """The case's own inputs, where all of them are plain arrays."""
    sets = [inputs for inputs, _ in case.data_sets or ()]
    if case.model_dir is not None:
        folders = sorted(Path(case.model_dir).glob("test_data_set_*"))
        sets = [
            [_tensor(folder / f"input_{i}.pb") for i in range(len(model.graph.input))] for folder in folders
        ]
    named = [dict(zip((v.name for v in model.graph.input), inputs, strict=False)) for inputs in sets]
    plain = all(isinstance(a, np.ndarray | np.generic) for sample in named for a in sample.values())
    if not plain or not named or not model.graph.input:
        return None
    return [{k: np.asarray(a) for k, a in sample.items()} for sample in named]


def _tensor(path: Path) -> Any:
    tensor = onnx.TensorProto()
    if not path.exists():
        return None
    tensor.ParseFromString(path.read_bytes())
    return numpy_helper.to_array(tensor)


def outcome(case: BackendCase, recipe: roundel.Recipe) -> tuple[str, str]:
    """What became of the model, and why where it was refused or worse."""
    model = model_of(case)
    data = samples_of(case, model) or roundel.RandomData()
    try:
        result = roundel.quantize(model, recipe=recipe, data=data, samples=1)
    except roundel.RoundelError as error:
        if not error.details() or "defect" in (error.hint or ""):
            return "crashed", f"{error.what} {error.observed}"[:200]
        return "refused", re.sub("'[^']*'", "'…'", error.what)
    except Exception as error:  # noqa: BLE001  whatever it is, the report must name the model
        return "crashed", f"{type(error).__name__}: {str(error)[:200]}"
    record, operators = result.record, {node.op_type for node in result.ir.graph}
    if record.quantized:
        if not operators & {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulNBits"}:
            return "crashed", "said to be quantized, and is not"
        return "quantized", ""
    if len(record.float_nodes) != len(result.ir.graph) and recipe.mode != "weight_only":
        return "crashed", "a node was left in float without a reason"
    return "passed through", ""
