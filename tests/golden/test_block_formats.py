"""Bit for bit what AMD's own library makes of the same tensors; `bench/formats.py --golden` made the file."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from helpers import saturated_float16
from roundel.numerics.floats import round_bfloat16
from roundel.qdq.functions import attach
from roundel.qdq.functions.blocks import BlockFormat, read_format, written
from roundel.qdq.nodes import QUARK

FILE = np.load(Path(__file__).with_name("block_formats.npz"))
INDEX: dict[str, list[dict[str, Any]]] = json.loads(FILE["index"].tobytes())
CASES = list(enumerate(INDEX["cases"]))
PAIRS = list(enumerate(INDEX["pairs"]))
TENSORS = list(enumerate(INDEX["tensors"]))
LEVELS = [ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL]


def case_name(case: tuple[int, dict[str, Any]]) -> str:
    return str(case[1].get("name") or f"{case[1]['type']} {case[1]['scale']}")


def assert_same_bits(got: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    """A NaN is a NaN, whatever its sign and payload."""
    invalid = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), invalid, what)
    np.testing.assert_array_equal(got[~invalid].view(np.uint32), expected[~invalid].view(np.uint32), what)


def node_of(case: dict[str, Any], axis: int) -> ir.Node:
    attributes = ir.convenience.convert_attributes({**case["attributes"], "axis": axis})
    return ir.Node(QUARK, case["op"], [], attributes=attributes, num_outputs=1, name="node")


def form_of(case: dict[str, Any]) -> BlockFormat:
    return read_format(node_of(case, 1))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_numerics(case: tuple[int, dict[str, Any]]) -> None:
    number, what = case
    for i, tensor in TENSORS:
        x = FILE[f"x{i}"]
        axis = 0 if x.ndim == 1 else tensor["axis"]
        assert_same_bits(form_of(what).apply(x, axis), FILE[f"y{number}_{i}"], tensor["name"])


@cache
def session(number: int, axis: int, rank: int, level: Any, opset: int) -> ort.InferenceSession:
    """One node with its function body; open dimensions, so that it serves all tensors of a rank."""
    case = INDEX["cases"][number]
    node = helper.make_node(case["op"], ["x"], ["y"], "node", domain=QUARK, axis=axis, **case["attributes"])
    shape = [f"d{i}" for i in range(rank)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(QUARK, 1)]
    return started(helper.make_model(graph, opset_imports=imports, ir_version=8), level)


def started(bare: onnx.ModelProto, level: Any) -> ort.InferenceSession:
    model = ir.to_proto(attach(ir.from_proto(bare)))
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_functions(case: tuple[int, dict[str, Any]]) -> None:
    number, what = case
    opset = 17 if number % 2 else 18  # reductions take their axes in another way from 18 on
    levels = LEVELS if what["name"] in ("bfp16", "mx9", "mxfp8e4m3", "mxint8") else LEVELS[number % 2 :][:1]
    for (i, tensor), level in itertools.product(TENSORS, levels):
        x = FILE[f"x{i}"]
        got = session(number, tensor["axis"], x.ndim, level, opset).run(None, {"x": x})[0]
        assert_same_bits(got, FILE[f"y{number}_{i}"], tensor["name"])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_attributes_return(case: tuple[int, dict[str, Any]]) -> None:
    form = form_of(case[1])
    attributes = ir.convenience.convert_attributes(written(form, 2))
    again = ir.Node(QUARK, case[1]["op"], [], attributes=attributes, num_outputs=1)
    assert read_format(again) == form


def pair_session(kind: str, scale: float, rank: int) -> ort.InferenceSession:
    ends = ["s", "z"]
    nodes = [
        helper.make_node("ExtendedQuantizeLinear", ["x", *ends], ["q"], domain=QUARK),
        helper.make_node("ExtendedDequantizeLinear", ["q", *ends], ["y"], domain=QUARK),
    ]
    shape = [f"d{i}" for i in range(rank)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    constants = [
        helper.make_tensor("s", TensorProto.FLOAT, [], [scale]),
        helper.make_tensor("z", getattr(TensorProto, kind), [], [0.0]),
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(QUARK, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    return started(model, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


@pytest.mark.parametrize("pair", PAIRS, ids=case_name)
def test_pairs(pair: tuple[int, dict[str, Any]]) -> None:
    number, what = pair
    scale = np.float32(what["scale"])
    for i, tensor in TENSORS:
        x, expected = FILE[f"x{i}"], FILE[f"p{number}_{i}"]
        got = pair_session(what["type"], what["scale"], x.ndim).run(None, {"x": x})[0]
        assert_same_bits(got, expected, tensor["name"])
        with np.errstate(all="ignore"):
            if what["type"] == "FLOAT16":
                computed = saturated_float16(x)
            else:
                computed = round_bfloat16(x / scale + np.float32(0)) * scale
        assert_same_bits(computed, expected, tensor["name"])
