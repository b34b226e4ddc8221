"""The rules that are a run's gate: what they refuse in a written model, and in the check of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import roundel
from roundel.errors import VerifyError
from roundel.recipe.load import load_recipe
from roundel.rules import check
from roundel.rules.written import check_written, errors_of


def _written(model: onnx.ModelProto, preset: str) -> Any:
    return roundel.quantize(model, recipe=preset, data=roundel.RandomData(), samples=2)


def _quantized(result: Any) -> set[str]:
    return {node.name for node in result.plan.nodes.values() if node.quantized}


def _constant(model: onnx.ModelProto, name: str, array: Any) -> None:
    old = next(t for t in model.graph.initializer if t.name == name)
    old.CopyFrom(numpy_helper.from_array(np.asarray(array), name))


def _pair(model: onnx.ModelProto, tensor: str) -> list[onnx.NodeProto]:
    """The Q and DQ of an activation, or the DQ of a constant."""
    return [n for n in model.graph.node if n.name.startswith(f"{tensor}_") and "Linear" in n.op_type]


def _scaled(factor: float) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        name = _pair(model, "image")[0].input[1]
        _constant(model, name, np.float32(factor))

    return change


def _computed(model: onnx.ModelProto) -> None:
    scale = _pair(model, "image")[0].input[1]
    model.graph.node.insert(0, helper.make_node("Abs", [scale], ["later"], "abs"))
    for node in _pair(model, "image"):
        node.input[1] = "later"


def _uneven(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "other"))
    _pair(model, "image")[1].input[1] = "other"


def _far_weight(model: onnx.ModelProto) -> None:
    _constant(model, _pair(model, "w0")[0].input[1], np.float32(2.0**-40))


def _many_zeros(model: onnx.ModelProto) -> None:
    node = _pair(model, "w0")[0]
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.int8), "zeros"))
    node.input[2] = "zeros"


CASES = [
    ("Q01", _scaled(0.3)),
    ("Q07", _far_weight),
    ("Q12", _uneven),
    ("Q13", _scaled(0.0)),
    ("Q13", _scaled(-1.0)),
    ("Q13", _scaled(np.inf)),
    ("Q13", _scaled(2.0**-140)),
    ("Q13", _computed),
    ("Q14", _many_zeros),
]


@pytest.mark.parametrize(("rule", "change"), CASES)
def test_gate_and_check_refuse_the_same(
    clean: Any, rule: str, change: Callable[[onnx.ModelProto], None]
) -> None:
    result, recipe = _written(clean.proto(), "xint8"), load_recipe("xint8")
    assert not list(errors_of(result.ir, recipe, _quantized(result)))
    model = result.model
    change(model)
    broken = ir.from_proto(model)
    assert rule in {found.rule for found in errors_of(broken, recipe, _quantized(result))}
    with pytest.raises(VerifyError, match="rule Q"):
        check_written(broken, recipe, _quantized(result))
    assert rule in {found.rule for found in check(model, preset="xint8").findings}


def test_only_limits_that_the_recipe_asks_for_are_the_gates(clean: Any) -> None:
    result = _written(clean.proto(), "xint8")
    model = result.model
    _far_weight(model)
    broken = ir.from_proto(model)
    free = load_recipe("xint8", {"npu.adjust_shift_cut": False, "npu.adjust_shift_bias": False})
    assert not list(errors_of(broken, free, _quantized(result)))
    assert not list(errors_of(broken, load_recipe("xint8"), ()))  # the plan quantizes nothing: not its limits


def test_float_scales_are_legal_where_the_recipe_has_them(clean: Any) -> None:
    for preset in ("a8w8", "a16w8", "s8s8_aaws"):
        result = _written(clean.proto(), preset)
        assert not list(errors_of(result.ir, load_recipe(preset), _quantized(result)))


def test_a_bias_of_zeros_may_have_any_scale(clean: Any) -> None:
    net = clean
    names = [name for name, tensor in net.weights.items() if list(tensor.dims) == [8]]
    for name in names:
        net.const(np.zeros(8, np.float32), name)
    net.const(net.array("w0") * 1e-38, "w0")
    result = _written(net.proto(), "a8w8")
    assert not list(errors_of(result.ir, load_recipe("a8w8"), _quantized(result)))


def test_judging_changes_nothing(clean: Any) -> None:
    result = _written(clean.proto(), "xint8")
    before = ir.to_proto(result.ir).SerializeToString()
    list(errors_of(result.ir, load_recipe("xint8"), _quantized(result)))
    assert ir.to_proto(result.ir).SerializeToString() == before


@pytest.mark.parametrize("option", ["softmax", "instance_norm"])
def test_two_pairs_on_one_tensor_are_not_one_uneven_pair(make: Any, option: str) -> None:
    net = make()
    net.conv()
    if option == "softmax":
        net.add("Softmax", axis=1)
    else:
        net.add("InstanceNormalization", net.x, net.weight(8), net.weight(8))
    net.conv()
    data = roundel.RandomData()
    result = roundel.quantize(
        net.proto(), recipe="xint8", data=data, samples=2, changes={f"npu.{option}": True}
    )
    assert "Q12" not in {found.rule for found in check(result.model, preset="xint8").findings}
