"""A row of the operator table, or of the NPU's, is all that a new operator needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roundel.calibrate.resolve import reader_functions
from roundel.model.load import load_model
from roundel.plan import build_plan
from roundel.recipe.load import load_recipe
from roundel.rules import Place, check
from roundel.stages import prepare
from roundel.targets import npu
from roundel.targets.operators import OPERATORS, Operator, Trait, ops_with


def _with_mish(make: Any) -> Any:
    net = make(opset=18)
    net.conv()
    net.add("Mish")
    net.conv()
    return net.proto()


def _places(model: Any) -> dict[str, Place]:
    return {node.op: node.place for node in check(model, preset="a8w8", device="stx").before.nodes}


def test_plan_and_check_follow_a_row(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = _with_mish(make), load_recipe("a8w8")
    graph = prepare(model, recipe).model
    mish = next(node for node in graph.graph if node.op_type == "Mish")
    assert not build_plan(graph, recipe).nodes[str(mish.name)].quantized
    assert not reader_functions(load_model(model).model.graph)
    assert _places(model)["Mish"] is Place.CPU

    def function(x: Any) -> Any:
        return x * np.tanh(np.log1p(np.exp(x)))

    row = Operator(
        "Mish", (0,), sets=("extended", "standard"), traits=Trait.NONLINEAR, bounds=(-1, 9), function=function
    )
    monkeypatch.setitem(OPERATORS, "Mish", row)
    plan = build_plan(graph, recipe)
    assert plan.nodes[str(mish.name)].quantized
    assert mish.outputs[0].name in plan.tensors
    assert list(reader_functions(load_model(model).model.graph)) == [mish.inputs[0].name]
    # AMD's table leaves it out; a row there brings it to the NPU.
    assert _places(model)["Mish"] is Place.CPU
    known = npu.TableException("Mish", frozenset({npu.Format.A8W8}), True, "seen on the NPU")
    monkeypatch.setattr(npu, "EXCEPTIONS", (*npu.EXCEPTIONS, known))
    assert _places(model)["Mish"] is Place.NPU


def test_rows_agree_with_each_other() -> None:
    layers = ops_with(Trait.LAYER)
    assert layers == ops_with(Trait.CONV) | ops_with(Trait.MATRIX)
    for op, row in OPERATORS.items():
        assert row.op == op
        assert (op in layers) == (row.channel_axis is not None)
        if row.bounds is not None and row.function is not None:
            low, high = row.bounds
            made = row.function(np.linspace(-30, 30, 601), **row.attributes)
            assert low <= made.min()
            assert made.max() <= high
        if row.output_range is not None:
            assert row.output_range == row.bounds
