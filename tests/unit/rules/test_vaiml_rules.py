"""P27 to P31 and Q17: what the BF16 compiler is known to leave to the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import roundel
from roundel import RandomData
from roundel.rules import Severity, check

OURS = {"P27", "P28", "P29", "P30", "P31", "Q17"}


def _model(
    nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **weights: Any
) -> onnx.ModelProto:
    """Tensors as name: (type, shape)."""
    ins, outs = (
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in values.items()]
        for values in (inputs, outputs)
    )
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", ins, outs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _found(model: Any, preset: str = "bf16") -> dict[str, Any]:
    return {f.rule: f for f in check(model, preset=preset, device="stx").findings if f.rule in OURS}


FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
BIG = [1, 8, 16, 16]


def test_clean_and_for_bf16_only(make: Any) -> None:
    net = make()
    net.conv()
    net.conv()
    assert not _found(net.proto())


def test_boolean_select() -> None:
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["a"], name="a"),
        helper.make_node("Where", ["a", "b", "a"], ["c"], name="select"),
        helper.make_node("Cast", ["c"], ["y"], to=FLOAT, name="cast"),
    ]
    model = _model(nodes, {"x": (FLOAT, BIG), "b": (BOOL, BIG)}, {"y": (FLOAT, BIG)}, zero=np.float32(0))
    found = _found(model)
    assert found["P27"].subject == "select"
    assert "tosa.select : i1" in found["P27"].why


def test_a_select_between_numbers_is_fine() -> None:
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["a"], name="a"),
        helper.make_node("Where", ["a", "x", "zero"], ["y"], name="select"),
    ]
    assert not _found(_model(nodes, {"x": (FLOAT, BIG)}, {"y": (FLOAT, BIG)}, zero=np.float32(0)))


@pytest.mark.parametrize(("shape", "hit"), [([1, 4], True), ([], False)])
def test_lookup(shape: list[int], hit: bool) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["r"], name="words"),
        helper.make_node("Relu", ["r"], ["y"]),
    ]
    out = (FLOAT, [*shape, 200])
    found = _found(_model(nodes, {"i": (INT64, shape)}, {"y": out}, table=np.ones((30, 200), np.float32)))
    assert ("P28" in found) is hit
    assert not hit or found["P28"].severity is Severity.WARNING


def test_transpose_at_the_edge_only(make: Any) -> None:
    first = make((1, 16, 16, 8))
    first.add("Transpose", perm=[0, 3, 1, 2])
    first.conv()
    first.conv()
    assert "behind the input 'image'" in _found(first.proto())["P29"].message
    inside = make()
    inside.conv()
    inside.add("Transpose", perm=[0, 1, 3, 2])
    inside.conv()
    assert not _found(inside.proto())


def test_reshapes() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "s"], ["r"], name="reshape"),
        helper.make_node("NonMaxSuppression", ["r", "scores"], ["y"], name="nms"),
    ]
    ins = {"x": (FLOAT, [1, 4, 40]), "scores": (FLOAT, [1, 1, 40])}
    found = _found(_model(nodes, ins, {"y": (INT64, ["n", 3])}, s=np.asarray([1, 40, 4])))
    assert "NonMaxSuppression" in found["P30"].message


def test_small_edges(make: Any) -> None:
    net = make().classifier()  # four classes
    found = _found(net.proto())["P31"]
    assert (found.severity, "4 elements" in found.message) == (Severity.NOTE, True)


@pytest.mark.parametrize(("preset", "hit"), [("vint8", False), ("xint8", True), ("a8w8", True)])
def test_pairs_that_the_compiler_cannot_match(make: Any, preset: str, hit: bool) -> None:
    """int8 around 0 with powers of two is matched; uint8 around 128 and other scales are not."""
    net = make()
    net.conv()
    net.conv()
    done = roundel.quantize(net.proto(), preset=preset, data=RandomData(2), effort="none")
    found = _found(done.model)
    assert ("Q17" in found) is hit
    assert not {f.rule for f in check(done.model, device="stx").findings} & OURS, (
        "the integer compiler's file"
    )
