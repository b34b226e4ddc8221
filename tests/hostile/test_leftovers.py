"""Models that are odd but right: infinite masks, no inputs, operators that only ONNX Runtime knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import roundel
from helpers import build, feeds, node, normal
from roundel.errors import DataError


def masked() -> onnx.ModelProto:
    """The largest of some scores, the others hidden by minus infinity that is computed from an input."""
    nodes = [
        node("Cast", ["m"], ["seen"], name="cast", to=onnx.TensorProto.BOOL),
        node("Where", ["seen", "zero", "never"], ["mask"], name="where"),
        node("MatMul", ["x", "w"], ["s"], name="scores"),
        node("Add", ["s", "mask"], ["a"], name="add"),
        node("ReduceMax", ["a"], ["p"], name="largest", axes=[0]),
        node("Clip", ["p", "low"], ["k"], name="clip"),
        node("MatMul", ["k", "v"], ["y"], name="out"),
    ]
    constants = {
        "w": normal(4, 4),
        "v": normal(4, 4, seed=1),
        "zero": np.float32(0),
        "low": np.float32(-3),
        "never": np.float32(-np.inf),
    }
    return build(nodes, {"x": [2, 4], "m": [1, 4]}, ["y"], constants, types={"m": onnx.TensorProto.INT32})


@pytest.mark.parametrize("preset", ["a8w8", "xint8", "mx9"])
def test_an_infinite_mask_stays_in_float(preset: str) -> None:
    mask = np.array([[1, 1, 1, 0]], np.int32)
    data = [{"x": normal(2, 4, seed=index), "m": mask} for index in range(4)]
    result = roundel.quantize(masked(), recipe=preset, data=data)
    left = result.record.float_nodes
    assert left["add"] == "tensor 'mask' is infinite for the calibration data"
    assert "scores" not in left
    assert "out" not in left
    assert result.record.outputs[0].sqnr_db > 15


def test_an_infinite_mask_and_data_that_can_be_read_once() -> None:
    data = ({"x": normal(2, 4), "m": np.zeros((1, 4), np.int32)} for _ in range(2))
    with pytest.raises(DataError, match="infinity"):
        roundel.quantize(masked(), data=data)


def test_infinite_data_are_refused_though_the_model_would_stand_them() -> None:
    mask = np.array([[1, 1, 1, 0]], np.int32)
    with pytest.raises(DataError, match="not finite"):
        roundel.quantize(masked(), data=[{"x": np.full((2, 4), np.inf, np.float32), "m": mask}])


@pytest.mark.parametrize("data", [None, roundel.RandomData(count=2)], ids=["no data", "random"])
def test_a_model_without_inputs(data: object) -> None:
    nodes = [
        node("RandomNormal", [], ["r"], name="noise", shape=[2, 4], seed=1.0),
        node("MatMul", ["r", "w"], ["y"], name="product"),
    ]
    result = roundel.quantize(build(nodes, {}, ["y"], {"w": normal(4, 3)}), data=data)
    assert result.record.quantized
    assert result.record.data["kind"] == "nothing: the model has no inputs"


def test_an_operator_that_only_onnx_runtime_knows() -> None:
    nodes = [
        node("LayerNormalization", ["x", "g"], ["h"], name="norm", axis=-1),
        node("MatMul", ["h", "w"], ["y"], name="product"),
    ]
    model = build(nodes, {"x": [2, 4]}, ["y"], {"g": np.ones(4, np.float32), "w": normal(4, 3)})
    model.graph.node[0].op_type = "SimplifiedLayerNormalization"
    result = roundel.quantize(model, data=feeds({"x": (2, 4)}))
    assert result.record.quantized
    assert result.record.outputs[0].sqnr_db > 30


def test_the_checker_still_judges_the_rest_of_such_a_model(tmp_path: Path) -> None:
    from roundel.errors import VerifyError
    from roundel.rules.written import check_file

    model = build([node("Relu", ["x"], ["y"], name="relu")], {"x": [2]}, ["y"])
    model.graph.node.append(node("SimplifiedLayerNormalization", ["x", "x"], ["z"], name="norm"))
    model.graph.node[0].output.append("twice")
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(VerifyError, match="checker"):
        check_file(tmp_path / "m.onnx")


def test_saving_again_leaves_no_old_data_behind(tmp_path: Path) -> None:
    model = build([node("MatMul", ["x", "w"], ["y"], name="m")], {"x": [1, 64]}, ["y"], {"w": normal(64, 64)})
    out, changes = tmp_path / "out.onnx", {"output": {"external_data": True}}
    (tmp_path / "out.onnx.7.data").write_bytes(b"not ours")
    for _ in range(3):
        roundel.quantize(model, out, data=feeds({"x": (1, 64)}), changes=changes)
        assert len(list(tmp_path.glob("*.data"))) == 2
        onnx.load(out)
    roundel.quantize(model, out, data=feeds({"x": (1, 64)}))
    assert [path.name for path in tmp_path.glob("*.data")] == ["out.onnx.7.data"]


def test_dynamic_mode_with_a_computed_weight_says_that_nothing_was_done() -> None:
    model = build([node("MatMul", ["x", "w"], ["y"], name="product")], {"x": [2, 4], "w": [4, 3]}, ["y"])
    result = roundel.quantize(model, recipe="uint8_dynamic_quant", data=feeds({"x": (2, 4), "w": (4, 3)}))
    assert not result.record.quantized
    assert "computed" in result.record.float_nodes["product"]
    assert any("nothing to quantize" in note for note in result.record.notes)
