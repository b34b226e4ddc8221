"""What `scripts/fuzz.py` has found, each in its smallest form: all end in an error of Roundel's own."""

from __future__ import annotations

import io
import json
import lzma
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import roundel
from fuzzing import seeds
from fuzzing.cases import Sandbox
from fuzzing.guard import Guard
from helpers import build, node, normal
from roundel.errors import DataError, ModelError, RecipeError, VerifyError
from roundel.gate import compare_outputs
from roundel.inspection import inspect
from roundel.model.session import open_session

DATA = roundel.RandomData(count=2)


def bent(source: onnx.ModelProto, change: Callable[[onnx.ModelProto], object]) -> bytes:
    copy = onnx.ModelProto()
    copy.CopyFrom(source)
    change(copy)
    return bytes(copy.SerializeToString())


def one(op: str, inputs: list[str], shape: list[int], **attributes: Any) -> onnx.ModelProto:
    """A model of one node that no checker has seen."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs if name]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node(op, inputs, ["y"], name="one", **attributes)], "g", values, [out])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("ai.onnx.ml", 4)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def drop_branch(model: onnx.ModelProto) -> None:
    del model.graph.node[1].attribute[1].g.node[:]


def self_call(model: onnx.ModelProto) -> None:
    model.functions[0].node[1].CopyFrom(node("Layer", ["m", "m"], ["o"], domain="mine"))


def wrong_call(model: onnx.ModelProto) -> None:
    model.graph.node[0].input.append("x")


def no_value(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, node("Constant", [], ["unused"], name="empty"))
    model.graph.node[-1].input[0] = "unused"


def huge_version(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 2**40


def no_ir_version(model: onnx.ModelProto) -> None:
    model.ir_version = 0


def second_operand(model: onnx.ModelProto) -> None:
    del model.graph.node[-1].input[1:]


def no_second_operand(model: onnx.ModelProto) -> None:
    model.graph.node[-1].input[1] = ""


def untyped_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 0


def other_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "HardSwish"


def two_values(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].float_data.append(1.0)


def untyped_attribute(model: onnx.ModelProto) -> None:
    constant = node("Constant", [], ["c"], name="c", value=numpy_helper.from_array(normal(2)))
    constant.attribute[0].t.data_type = 0
    model.graph.node.insert(0, constant)


def wrong_initializer_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [1, 4]))


SEED = {make.__name__: index for index, make in enumerate(seeds.BUILDERS)}
BENT = [
    ("_branches", drop_branch),
    ("_function", self_call),
    ("_function", wrong_call),
    ("_branches", no_value),
    ("_convolutions", huge_version),
    ("_convolutions", no_ir_version),
    ("_branches", second_operand),
    ("_branches", no_second_operand),
    ("_halves", untyped_input),
    ("_shapes", other_operator),
    ("_convolutions", two_values),
    ("_halves", untyped_attribute),
    ("_function", wrong_initializer_input),
]


# Some are not so bent that nothing could be made of them; looking at one asks for less than running it.
USABLE = {(two_values, "a8w8"), (two_values, "bf16"), (wrong_initializer_input, "a8w8")}
READABLE = (drop_branch, other_operator, two_values, wrong_initializer_input)


@pytest.mark.parametrize(("seed", "change"), BENT, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("preset", ["a8w8", "bf16"])
def test_a_bent_model(seed: str, change: Any, preset: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(bent(seeds.models()[SEED[seed]], change))
    if (change, preset) in USABLE:
        record = roundel.quantize(path, recipe=preset, data=DATA).record
        assert record.quantized
        assert all(output.sqnr_db > 30 for output in record.outputs)
    else:
        with pytest.raises(ModelError):
            roundel.quantize(path, recipe=preset, data=DATA)
    if change in READABLE:
        assert inspect(path, preset=preset).operators
    else:
        with pytest.raises(ModelError):
            inspect(path, preset=preset)


@pytest.mark.parametrize(
    "model",
    [
        one("Attention", ["q", "k", "v"], [1, 2, 12], q_num_heads=-(2**63), kv_num_heads=3),
        one("LayerNormalization", ["x", "w", ""], [2, 2]),
        one("MaxPool", ["x"], [1, 1, 4, 4], kernel_shape=[2, 2], strides=[0, 2]),
        one("DepthToSpace", ["x"], [1, 4, 2, 2], blocksize=0),
        one("Max", ["x", ""], [3]),
        one("RNN", ["x", "w", "r"], [3, 0, 2], hidden_size=3),
        one("LabelEncoder", [""], [3], domain="ai.onnx.ml", keys_int64s=[1], values_int64s=[2]),
    ],
    ids=["heads", "empty bias", "strides", "blocks", "empty operand", "empty sequence", "empty input"],
)
def test_what_would_end_the_process_inside_onnx_runtime(model: onnx.ModelProto) -> None:
    with pytest.raises(ModelError, match=r"contradicts itself|cannot load"):
        roundel.quantize(model, data=DATA)


def test_an_input_without_a_type() -> None:
    model = one("LabelEncoder", ["x"], [3], domain="ai.onnx.ml", keys_int64s=[1], values_int64s=[2])
    model.graph.input[0].ClearField("type")
    with pytest.raises(ModelError, match="contradicts itself"):
        roundel.quantize(model, data=DATA)


def test_titles_that_are_not_utf_8() -> None:
    data = bent(seeds.models()[0], lambda m: setattr(m, "producer_name", "NAME_TO_BREAK"))
    data = data.replace(b"NAME_TO_BREAK", b"\xff" * 13)
    assert roundel.quantize(data, data=DATA, effort="none").record.quantized


def test_an_output_of_another_shape_than_declared() -> None:
    nodes = [node("Resize", ["x", "", "s"], ["y"], name="resize", mode="nearest")]
    model = build(nodes, {"x": [1, 1, 2, 2], "s": [4]}, {"y": [1, 1, 4, 6]}, opset=19)
    data = [{"x": normal(1, 1, 2, 2), "s": np.array([1, 1, 3, 3], np.float32)}]
    for preset in ("bfp16", "a8w8"):
        result = roundel.quantize(model, recipe=preset, data=data)
        assert any("left open" in note for note in result.record.notes)
        assert result.record.outputs[0].sqnr_db > 30


def test_a_domain_of_a_function_that_is_not_utf_8() -> None:
    data = bent(seeds.models()[SEED["_function"]], lambda m: None)
    at = data.rindex(b"mine")
    with pytest.raises(ModelError, match=r"UTF-8|contradicts|readable"):
        roundel.quantize(data[:at] + b"mi\xeee" + data[at + 4 :], data=DATA)


def test_an_old_upsample_takes_the_pixels_that_it_took() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Upsample", ["c", "s"], ["y"], name="up"),
    ]
    constants = {"w": normal(2, 3, 1, 1), "s": np.array([1, 1, 2, 2.4], np.float32)}
    model = build(nodes, {"x": [1, 3, 4, 4]}, ["y"], constants, opset=9)
    assert roundel.quantize(model, data=DATA).record.outputs[0].sqnr_db > 25


def test_a_new_operator_set_in_an_old_file_format() -> None:
    data = bent(seeds.models()[0], lambda m: setattr(m, "ir_version", 3))
    assert roundel.quantize(data, data=DATA).record.quantized


def test_a_sample_that_only_the_original_model_cannot_run() -> None:
    # The Gather that it breaks is no part of any output.
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], name="unused"),
        node("MatMul", ["x", "w"], ["y"], name="product"),
    ]
    model = build(
        nodes,
        {"ids": [1], "x": [1, 4]},
        ["y"],
        {"table": normal(3, 4), "w": normal(4, 4)},
        types={"ids": TensorProto.INT64},
    )
    data = [{"ids": np.array([85]), "x": normal(1, 4)}]
    with pytest.raises(DataError, match="could not run a sample"):
        roundel.quantize(model, data=data)


@pytest.mark.parametrize("samples", [2**70, 10**9])
def test_a_recipe_with_a_number_beyond_all_bounds(samples: int) -> None:
    with pytest.raises(RecipeError, match=r"verify\.samples"):
        roundel.load_recipe("bf16", {"verify": {"samples": samples}})


def archive(content: bytes, packing: int) -> bytearray:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", packing) as file:
        file.writestr("x.npy", content)
    return bytearray(stream.getvalue())


def npy(header: str) -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(1000)


def array_file(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def corrupt_lzma() -> bytes:
    data = archive(array_file(np.zeros((1, 3, 8, 8), np.float32)), zipfile.ZIP_LZMA)
    data[60:90] = bytes(30)
    with pytest.raises((lzma.LZMAError, EOFError, zipfile.BadZipFile, NotImplementedError, ValueError)):
        np.load(io.BytesIO(bytes(data)))["x"]
    return bytes(data)


def locked() -> bytes:
    data = archive(array_file(np.zeros((1, 3, 8, 8), np.float32)), zipfile.ZIP_STORED)
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(magic) + offset] |= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npz", corrupt_lzma()),
        ("a.npz", locked()),
        ("a.npy", npy("{'descr': '<f4', 'shape': (1,")),
        ("a.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999, 3), }")),
        ("a.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3, 8, 8), }")),
        ("a.npz", bytes(archive(b"no array at all", zipfile.ZIP_DEFLATED))),
    ],
    ids=["lzma", "password", "open bracket", "huge", "negative", "no array"],
)
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_an_array_file(name: str, content: bytes, folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DataError):
        roundel.quantize(seeds.models()[0], data=path.parent if folder else path)


@pytest.mark.parametrize("content", [b"bytes", array_file(np.array([None], object)), npy("{'descr': (")])
def test_a_statistics_file_with_a_foreign_member(content: bytes, tmp_path: Path) -> None:
    stats = tmp_path / "stats.npz"
    header = {"version": 1, "model_key": "", "data_key": "", "samples_seen": 1, "tensors": [["x", "minmax"]]}
    with zipfile.ZipFile(stats, "w") as file:
        file.writestr("header.npy", array_file(np.frombuffer(json.dumps(header).encode(), np.uint8)))
        for key in ("lows", "highs", "count"):
            file.writestr(f"0.{key}.npy", content)
    with pytest.raises(DataError, match="not a statistics file"):
        roundel.quantize(seeds.models()[0], data=DATA, stats=stats)


def test_the_fuzzer_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some cases in this process; the audit hook stays, and says nothing outside of a case."""
    monkeypatch.setattr(seeds, "backend_models", seeds.models)  # the others take ten seconds to build
    box = Sandbox(tmp_path, Guard())
    outcomes = set()
    for number in range(60):
        outcome, finding = box.run(20, number)
        assert finding is None, finding
        outcomes.add(outcome)
    assert {"ModelError", "DataError", "RecipeError", "done"} <= outcomes


