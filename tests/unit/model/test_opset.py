"""Raising the opset keeps weights what they are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import roundel
from helpers import build, node, normal
from roundel.model.graph import input_specs, is_constant
from roundel.model.load import load_model


@pytest.mark.parametrize("opset", [11, 13, 15])
def test_large_weights_stay_constants(opset: int) -> None:
    model = build(
        [node("Conv", ["x", "w"], ["y"])],
        {"x": [1, 16, 8, 8]},
        ["y"],
        {"w": normal(64, 16, 3, 3)},
        opset=opset,
    )
    loaded = load_model(model)
    weight = next(iter(loaded.model.graph)).inputs[1]
    assert is_constant(weight)
    assert weight is not None
    assert not weight.is_graph_input()
    result = roundel.quantize(model, recipe="a8w8", data=[{"x": normal(1, 16, 8, 8)}])
    assert result.plan.tensors["w"].role.value == "weight"
    stored = {t.name: t for t in result.model.graph.initializer}
    assert stored["w_quantized"].data_type == ir.DataType.INT8.value


def test_a_negative_dimension_is_an_open_one() -> None:
    model = build([node("Relu", ["x"], ["y"])], {"x": [-1, 3]}, ["y"], {})
    (spec,) = input_specs(load_model(model).model)
    assert spec.shape == (None, 3)
    assert np.dtype(spec.dtype) == np.float32


def test_nodes_that_the_converter_adds_have_names_of_their_own() -> None:
    """Softmax of four axes was flattened before opset 13: the converter puts Flatten and Reshape around."""
    model = build([node("Softmax", ["x"], ["y"], "soft", axis=1)], {"x": [1, 2, 4, 4]}, ["y"], {}, opset=11)
    names = [str(n.name) for n in load_model(model).model.graph]
    assert len(names) > 1
    assert len(set(names)) == len(names)
    assert all(names)


@pytest.mark.parametrize("opset", [11, 13, 16])
def test_a_layer_norm_from_before_onnx_had_one(opset: int) -> None:
    """ONNX Runtime's optimizer writes it at any opset; ONNX knows it from 17 on."""
    nodes = [
        node("MatMul", ["x", "w"], ["m"], "times"),
        node("LayerNormalization", ["m", "s", "b"], ["y"], "norm", axis=-1),
    ]
    constants = {"w": normal(4, 4), "s": normal(4, seed=1), "b": normal(4, seed=2)}
    model = build(nodes, {"x": [2, 4]}, {"y": [2, 4]}, constants)
    model.opset_import[0].version = opset
    result = roundel.quantize(model, recipe="a8w8", data=[{"x": normal(2, 4)}])
    assert next(o.version for o in result.model.opset_import if not o.domain) == 17
    assert [n.op_type for n in result.ir.graph if "Linear" not in n.op_type] == [
        "MatMul",
        "LayerNormalization",
    ]
    assert not any("aside" in o.domain for o in result.model.opset_import)
