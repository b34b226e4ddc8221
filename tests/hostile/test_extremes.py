"""Small files that ask for much: time, memory or depth."""

from __future__ import annotations

import io
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import roundel
from helpers import build, feeds, node, normal
from roundel.errors import DataError, ModelError, RecipeError, RoundelError
from roundel.model.session import open_session


def test_a_constant_that_explodes() -> None:
    """Sixteen bytes that stand for 64 GB: never made while folding constants."""
    nodes = [
        node("ConstantOfShape", ["size"], ["zeros"], name="zeros"),
        node("ReduceSum", ["zeros"], ["sum"], name="sum", keepdims=0),
        node("Add", ["x", "sum"], ["y"], name="add"),
    ]
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])]
    size = numpy_helper.from_array(np.array([1 << 20, 1 << 14]), "size")
    graph = helper.make_graph(nodes, "g", values, outputs, [size])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    started = time.monotonic()
    with pytest.raises(RoundelError):
        roundel.quantize(model, data=feeds({"x": (2,)}))
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("dims", [[2**62, 4], [-4, 4], [2**31, 2**31, 2**31]])
def test_impossible_dimensions(dims: list[int], tmp_path: Path) -> None:
    model = build([node("MatMul", ["x", "w"], ["y"], name="m")], {"x": [1, 4]}, ["y"], {"w": normal(4, 4)})
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(dims)
    with pytest.raises(ModelError):
        roundel.quantize(model, data=roundel.RandomData(count=1))


def test_an_input_too_large_for_any_sample() -> None:
    model = build([node("Relu", ["x"], ["y"], name="r")], {"x": [1 << 20, 1 << 20]}, {"y": None})
    with pytest.raises(RoundelError):
        roundel.quantize(model, data=roundel.RandomData(count=1))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("depth", [3, 30])
