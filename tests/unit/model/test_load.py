"""From any source to one clean model; the source stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import roundel
from helpers import build, feeds, node, normal, session
from roundel.errors import ModelError
from roundel.model import load_model
from roundel.model.files import external_values, self_contained
from roundel.model.graph import fingerprint, opset_version
from roundel.model.load import quantized_node

X = {"x": [1, 3, 8, 8]}


def net(opset: int = 17, large: bool = False) -> onnx.ModelProto:
    side = 20 if large else 1  # beyond 4 KB the opset converter does not see a weight
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[side // 2] * 4 if large else [0] * 4),
        node("Relu", ["c"], ["y"], name="relu"),
    ]
    return build(nodes, X, ["y"], {"w": normal(4, 3, side, side), "b": normal(4, seed=1)}, opset=opset)


def same_result(model: ir.Model, reference: onnx.ModelProto, decibel: float = 100) -> None:
    from roundel.numerics.metrics import Closeness

    feed = feeds({"x": (1, 3, 8, 8)}, 1)[0]
    mine = session(ir.to_proto(self_contained(model))).run(None, feed)[0]
    assert Closeness.of(session(reference).run(None, feed)[0], mine).sqnr_db > decibel


@pytest.mark.parametrize("kind", ["str", "Path", "bytes", "ModelProto", "onnx-ir"])
def test_every_source_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    proto = net()
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    source: Any = {
        "str": str(path),
        "Path": path,
        "bytes": proto.SerializeToString(),
        "ModelProto": proto,
        "onnx-ir": ir.from_proto(proto),
    }[kind]
    loaded = load_model(source)
    assert fingerprint(loaded.model) == fingerprint(load_model(proto).model)
    assert loaded.path == (path if kind in ("str", "Path") else None)
    assert loaded.file_bytes == (path.stat().st_size if loaded.path else None)
    assert loaded.source_opset == 17


@pytest.mark.parametrize("opset", [13, 17])
def test_the_source_is_never_changed(opset: int, tmp_path: Path) -> None:
    proto = net(opset)
    before = proto.SerializeToString()
    model = ir.from_proto(proto)
    print_before, names = fingerprint(model), [n.name for n in model.graph]
    data = feeds({"x": (1, 3, 8, 8)})
    for source in (proto, model):
        roundel.quantize(source, data=data)
    assert proto.SerializeToString() == before
    assert fingerprint(model) == print_before
    assert [n.name for n in model.graph] == names
    assert opset_version(model) == opset


@pytest.mark.parametrize("opset", [11, 13, 15])
@pytest.mark.parametrize("large", [False, True])
def test_an_older_opset_is_raised(opset: int, large: bool) -> None:
    proto = net(opset, large)
    loaded = load_model(proto)
    assert opset_version(loaded.model) == 17
    assert loaded.source_opset == opset
    assert f"raised the opset from {opset} to 17" in loaded.notes
    assert [v.name for v in loaded.model.graph.inputs] == ["x"]
    same_result(loaded.model, proto)


def test_opset_9_is_raised_too() -> None:
    proto = net(9)
    same_result(load_model(proto).model, proto)


def test_a_newer_opset_is_kept() -> None:
    loaded = load_model(net(21))
    assert opset_version(loaded.model) == 21
    assert loaded.notes == ()


def unconvertible(opset: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [node("Unheard", ["x"], ["y"], domain="nobody.imports.this")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)


def test_an_opset_that_cannot_be_raised_is_kept() -> None:
    loaded = load_model(unconvertible(13))
    assert opset_version(loaded.model) == 13
    assert any(note.startswith("kept opset 13: the ONNX converter refused") for note in loaded.notes)


def test_an_opset_without_quantizers_that_cannot_be_raised_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        load_model(unconvertible(8))
    assert "opset is too old" in caught.value.what
    assert caught.value.where == "opset 8"
    assert "opset 17" in (caught.value.hint or "")


def test_half_precision_becomes_single() -> None:
    weight = normal(4, 3, 1, 1).astype(np.float16)
    nodes = [node("Conv", ["x", "w"], ["c"], name="conv"), node("Relu", ["c"], ["y"], name="relu")]
    half = {"x": TensorProto.FLOAT16, "y": TensorProto.FLOAT16}
    proto = build(nodes, X, {"y": [1, 4, 8, 8]}, {"w": weight}, types=half)
    loaded = load_model(proto)
    assert any("float16" in note for note in loaded.notes)
    assert loaded.model.graph.inputs[0].dtype is ir.DataType.FLOAT
    assert loaded.model.graph.outputs[0].dtype is ir.DataType.FLOAT
    tensor = loaded.model.graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), weight.astype(np.float32))
    result = roundel.quantize(proto, data=feeds({"x": (1, 3, 8, 8)}))
    assert result.record.quantized
    assert result.record.outputs[0].sqnr_db > 25


def test_initializers_among_the_inputs() -> None:
    proto = net()
    for tensor in proto.graph.initializer:
        proto.graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        )
    loaded = load_model(proto)
    assert [v.name for v in loaded.model.graph.inputs] == ["x"]
    assert any("initializers" in note for note in loaded.notes)
    assert len(proto.graph.input) == 3


def test_unnamed_and_twice_named_nodes_get_names() -> None:
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Relu", ["a"], ["b"], name="Relu_0"),
        node("Relu", ["b"], ["c"], name="Relu_0"),
        node("Relu", ["c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    loaded = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    names = [n.name for n in loaded.model.graph]
    assert len(set(names)) == 4
    assert names[1] == "Relu_0", "a name that is taken first stays"
    assert "named 3 unnamed node(s)" in loaded.notes


def test_functions_are_inlined() -> None:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    function = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], imports[:1]
    )
    graph = helper.make_graph(
        [node("Twice", ["x"], ["t"], domain="mine", name="twice"), node("Relu", ["t"], ["y"], name="relu")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 8, 8])],
    )
    proto = helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=8)
    loaded = load_model(proto)
    assert [n.op_type for n in loaded.model.graph] == ["Add", "Relu"]
    assert "inlined model-local functions" in loaded.notes
    same_result(loaded.model, proto)


def test_a_model_with_subgraphs() -> None:
    def branch(op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, [1, 4, 8, 8])
        return helper.make_graph([node(op, ["c"], [f"{op}_out"], name=op)], op, [], [out])

    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("ReduceMax", ["x"], ["top"], keepdims=0, name="top"),
        node("Greater", ["top", "zero"], ["positive"], name="greater"),
        node("If", ["positive"], ["y"], name="if", then_branch=branch("Relu"), else_branch=branch("Neg")),
    ]
    proto = build(nodes, X, {"y": [1, 4, 8, 8]}, {"w": normal(4, 3, 1, 1), "zero": np.float32(0)}, opset=17)
    same_result(load_model(proto).model, proto)
    result = roundel.quantize(proto, data=feeds({"x": (1, 3, 8, 8)}))
    assert result.record.float_nodes["if"] == "control flow: its bodies stay float"
    assert "conv" not in result.record.float_nodes


def test_nodes_in_any_order_are_sorted() -> None:
    proto = net()
    first = onnx.NodeProto()
    first.CopyFrom(proto.graph.node[0])
    del proto.graph.node[0]
    proto.graph.node.append(first)
    assert [n.op_type for n in load_model(proto).model.graph] == ["Conv", "Relu"]


# Weights in a file of their own.


@pytest.fixture
def split(tmp_path: Path) -> Path:
    folder = tmp_path / "float"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save_model(net(), path, save_as_external_data=True, location="w.data", size_threshold=0)
    return path


def test_external_weights_stay_mapped(split: Path) -> None:
    loaded = load_model(split)
    found = {value.name: tensor for value, tensor in external_values(loaded.model)}
    assert set(found) == {"w", "b"}
    assert not found["w"].numpy().flags.owndata
    np.testing.assert_array_equal(found["w"].numpy(), normal(4, 3, 1, 1))


def test_a_self_contained_copy_refers_to_no_file(split: Path) -> None:
    model = load_model(split).model
    copy = self_contained(model)
    assert list(external_values(copy)) == []
    assert len(list(external_values(model))) == 2, "the model itself keeps its mapping"
    assert self_contained(copy) is copy
    split.with_name("w.data").unlink()
    same_result(copy, net())


@pytest.mark.parametrize("source", ["path", "onnx-ir"])
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("exclude", [(), ("conv",)])
def test_a_model_with_external_weights_is_quantized(
    split: Path, tmp_path: Path, source: str, external: bool, exclude: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    model: Any = split if source == "path" else ir.load(split)
    changes = {"output": {"external_data": external}}
    data = feeds({"x": (1, 3, 8, 8)})
    result = roundel.quantize(model, out / "q.onnx", data=data, exclude=exclude, changes=changes)
    whole = roundel.quantize(net(), data=data, exclude=exclude)
    assert result.model.SerializeToString() == whole.model.SerializeToString()
    split.unlink()
    split.with_name("w.data").unlink()
    written = onnx.load(out / "q.onnx")
    assert session(written).run(None, data[0])[0].shape == (1, 4, 8, 8)


def test_external_weights_at_an_old_opset(tmp_path: Path) -> None:
    path = tmp_path / "old.onnx"
    onnx.save_model(net(13, large=True), path, save_as_external_data=True, location="w", size_threshold=0)
    loaded = load_model(path)
    assert opset_version(loaded.model) == 17
    same_result(loaded.model, net(13, large=True))


def test_what_counts_as_quantized() -> None:
    assert quantized_node(load_model(net()).model) is None
    result = roundel.quantize(net(), data=feeds({"x": (1, 3, 8, 8)}))
    found = quantized_node(load_model(result.model, allow_quantized=True).model)
    assert found is not None
    assert found.op_type in ("QuantizeLinear", "DequantizeLinear")


def test_a_string_initializer_is_no_obstacle() -> None:
    proto = net()
    proto.graph.initializer.append(numpy_helper.from_array(np.array(["a", "b"], object), "names"))
    assert "names" in load_model(proto).model.graph.initializers
