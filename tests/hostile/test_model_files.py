"""Files that are not the model that they claim to be."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime as ort
import pytest

import roundel
from helpers import build, node, normal
from roundel.errors import ModelError, OutputError, RoundelError


def test_a_missing_file_is_named_and_a_neighbour_suggested(refused: Any, model: Path) -> None:
    error = refused(model.with_name("modle.onnx"), ModelError)
    assert error.what == "The model file does not exist."
    assert str(model.with_name("modle.onnx")) == error.where
    assert "'model.onnx'" in error.hint


def test_a_missing_folder_is_no_crash(refused: Any, tmp_path: Path) -> None:
    error = refused(tmp_path / "no" / "such.onnx", ModelError)
    assert "does not exist" in error.what


def test_a_name_that_no_file_can_have(refused: Any, tmp_path: Path) -> None:
    assert "name too long" in refused(tmp_path / ("n" * 300), ModelError).observed


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file(refused: Any, model: Path, share: float) -> None:
    whole = model.read_bytes()
    model.write_bytes(whole[: int(len(whole) * share)])
    error = refused(model, ModelError)
    assert str(model) in error.where
    assert "download" in error.hint


def test_an_empty_file(refused: Any, model: Path) -> None:
    model.write_bytes(b"")
    error = refused(model, ModelError)
    assert error.where == str(model)
    assert "no opset import" in error.observed


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("<!DOCTYPE html><html><body>404 Not Found</body></html>", "<!DOCTYPE html>"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "version https://git-lfs"),
        ("hello, I am a text file and no model at all\n", "hello, I am a text file"),
    ],
)
def test_text_is_quoted(refused: Any, model: Path, content: str, seen: str) -> None:
    model.write_text(content)
    error = refused(model, ModelError)
    assert "not a readable ONNX model" in error.what
    assert seen in error.observed
    assert "LFS" in error.hint


def test_a_folder(refused: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder.onnx"
    folder.mkdir()
    error = refused(folder, ModelError)
    assert "is a folder" in error.what
    assert ".onnx" in error.expected


def test_other_formats_by_suffix_are_read_as_onnx(refused: Any, tmp_path: Path) -> None:
    for name in ("model.json", "model.textproto", "model.onnxtxt"):
        path = tmp_path / name
        path.write_text("{}")
        assert "not a readable ONNX model" in refused(path, ModelError).what


def test_random_bytes(refused: Any, model: Path) -> None:
    generator = np.random.default_rng(0)
    for size in (1, 7, 64, 1000):
        model.write_bytes(generator.bytes(size))
        refused(model, ModelError)


def test_flipped_bits_give_an_error_or_a_model(proto: onnx.ModelProto, samples: list[Any]) -> None:
    whole = proto.SerializeToString()
    chooser = random.Random(5)
    outcomes: Counter[str] = Counter()
    for _ in range(100):
        damaged = bytearray(whole)
        at, bit = chooser.randrange(len(whole)), chooser.randrange(8)
        damaged[at] ^= 1 << bit
        try:
            result = roundel.quantize(bytes(damaged), data=samples)
        except RoundelError as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["quantized"] += 1
            # Whatever the bit has made of the model: the result computes what this model computes.
            assert sqnr_of(bytes(damaged), result.model.SerializeToString(), samples) > 10, (at, bit)
    # Most bits are weights.
    assert outcomes["quantized"] > 50
    assert outcomes["ModelError"] > 15
    assert not outcomes["VerifyError"]


def sqnr_of(source: bytes, quantized: bytes, samples: list[Any]) -> float:
    """The signal over the error of all outputs, in decibels; where the source overflows, the result must."""
    before, after = quiet_session(source), quiet_session(quantized)
    signal = error = 0.0
    for sample in samples:
        fed = dict(zip([one.name for one in before.get_inputs()], sample.values(), strict=True))
        for wanted, found in zip(before.run(None, fed), after.run(None, fed), strict=True):
            assert found.shape == wanted.shape
            alike = np.isfinite(wanted) & np.isfinite(found)
            assert (np.isfinite(wanted) <= np.isfinite(found)).all()
            exact = wanted[alike].astype(np.float64)
            signal += float((exact**2).sum())
            error += float(((exact - found[alike]) ** 2).sum())
    return 10 * np.log10(signal / error) if error else np.inf


def quiet_session(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model, options)


# Weights in a file of their own.


@pytest.fixture
def split(tmp_path: Path, proto: onnx.ModelProto) -> Path:
    folder = tmp_path / "split"
    folder.mkdir()
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    path = folder / "model.onnx"
    onnx.save_model(copy, path, save_as_external_data=True, location="model.data", size_threshold=0)
    return path


def point_at(path: Path, location: str) -> None:
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(proto.SerializeToString())


def test_external_data_missing(refused: Any, split: Path) -> None:
    split.with_name("model.data").unlink()
    error = refused(split, ModelError)
    assert "external data cannot be read" in error.what
    assert "initializer 'w'" in error.where
    assert "model.data" in error.observed
    assert "next to the model" in error.hint


def test_external_data_too_short(refused: Any, split: Path) -> None:
    data = split.with_name("model.data")
    data.write_bytes(data.read_bytes()[:100])
    error = refused(split, ModelError)
    assert "too short" in error.what
    assert "has 100 bytes" in error.observed
    assert "at least" in error.expected


def change_reference(path: Path, key: str, value: str) -> None:
    proto = onnx.load(path, load_external_data=False)
    entries = {entry.key: entry for entry in proto.graph.initializer[0].external_data}
    entries[key].value = value
    path.write_bytes(proto.SerializeToString())


@pytest.mark.parametrize("length", ["100", "0"])
def test_external_data_shorter_than_its_tensor(refused: Any, split: Path, length: str) -> None:
    change_reference(split, "length", length)
    error = refused(split, ModelError)
    assert "shorter than the weight" in error.what
    assert "initializer 'w'" in error.where
    assert error.observed == f"model.data gives it {length} bytes"
    assert error.expected.startswith("432 bytes")


@pytest.mark.parametrize(("key", "value"), [("offset", "-8"), ("offset", "eight"), ("length", "-4")])
def test_external_data_at_no_place(refused: Any, split: Path, key: str, value: str) -> None:
    change_reference(split, key, value)
    error = refused(split, ModelError)
    assert "no place in their file" in error.what
    assert "initializer 'w'" in error.where
    assert error.observed == f"model.data: {key} {value} bytes"
    assert error.expected == "0 bytes or more"


@pytest.mark.parametrize("form", ["bytes", "proto"])
def test_external_data_in_the_folder_above_of_a_model_in_memory(
    split: Path, tmp_path: Path, samples: list[Any], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (tmp_path / "secret").write_bytes(split.with_name("model.data").read_bytes())
    point_at(split, "../secret")
    monkeypatch.chdir(split.parent)
    source: Any = split.read_bytes()
    if form == "proto":
        source = onnx.ModelProto.FromString(source)
    with pytest.raises(ModelError, match="outside"):
        roundel.quantize(source, data=samples)


def test_external_data_in_the_folder_above(refused: Any, split: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(split.with_name("model.data").read_bytes())
    point_at(split, "../secret")
    error = refused(split, ModelError)
    assert "initializer 'w'" in error.where
    assert "../secret" in error.observed
    assert "outside" in error.observed
    assert "own folder" in error.expected


def test_external_data_in_the_folder_above_by_a_bare_name(
    split: Path, tmp_path: Path, samples: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(split.with_name("model.data").read_bytes())
    point_at(split, "../secret")
    monkeypatch.chdir(split.parent)
    with pytest.raises(ModelError):
        roundel.quantize("model.onnx", data=samples)


def test_external_data_by_an_absolute_path(refused: Any, split: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(split.with_name("model.data").read_bytes())
    point_at(split, str(secret))
    refused(split, ModelError)


def test_external_data_by_a_link_that_leaves_the_folder(refused: Any, split: Path, tmp_path: Path) -> None:
    data = split.with_name("model.data")
    secret = tmp_path / "secret"
    data.rename(secret)
    data.symlink_to(os.path.relpath(secret, data.parent))
    refused(split, ModelError)


def test_the_output_may_not_replace_the_input_s_data(refused: Any, split: Path) -> None:
    error = refused(split, OutputError, output=split.with_name("model.data"))
    assert "external data" in error.what


# Graphs that no file format forbids.


def one_node(op: str, domain: str, inputs: dict[str, Any], **attributes: Any) -> onnx.ModelProto:
    constants = {k: v for k, v in inputs.items() if v is not None}
    made = node(op, list(inputs), ["y"], name="quantized_one", domain=domain, **attributes)
    graph = onnx.helper.make_graph(
        [made],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)


SCALE, ZERO = np.float32(0.1), np.int8(0)
QUANTIZED = {
    "QuantizeLinear": one_node("QuantizeLinear", "", {"x": None, "s": SCALE, "z": ZERO}),
    "com.microsoft::QuantizeLinear": one_node(
        "QuantizeLinear", "com.microsoft", {"x": None, "s": SCALE, "z": ZERO}
    ),
    "QLinearMatMul": one_node(
        "QLinearMatMul",
        "",
        {"x": None, "s": SCALE, "z": ZERO, "k": np.ones((4, 4), np.int8), "s2": SCALE, "z2": ZERO}
        | {"s3": SCALE, "z3": ZERO},
    ),
    "com.microsoft::MatMulNBits": one_node(
        "MatMulNBits",
        "com.microsoft",
        {"x": None, "k": np.zeros((4, 1, 8), np.uint8), "s": np.ones(4, np.float32)},
        K=4,
        N=4,
        bits=4,
        block_size=16,
    ),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_model(refused: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "quantized.onnx"
    path.write_bytes(QUANTIZED[kind].SerializeToString())
    error = refused(path, ModelError)
    assert error.what == "The model is already quantized."
    assert error.observed == f"{kind} node 'quantized_one'"
    assert "float model" in error.hint


def test_our_own_result_is_not_quantized_twice(
    refused: Any, model: Path, tmp_path: Path, samples: list[Any]
) -> None:
    roundel.quantize(model, tmp_path / "once.onnx", data=samples)
    assert "already quantized" in refused(tmp_path / "once.onnx", ModelError).what


def test_an_empty_graph(refused: Any, model: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "g", [value], [value]))
    model.write_bytes(empty.SerializeToString())
    assert "no nodes" in refused(model, ModelError).what


def damaged(proto: onnx.ModelProto, change: Any) -> bytes:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    change(copy.graph)
    return bytes(copy.SerializeToString())


def test_a_cycle(refused: Any, model: Path, proto: onnx.ModelProto) -> None:
    def bend(graph: onnx.GraphProto) -> None:
        graph.node[1].input[0] = "r2"
        graph.node.append(node("Add", ["r", "c"], ["r2"], name="back"))

    model.write_bytes(damaged(proto, bend))
    error = refused(model, ModelError)
    assert error.what == "The graph has a cycle."
    assert error.where == str(model)


def test_two_nodes_that_make_one_tensor(refused: Any, model: Path, proto: onnx.ModelProto) -> None:
    def double(graph: onnx.GraphProto) -> None:
        graph.node.append(node("Relu", ["c"], ["r"], name="again"))

    model.write_bytes(damaged(proto, double))
    error = refused(model, ModelError)
    assert "'r'" in str(error)


def test_two_inputs_of_one_name(refused: Any, model: Path, proto: onnx.ModelProto) -> None:
    model.write_bytes(damaged(proto, lambda graph: graph.input.append(graph.input[0])))
    assert "'x'" in str(refused(model, ModelError))


def test_two_nodes_of_one_name_are_told_apart(proto: onnx.ModelProto, samples: list[Any]) -> None:
    def rename(graph: onnx.GraphProto) -> None:
        for each in graph.node:
            each.name = "same"

    result = roundel.quantize(damaged(proto, rename), data=samples)
    assert any("could not be compared" in note for note in result.record.notes)
    names = [n.name for n in result.model.graph.node]
    assert len(set(names)) == len(names)


def test_a_tensor_that_nothing_makes(refused: Any, model: Path, proto: onnx.ModelProto) -> None:
    def cut(graph: onnx.GraphProto) -> None:
        graph.node[1].input[0] = "nowhere"

    model.write_bytes(damaged(proto, cut))
    error = refused(model, ModelError)
    assert "Relu node 'relu'" in error.where
    assert "'nowhere', which nothing makes" in error.observed


def test_an_output_that_nothing_makes(refused: Any, model: Path, proto: onnx.ModelProto) -> None:
    def rename(graph: onnx.GraphProto) -> None:
        graph.output[0].name = "nowhere"

    model.write_bytes(damaged(proto, rename))
    assert "graph output 'nowhere'" in refused(model, ModelError).where


def test_a_weight_shorter_than_its_shape(refused: Any, model: Path, proto: onnx.ModelProto) -> None:
    def cut(graph: onnx.GraphProto) -> None:
        graph.initializer[0].raw_data = graph.initializer[0].raw_data[:-4]

    model.write_bytes(damaged(proto, cut))
    error = refused(model, ModelError)
    assert "initializer 'w'" in error.where
    assert "[4,3,3,3]" in error.expected


def test_an_attribute_of_another_type(refused: Any, model: Path, proto: onnx.ModelProto) -> None:
    def change(graph: onnx.GraphProto) -> None:
        graph.node[0].attribute[0].CopyFrom(onnx.helper.make_attribute("pads", 1.5))

    model.write_bytes(damaged(proto, change))
    error = refused(model, ModelError)
    assert "Conv node 'conv'" in error.where
    assert "'pads' has type FLOAT" in error.observed
    assert error.expected == "type INTS"


def test_an_operator_that_does_not_exist(refused: Any, model: Path, proto: onnx.ModelProto) -> None:
    def rename(graph: onnx.GraphProto) -> None:
        graph.node[1].op_type = "Rleu"

    model.write_bytes(damaged(proto, rename))
    error = refused(model, ModelError)
    assert "Rleu" in str(error)


def test_infinite_weights_keep_their_node_in_float(samples: list[Any]) -> None:
    weight = normal(4, 3, 1, 1)
    weight[0, 0] = np.inf
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="broken"),
        node("Clip", ["c", "low", "high"], ["y"], name="clip"),
    ]
    constants = {"w": weight, "low": np.float32(0), "high": np.float32(6)}
    model = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)
    result = roundel.quantize(model, data=samples)
    assert "infinite or NaN" in result.record.float_nodes["broken"]


# Sparse tensors.


def sparse(proto: onnx.ModelProto, indices: np.ndarray | None = None, shape: tuple[int, ...] = ()) -> Any:
    """The sparse form of 'k', half of whose entries are zero, and the model without it."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    tensor = next(t for t in model.graph.initializer if t.name == "k")
    dense = onnx.numpy_helper.to_array(tensor)
    dense = np.where(np.abs(dense) < 0.7, 0, dense).astype(np.float32)
    model.graph.initializer.remove(tensor)
    values = onnx.numpy_helper.from_array(dense[dense != 0], "k")
    places = np.flatnonzero(dense) if indices is None else indices
    form = onnx.helper.make_sparse_tensor(
        values, onnx.numpy_helper.from_array(places, "places"), shape or dense.shape
    )
    return model, form, dense


