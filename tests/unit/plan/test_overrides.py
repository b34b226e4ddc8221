"""The user's last word on single tensors and nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from helpers import activations, assert_sound, build, node, normal, plan_of, quantize, weights
from roundel.errors import RecipeError, SelectionError
from roundel.types import PerChannel, PerTensor


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        node("Tanh", ["c"], ["t"], name="tanh"),
        node("Transpose", ["t"], ["m"], name="move"),
        node("Conv", ["m", "v"], ["y"], name="last"),
    ]
    constants = {"w": normal(4, 3, 1, 1), "b": normal(4), "v": normal(2, 5, 1, 1)}
    return build(nodes, {"x": [1, 3, 5, 5]}, ["y"], constants)


def _quantize(model: onnx.ModelProto, *overrides: dict[str, Any], recipe: str = "a8w8") -> onnx.ModelProto:
    result = quantize(model, recipe, overrides=list(overrides)).model
    assert_sound(model, result)
    return result


def test_another_type(model: onnx.ModelProto) -> None:
    stored = activations(_quantize(model, {"tensors": ["c"], "type": "int16"}))
    assert stored["c"].dtype == "int16"
    assert {stored[name].dtype for name in ("x", "t", "m", "y")} == {"int8"}


def test_another_type_in_the_standard_dialect(model: onnx.ModelProto) -> None:
    """Only com.microsoft has 16-bit pairs at opset 17; the others stay in ai.onnx."""
    stored = activations(_quantize(model, {"tensors": ["c"], "type": "uint16"}, recipe="u8s8_aaws"))
    assert (stored["c"].domain, stored["x"].domain) == ("com.microsoft", "")


def test_float(model: onnx.ModelProto) -> None:
    result = _quantize(model, {"tensors": ["c", "w"], "type": "float"})
    assert "c" not in activations(result)
    assert "w" not in weights(result)
    assert "b" not in weights(result), "a bias has no scale when its weight has none"
    plan = plan_of(model, overrides=[{"tensors": ["c"], "type": "float"}])
    assert plan.kept_float["c"] == "overrides[0]: kept in float"


def test_range(model: onnx.ModelProto) -> None:
    stored = activations(_quantize(model, {"tensors": ["c"], "range": [-2.0, 6.35]}))
    assert stored["c"].scale == pytest.approx(6.35 / 127)


def test_the_range_of_a_weight(model: onnx.ModelProto) -> None:
    stored = weights(_quantize(model, {"tensors": ["w"], "range": [-12.7, 12.7]}))
    assert stored["w"].scale == pytest.approx(0.1)
    assert stored["b"].scale.shape == ()


def test_symmetry(model: onnx.ModelProto) -> None:
    result = _quantize(model, {"tensors": ["c"], "symmetric": True}, recipe="s8s8_aaws")
    assert int(activations(result)["c"].zero_point) == 0
    assert int(activations(result)["x"].zero_point) != 0


def test_per_channel_weight(model: onnx.ModelProto) -> None:
    stored = weights(_quantize(model, {"tensors": ["w"], "per_channel": True}))
    assert (stored["w"].scale.shape, stored["w"].axis) == ((4,), 0)
    assert stored["b"].scale.shape == (4,), "the bias follows its weight"
    assert stored["v"].scale.shape == ()


def test_per_tensor_weight_among_per_channel_ones(model: onnx.ModelProto) -> None:
    plan = plan_of(model, weights={"per_channel": True}, overrides=[{"tensors": ["v"], "per_channel": False}])
    assert plan.tensors["w"].scheme.granularity == PerChannel(0)
    assert plan.tensors["v"].scheme.granularity == PerTensor()


def test_activations_have_one_scale(model: onnx.ModelProto) -> None:
    with pytest.raises(SelectionError, match="not a constant"):
        plan_of(model, overrides=[{"tensors": ["c"], "per_channel": True}])


def test_a_pattern_takes_what_it_can(model: onnx.ModelProto) -> None:
    plan = plan_of(model, overrides=[{"tensors": ["*"], "per_channel": True}])
    assert plan.tensors["w"].scheme.granularity == PerChannel(0)
    assert plan.tensors["c"].scheme.granularity == PerTensor()
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["y"])]
    fused = build(nodes, {"x": [1, 3, 4, 4]}, ["y"], {"w": normal(4, 3, 1, 1)})
    assert "c" in plan_of(fused).kept_float
    plan = plan_of(fused, overrides=[{"tensors": ["[cxy]"], "type": "int16"}])
    assert {name: t.scheme.qtype.value for name, t in plan.tensors.items()} == {
        "x": "int16",
        "w": "int8",
        "y": "int16",
    }
    with pytest.raises(SelectionError, match="not quantized"):
        plan_of(fused, overrides=[{"tensors": ["[c]"], "type": "int16"}])


def test_nodes(model: onnx.ModelProto) -> None:
    result = _quantize(model, {"nodes": ["conv"], "type": "int16", "per_channel": True})
    stored, constants = activations(result), weights(result)
    assert {stored["x"].dtype, stored["c"].dtype} == {"int16"}
    assert {stored["t"].dtype, stored["y"].dtype} == {"int8"}
    assert constants["w"].dtype == "int8", "the type is that of the activations"
    assert constants["w"].scale.shape == (4,)
    assert constants["v"].scale.shape == ()


def test_a_member_leaves_its_group(model: onnx.ModelProto) -> None:
    """t and m share a scale; with another type m stands alone."""
    assert plan_of(model).leaders("m") == ("t",)
    plan = plan_of(model, overrides=[{"tensors": ["m"], "type": "int16"}])
    assert (plan.leaders("m"), plan.leaders("t")) == (("m",), ("t",))
    stored = activations(_quantize(model, {"tensors": ["m"], "type": "int16"}))
    assert (stored["t"].dtype, stored["m"].dtype) == ("int8", "int16")


def test_a_leader_leaves_its_group(model: onnx.ModelProto) -> None:
    stored = activations(_quantize(model, {"tensors": ["t"], "range": [-4.0, 4.0]}))
    assert stored["t"].scale == pytest.approx(4 / 127)
    assert stored["m"].scale < stored["t"].scale, "m has its own observed range"


def test_later_overrides_win(model: onnx.ModelProto) -> None:
    first, second = {"tensors": ["*"], "range": [-1.0, 1.0]}, {"tensors": ["c"], "range": [-2.0, 2.0]}
    chosen = [{**first, "tensors": ["x", "c"]}, second]
    stored = activations(_quantize(model, *chosen))
    assert stored["x"].scale == pytest.approx(1 / 127)
    assert stored["c"].scale == pytest.approx(2 / 127)


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ({"tensors": ["cc"], "type": "int16"}, "No tensor matches", "'c'"),
        ({"tensors": ["re:^z"], "type": "int16"}, "No tensor matches", "explain"),
        ({"nodes": ["convv"], "type": "int16"}, "No node or tensor", "conv"),
    ],
)
def test_overrides_of_nothing(
    model: onnx.ModelProto, override: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(SelectionError, match=message) as caught:
        plan_of(model, overrides=[override])
    assert "overrides[0]" in str(caught.value.where)
    assert hint in str(caught.value.hint)


def test_an_override_of_a_float_tensor_says_why_it_is_float() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["y"])]
    model = build(nodes, {"x": [1, 3, 4, 4]}, ["y"], {"w": normal(4, 3, 1, 1)})
    with pytest.raises(SelectionError) as caught:
        plan_of(model, overrides=[{"tensors": ["c"], "type": "int16"}])
    assert "compute as one" in str(caught.value.observed)


@pytest.mark.parametrize(
    "override",
    [{"type": "int8"}, {"tensors": ["x"]}, {"tensors": ["x"], "range": [1.0, 1.0]}],
)
def test_overrides_that_say_nothing(model: onnx.ModelProto, override: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        plan_of(model, overrides=[override])


def test_a_bias_of_another_type(model: onnx.ModelProto) -> None:
    stored = weights(_quantize(model, {"tensors": ["b"], "type": "int16"}))
    assert stored["b"].dtype in ("int16", "int32")
    np.testing.assert_allclose(stored["b"].real, normal(4), atol=float(stored["b"].scale.max()))
