"""Every operator of the tables, alone in a model: what is stored how, and how close the result stays."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import activations, assert_sound, build, node, ops, quantize, sqnr, weights
from ops.operator_cases import CASES, Case
from roundel.recipe.load import load_recipe
from roundel.targets.operators import operator_set

PRESETS = ("a8w8", "a16w8", "u8s8_aaws", "s8s8_aaws")

# Least signal to noise in dB: with 8-bit activations, with 16-bit activations (and 8-bit weights).
TOLERANCE = {
    "Add": (36, 80),
    "ArgMax": (np.inf, np.inf),
    "AveragePool": (32, 80),
    "Clip": (33, 44),
    "Concat": (36, 48),
    "Conv": (34, 40),
    "ConvTranspose": (34, 40),
    "DepthToSpace": (38, 85),
    "Div": (29, 75),
    "EmbedLayerNormalization": (36, 40),
    "Erf": (38, 85),
    "Gather": (38, 44),
    "Gelu": (34, 80),
    "Gemm": (36, 40),
    "GlobalAveragePool": (40, 85),
    "HardSigmoid": (43, 90),
    "InstanceNormalization": (37, 50),
    "LayerNormalization": (35, 44),
    "LeakyRelu": (37, 85),
    "LpNormalization": (38, 85),
    "MatMul": (34, 39),
    "Max": (37, 84),
    "MaxPool": (40, 88),
    "Min": (37, 84),
    "Mul": (32, 80),
    "PRelu": (35, 60),
    "Pad": (36, 83),
    "ReduceMean": (40, 85),
    "Relu": (35, 44),
    "Reshape": (38, 85),
    "Resize": (33, 80),
    "Sigmoid": (43, 90),
    "Slice": (38, 85),
    "Softmax": (29, 77),
    "SpaceToDepth": (38, 85),
    "Split": (36, 84),
    "Squeeze": (40, 88),
    "Sub": (36, 80),
    "Tanh": (38, 85),
    "Transpose": (38, 85),
    "Unsqueeze": (40, 88),
    "Where": (38, 85),
}

by_preset = pytest.mark.parametrize("preset", PRESETS)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_operator_has_a_case_and_a_tolerance() -> None:
    assert {case.op for case in CASES} == operator_set("extended").keys() == TOLERANCE.keys()


@by_preset
@by_case
def test_operator(case: Case, preset: str) -> None:
    model, data = case.model(), case.data()
    recipe = load_recipe(preset)
    result = quantize(model, preset, data, prepare={"split_to_slice": False})
    assert_sound(model, result.model)
    if recipe.placement.operators == "standard" and case.op not in operator_set("standard"):
        assert activations(result.model).keys() <= {"x"} if case.follows else not result.record.quantized
        assert "not in the operator table" in result.record.float_nodes[case.op]
        return
    folded = case.folds and recipe.placement.fold_relu
    stored = activations(result.model)
    assert stored.keys() == set(case.activations.split()) - ({"c"} if folded else set())
    assert ops(result.model).count(case.op) == (0 if folded else 1)
    domain = "" if recipe.placement.domain == "ai.onnx" else recipe.placement.domain
    assert {s.domain for s in stored.values()} == {domain}
    assert {s.dtype for s in stored.values()} == {_expected_type(case, preset)}
    _check_constants(case, preset, result.model)
    assert sqnr(model, result, data) >= TOLERANCE[case.op][preset == "a16w8"]


def _expected_type(case: Case, preset: str) -> str:
    """Rows of a table keep the table's type; all other activations have the recipe's."""
    recipe = load_recipe(preset)
    return recipe.weights.type if case.name == "Gather-table" else recipe.activations.type


def _check_constants(case: Case, preset: str, model: object) -> None:
    recipe = load_recipe(preset)
    constants, stored = weights(model), activations(model)
    assert constants.keys() == set(case.weights.split())
    for name, constant in constants.items():
        if name == "b" and case.op in ("Conv", "ConvTranspose", "Gemm", "InstanceNormalization"):
            assert constant.dtype == "int32"
        elif recipe.placement.constants_as_activations and case.op in (
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Min",
            "Max",
        ):
            assert constant.dtype == recipe.activations.type
        else:
            assert constant.dtype == "int8"
        assert not constant.zero_point.any()
        if constant.dtype == "int8":
            assert constant.codes.min() >= -127, "weights use the symmetric codes only"
    if case.bias is not None:
        factor = case.attributes.get("alpha", 1.0) / case.attributes.get("beta", 1.0)
        weight = "s" if "s" in constants else "w"
        product = np.float64(stored["x"].scale) * constants[weight].scale * factor
        assert constants[case.bias].scale == np.float32(product)


WITH_CHANNELS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1, "MatMul": -1}


@pytest.mark.parametrize("preset", ["a8w8", "u8s8_aaws"])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.op in WITH_CHANNELS and "w" in case.constants],
    ids=lambda case: case.name,
)
def test_per_channel(case: Case, preset: str) -> None:
    model, data = case.model(), case.data()
    result = quantize(model, preset, data, weights={"per_channel": True})
    assert_sound(model, result.model)
    constants = weights(result.model)
    weight, content = constants["w"], np.asarray(case.constants["w"])
    axis = 0 if case.attributes.get("transB") else WITH_CHANNELS[case.op]
    if content.ndim < 2 or case.variant == "constant-left":
        assert weight.scale.shape == ()
    else:
        axis %= content.ndim
        rest = tuple(i for i in range(content.ndim) if i != axis)
        assert weight.axis == axis
        np.testing.assert_allclose(weight.scale, np.abs(content).max(rest) / 127, rtol=1e-6)
    if case.bias is not None:
        groups = case.attributes.get("group", 1) if case.op == "ConvTranspose" else 1
        factor = case.attributes.get("alpha", 1.0) / case.attributes.get("beta", 1.0)
        product = activations(result.model)["x"].scale.astype(np.float64) * weight.scale * factor
        np.testing.assert_array_equal(constants["b"].scale, np.tile(np.float32(product), groups))
    elif "b" in constants:
        assert constants["b"].scale.shape in ((), np.shape(case.constants["b"]))
    assert sqnr(model, result, data) >= TOLERANCE[case.op][0]


def test_hard_sigmoid_of_another_slope_stays_float() -> None:
    case = Case("HardSigmoid", "", "x", {"x": (4, 16)}, attributes={"alpha": 0.2})
    result = quantize(case.model(), "a8w8", case.data())
    assert not result.record.quantized
    assert result.record.float_nodes == {"HardSigmoid": "HardSigmoid other than alpha 1/6, beta 1/2"}


@by_preset
def test_softmax_has_its_full_range_whatever_the_data(preset: str) -> None:
    case = Case("Softmax", "", "x", {"x": (4, 16)})
    tiny = [{"x": 1e-3 * feed["x"]} for feed in case.data()]
    stored = activations(quantize(case.model(), preset, tiny).model)["y"]
    limits = np.iinfo(stored.dtype)
    top = (limits.max - float(stored.zero_point)) * float(stored.scale)
    assert top == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("preset", ["a8w8", "a16w8"])
def test_concat_joins_in_one_scale_that_holds_all(preset: str) -> None:
    case = Case(
        "Concat", "", "x z c", {"x": (2, 4), "z": (2, 4)}, {"c": np.full((2, 4), 9, np.float32)}, {"axis": 1}
    )
    data = [{"x": feed["x"], "z": 5 * feed["z"]} for feed in case.data()]
    model = quantize(case.model(), preset, data).model
    stored = activations(model)
    scales = [stored[name].scale for name in "xzy"]
    if preset == "a8w8":  # of the same type as the constant
        scales.append(weights(model)["c"].scale)
    assert len(set(map(float, scales))) == 1
    reach = max(9.0, *(np.abs(5 * feed["z"]).max() for feed in case.data()))
    assert scales[0] == pytest.approx(reach / np.iinfo(stored["x"].dtype).max, rel=1e-6)


def test_concat_with_a_softmax_is_aligned_too() -> None:
    nodes = [
        node("Softmax", ["x"], ["p"]),
        node("Concat", ["p", "z"], ["y"], axis=1),
    ]
    model = build(nodes, {"x": [2, 4], "z": [2, 4]}, ["y"])
    stored = activations(quantize(model).model)
    assert stored["p"].scale == stored["z"].scale == stored["y"].scale