@pytest.mark.parametrize("kind", ["linear", "by axis", "constant"])
def test_sparse_weights_are_written_out(proto: onnx.ModelProto, samples: list[Any], kind: str) -> None:
    model, form, dense = sparse(proto)
    if kind == "by axis":
        form = sparse(proto, np.argwhere(dense))[1]
    if kind == "constant":
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["k"], name="k", sparse_value=form))
    else:
        model.graph.sparse_initializer.append(form)
    before = model.SerializeToString()
    whole = onnx.ModelProto()
    whole.CopyFrom(proto)
    next(t for t in whole.graph.initializer if t.name == "k").CopyFrom(
        onnx.numpy_helper.from_array(dense, "k")
    )
    expected = roundel.quantize(whole, data=samples).model
    found = roundel.quantize(model, data=samples).model
    weights = [{t.name: t.raw_data for t in m.graph.initializer} for m in (expected, found)]
    assert weights[0] == weights[1]
    assert model.SerializeToString() == before


@pytest.mark.parametrize("wrong", ["outside", "negative", "too many", "too large"])
def test_sparse_weights_that_contradict_themselves(
    refused: Any, model: Path, proto: onnx.ModelProto, wrong: str
) -> None:
    _, _, dense = sparse(proto)
    places = np.flatnonzero(dense)
    shape = dense.shape
    if wrong == "outside":
        places[-1] = 10**6
    elif wrong == "negative":
        places[0] = -1
    elif wrong == "too many":
        places = np.append(places, places[-1])
    else:
        shape = (10**6, 10**6)
    bare, form, _ = sparse(proto, places, shape)
    bare.graph.sparse_initializer.append(form)
    model.write_bytes(bare.SerializeToString())
    error = refused(model, ModelError)
    assert "sparse tensor 'k'" in error.where
    assert ("too large" if wrong == "too large" else "contradicts itself") in error.what