@pytest.mark.parametrize("harm", ["write", "pickle", "socket", "program"])
def test_the_guard_sees_harm(harm: str, tmp_path: Path) -> None:
    import pickle
    import socket
    import subprocess

    guard = Guard()
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    with guard.allowing(allowed) as seen:
        (allowed / "fine").write_text("fine")
        assert not seen
        if harm == "write":
            (tmp_path / "outside").write_text("harm")
        elif harm == "pickle":
            pickle.loads(pickle.dumps(Path))
        elif harm == "socket":
            with socket.socket() as connection, pytest.raises(OSError):
                connection.connect(("127.0.0.1", 1))
        else:
            subprocess.run([sys.executable, "-c", ""], check=True)
    assert seen


def test_a_broken_node_that_optimizations_pass_over() -> None:
    """A Transpose of four axes before a MatMul of five: fused into one operator, nobody counts them."""
    nodes = [
        node("Transpose", ["b"], ["t"], name="turn", perm=[0, 1, 3, 2]),
        node("MatMul", ["a", "t"], ["y"], name="times"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "aby"]
    graph = helper.make_graph(nodes, "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    sample = {"a": np.ones((1, 1, 1, 2, 3), np.float32), "b": np.ones((1, 1, 1, 4, 3), np.float32)}
    source = model.SerializeToString()
    wanted = dict(zip("y", open_session(source).run(None, sample), strict=True))
    as_written = open_session(source, optimise=False)
    with pytest.raises(ModelError, match="runs only because"):
        compare_outputs(as_written, [sample], [wanted], source)
    with pytest.raises(VerifyError, match="defect"):
        compare_outputs(as_written, [sample], [wanted])


def test_a_pool_over_more_than_any_map_has() -> None:
    """A size was factored number by number: 2**31 steps for a padding of 2**62."""
    constants = {"w": normal(2, 3, 3, 3)}
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv", pads=[2**62, 1, 1, 1]),
        node("GlobalAveragePool", ["c"], ["y"], name="mean"),
    ]
    model = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)
    with pytest.raises((DataError, ModelError)):
        roundel.quantize(model, recipe="xint8", data=DATA)


@pytest.mark.parametrize(
    ("opset", "options"), [(18, {"num_outputs": 3}), (13, {})], ids=["more than it says", "without a name"]
)
def test_a_split_with_an_empty_output(opset: int, options: dict[str, int]) -> None:
    split = node("Split", ["x"], ["a", "b", "y", ""], name="split", axis=0, **options)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "aby"]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [6])
    graph = helper.make_graph([split], "g", [given], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with pytest.raises(ModelError, match="contradicts"):
        roundel.quantize(model.SerializeToString(), data=DATA)