def test_branches_in_branches(depth: int, known: bool) -> None:
    """Where the condition is a constant, one branch of each is left; where it is computed, all are."""
    inner = node("Relu", ["x"], ["out"], name="leaf")
    value = helper.make_tensor_value_info("out", TensorProto.FLOAT, [2])
    for level in range(depth):
        body = helper.make_graph([inner], f"g{level}", [], [value])
        last = helper.make_graph([node("Neg", ["x"], ["out"])], "e", [], [value])
        inner = node("If", ["flag"], ["out"], name=f"if{level}", then_branch=body, else_branch=last)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])]
    flag = numpy_helper.from_array(np.array(True), "flag")
    least = numpy_helper.from_array(np.float32(-1e9), "least")
    asked = [node("ReduceMax", ["x"], ["most"], keepdims=0), node("Greater", ["most", "least"], ["flag"])]
    nodes, constants = ([inner], [flag]) if known else ([*asked, inner], [least])
    graph = helper.make_graph(nodes, "g", inputs, [value], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data = feeds({"x": (2,)})
    result = roundel.quantize(model.SerializeToString(), data=data)
    assert not result.record.quantized
    assert ("leaf" if known else f"if{depth - 1}") in result.record.float_nodes
    assert any(one.op_type == "If" for one in result.model.graph.node) is not known
    (found,) = open_session(result.model.SerializeToString()).run(None, data[0])
    np.testing.assert_array_equal(found, np.maximum(data[0]["x"], 0))


def test_branches_deeper_than_any_reader_goes() -> None:
    """No library writes such a file, so it is put together here; each level is a graph in an attribute."""

    def field(number: int, content: bytes) -> bytes:
        length, size = bytearray(), len(content)
        while size > 0x7F:
            length.append(size & 0x7F | 0x80)
            size >>= 7
        return bytes([number << 3 | 2]) + bytes(length) + bytes([size]) + content

    graph = field(1, node("Relu", ["x"], ["out"], name="leaf").SerializeToString())
    for _ in range(2000):
        attribute = field(1, b"then_branch") + field(6, graph)
        graph = field(1, field(1, b"flag") + field(2, b"out") + field(4, b"If") + field(5, attribute))
    shell = build([node("Relu", ["x"], ["y"], name="r")], {"x": [2]}, ["y"])
    shell.ClearField("graph")
    with pytest.raises(ModelError, match="not a readable ONNX model"):
        roundel.quantize(shell.SerializeToString() + field(7, graph), data=feeds({"x": (2,)}))


def test_more_nodes_than_any_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundel.model.load._MOST_NODES", 2)  # a quarter of a million take a minute to build
    nodes = [node("Neg", [f"t{i}"], [f"t{i + 1}"], name=f"n{i}") for i in range(3)]
    with pytest.raises(ModelError, match="more nodes"):
        roundel.quantize(build(nodes, {"t0": [2]}, ["t3"]), data=roundel.RandomData(count=1))


def test_many_nodes_take_time_in_proportion() -> None:
    def seconds(count: int) -> float:
        nodes = [node("Neg", [f"t{i}"], [f"t{i + 1}"], name=f"n{i}") for i in range(count)]
        values = [helper.make_tensor_value_info("t0", TensorProto.FLOAT, [2])]
        outputs = [helper.make_tensor_value_info(f"t{count}", TensorProto.FLOAT, [2])]
        graph = helper.make_graph(nodes, "g", values, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        started = time.process_time()
        roundel.quantize(model, data=feeds({"t0": (2,)}, count=1), effort="none")
        return time.process_time() - started

    seconds(50)
    assert seconds(2400) < 14 * max(seconds(600), 0.3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(
        build([node("MatMul", ["x", "w"], ["y"], name="m")], {"x": [1, 4]}, ["y"], {"w": normal(4, 4)}), path
    )
    return path


def header(shape: str, kind: str = "<f4") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_an_archive_that_unpacks_to_gigabytes(model: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header("(1, 4)") + bytes(200_000_000))
    assert bomb.stat().st_size < 300_000
    with pytest.raises(DataError, match="cannot be read"):
        roundel.quantize(model, data=bomb)
    with pytest.raises(DataError, match="statistics file"):
        roundel.quantize(model, data=roundel.RandomData(count=1), stats=bomb)


@pytest.mark.parametrize("kind", [">f4", "<f4", "=f4"])
def test_bytes_in_another_order(kind: str, model: Path, tmp_path: Path) -> None:
    values = np.array([[1, 2, 3, 4]], np.float32)
    np.save(tmp_path / "x.npy", values.astype(kind))
    result = roundel.quantize(model, data=tmp_path / "x.npy", recipe="a8w8_minmax")
    assert result.record.data["inputs"]["x"]["high"] == 4
    assert result.record.data["count"] == 1


@pytest.mark.parametrize("kind", ["|O", "<M8[s]", "<U4", "<c8", "V8"])
def test_arrays_of_other_things_than_numbers(kind: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(header("(1, 4)", kind) + bytes(200))
    with pytest.raises(DataError):
        roundel.quantize(model, data=tmp_path / "x.npy")


@pytest.mark.parametrize(
    "text",
    ["a: &x [1]\nb: *x", "name: !!python/object/new:os.system [true]", "? {a: b}\n: c", "a: !!float .inf\n"],
)
def test_yaml_that_means_harm(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError):
        roundel.load_recipe(tmp_path / "r.yaml")


def test_a_device_as_a_weight_file(tmp_path: Path) -> None:
    proto = build([node("MatMul", ["x", "w"], ["y"], name="m")], {"x": [1, 4]}, ["y"], {"w": normal(4, 4)})
    tensor: Any = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for location in ("/dev/zero", "../../../../../dev/zero", "."):
        del tensor.external_data[:]
        tensor.external_data.add(key="location", value=location)
        (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(ModelError):
            roundel.quantize(tmp_path / "model.onnx", data=roundel.RandomData(count=1))


def test_a_header_of_an_archive_s_member_is_all_that_is_read(tmp_path: Path, model: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.npy", header("(99999999999, 4)"))
    (tmp_path / "x.npz").write_bytes(stream.getvalue())
    with pytest.raises(DataError):
        roundel.quantize(model, data=tmp_path / "x.npz")