# Outputs of which the file does not say what they are.


def undeclared(kind: str, missing: str) -> onnx.ModelProto:
    """Ends in an operator that ONNX's inference knows, does not know, or knows but for its rank."""
    nodes = [node("Conv", ["x", "w"], ["c"], name="conv"), node("Relu", ["c"], ["r"], name="relu")]
    inputs: dict[str, Any] = {"x": [1, 3, 8, 8]}
    if kind == "foreign":
        nodes.append(node("Gelu", ["r"], ["y"], name="gelu", domain="com.microsoft"))
    elif kind == "open rank":
        nodes += [
            node("Shape", ["r"], ["s"], name="s"),
            node("NonZero", ["s"], ["z"], name="z"),
            node("Squeeze", ["z"], ["q"], name="q"),
            node("Gather", ["s", "q"], ["t"], name="t"),
            node("Compress", ["t", "all"], ["u"], name="u"),
            node("Reshape", ["r", "u"], ["y"], name="reshape"),
        ]
    else:
        nodes.append(node("Neg", ["r"], ["y"], name="neg"))
    constants = {"w": normal(4, 3, 1, 1)}
    if kind == "open rank":
        constants["all"] = np.ones(4, bool)
    model = build(nodes, inputs, {"y": [1, 4, 8, 8]}, constants)
    if kind == "foreign":
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    if missing == "shape":
        model.graph.output[0].type.tensor_type.ClearField("shape")
    else:
        model.graph.output[0].ClearField("type")
    return model


@pytest.mark.parametrize("missing", ["shape", "type"])
@pytest.mark.parametrize("kind", ["known", "foreign", "open rank"])
@pytest.mark.parametrize("preset", ["xint8", "a8w8", "bf16", "bfp16", "to fp32", "to bf16"])
def test_an_output_that_declares_nothing(preset: str, kind: str, missing: str, samples: list[Any]) -> None:
    model = undeclared(kind, missing)
    if preset.startswith("to "):
        made = onnx_ir.to_proto(roundel.convert(model, to=preset[3:]).ir)  # type: ignore[arg-type]
    else:
        made = roundel.quantize(model, recipe=preset, data=samples).model
    found = made.graph.output[0].type.tensor_type
    assert found.elem_type == onnx.TensorProto.FLOAT
    if kind != "open rank":
        assert [d.dim_value for d in found.shape.dim] == [1, 4, 8, 8]
