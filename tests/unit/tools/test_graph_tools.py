"""Tools for any graph, and the conversions between float types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from PIL import Image

from helpers import build, initializers, node, normal, run
from roundel.errors import ModelError, RecipeError
from roundel.quark.tools import TOOLS
from roundel.quark.tools.floats import (
    convert_fp32_to_fp16,
    convert_nchw_to_nhwc,
    convert_opset_version,
    convert_shared_initializer_to_unique,
    fix_shapes,
    remove_initializer_from_input,
    replace_inf_weights,
)
from roundel.quark.tools.tool import read_model
from roundel.quark.tools.views import convert_onnx_to_onnxtxt, convert_onnxtxt_to_onnx


def after(tool, model: onnx.ModelProto, *more, **options) -> onnx.ModelProto:
    result = ir.to_proto(tool(read_model(model), *more, **options)[0])
    onnx.checker.check_model(result, full_check=True)
    return result


def test_channels_last(float_model, sample) -> None:
    result = after(convert_nchw_to_nhwc, float_model)
    turned = {"x": sample["x"].transpose(0, 2, 3, 1)}
    assert np.array_equal(run(result, turned)[0], run(float_model, sample)[0])


def test_open_dimensions_get_sizes() -> None:
    model = build(
        [node("Conv", ["x", "w"], ["y"])], {"x": ["n", 3, "h", "w_"]}, {"y": None}, {"w": normal(4, 3, 3, 3)}
    )
    fixed = after(fix_shapes, model, {"x": (2, 3, 8, 8), "y": (2, 4, 6, 6)})
    assert [d.dim_value for d in fixed.graph.output[0].type.tensor_type.shape.dim] == [2, 4, 6, 6]
    ones = after(fix_shapes, build([node("Relu", ["x"], ["y"])], {"x": ["n", 3]}, {"y": None}))
    assert [d.dim_value for d in ones.graph.input[0].type.tensor_type.shape.dim] == [1, 3]
    with pytest.raises(RecipeError, match="another shape"):
        fix_shapes(read_model(model), {"x": (2, 3, 8, 8), "y": (2, 4, 8, 8)})


def test_weights_leave_the_input_list(float_model, sample) -> None:
    listed = onnx.ModelProto()
    listed.CopyFrom(float_model)
    weight = next(t for t in listed.graph.initializer if t.name == "w")
    listed.graph.input.append(onnx.helper.make_tensor_value_info("w", weight.data_type, weight.dims))
    result = after(remove_initializer_from_input, listed)
    assert [i.name for i in result.graph.input] == ["x"]
    assert np.array_equal(run(result, sample)[0], run(float_model, sample)[0])


def test_copies_of_a_shared_weight() -> None:
    nodes = [
        node("MatMul", ["x", "k"], ["a"]),
        node("MatMul", ["a", "k"], ["b"]),
        node("Add", ["b", "k"], ["y"]),
    ]
    model = build(nodes, {"x": [4, 4]}, ["y"], {"k": normal(4, 4)})
    feed = {"x": normal(4, 4, seed=3)}
    every = after(convert_shared_initializer_to_unique, model)
    assert len(initializers(every)) == 3
    only = after(convert_shared_initializer_to_unique, model, ["Add"])
    assert len(initializers(only)) == 2
    for result in (every, only):
        assert np.array_equal(run(result, feed)[0], run(model, feed)[0])


def test_infinite_weights_become_finite() -> None:
    mask = np.float32([0, -np.inf, np.inf])
    model = build([node("Add", ["x", "k"], ["y"])], {"x": [3]}, ["y"], {"k": mask})
    result = after(replace_inf_weights, model, 500.0)
    assert initializers(result)["k"].tolist() == [0, -500, 500]


def test_another_opset(float_model, sample) -> None:
    result = after(convert_opset_version, float_model, 20)
    assert next(o.version for o in result.opset_import if o.domain == "") == 20
    assert np.allclose(run(result, sample)[0], run(float_model, sample)[0], atol=1e-6)
    with pytest.raises(ModelError, match="cannot convert"):
        convert_opset_version(
            read_model(build([node("Gelu", ["x"], ["y"])], {"x": [3]}, ["y"], opset=20)), 15
        )


def test_text_and_back(float_model) -> None:
    text = convert_onnx_to_onnxtxt(float_model)
    assert 'op_type: "Conv"' in text
    assert convert_onnxtxt_to_onnx(text) == float_model
    with pytest.raises(ModelError, match="not a model"):
        convert_onnxtxt_to_onnx("graph { nodes }")


@pytest.mark.parametrize("keep", [False, True])
def test_float16(keep: bool, float_model, sample) -> None:
    result = after(convert_fp32_to_fp16, float_model, keep_io_types=keep)
    assert {a.dtype for a in initializers(result).values()} == {np.dtype(np.float16)}
    session = ort.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = sample if keep else {"x": sample["x"].astype(np.float16)}
    got = session.run(None, feed)[0]
    assert got.dtype == (np.float32 if keep else np.float16)
    assert np.allclose(got, run(float_model, sample)[0], atol=0.02)


def test_float16_leaves_the_scales_of_resize_alone() -> None:
    model = build(
        [node("Resize", ["x", "", "s"], ["y"], mode="nearest")],
        {"x": [1, 1, 2, 2]},
        ["y"],
        {"s": np.float32([1, 1, 2, 2])},
    )
    assert initializers(after(convert_fp32_to_fp16, model))["s"].dtype == np.float32


def test_quantized_models_are_not_narrowed(model_of) -> None:
    with pytest.raises(ModelError, match="quantized"):
        convert_fp32_to_fp16(read_model(model_of("a8w8")))


def tool(name: str, *arguments: object) -> str:
    return TOOLS[name]([str(argument) for argument in arguments])


@pytest.fixture
def saved(float_model, tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(float_model, path)
    return path


@pytest.mark.parametrize("form", ["with_cast", "customqdq", "simulate_bf16"])
def test_bfloat16_in_each_form(form: str, saved: Path, tmp_path: Path, float_model, sample) -> None:
    out = tmp_path / "out.onnx"
    tool("convert_fp32_to_bf16", "--input", saved, "--output", out, "--format", form)
    got = ort.InferenceSession(str(out), providers=["CPUExecutionProvider"]).run(None, sample)[0]
    expected = run(float_model, sample)[0]
    assert not np.array_equal(got, expected)
    assert np.allclose(got, expected, atol=0.1)


def test_bfloat16_forms_and_back(saved: Path, tmp_path: Path, sample) -> None:
    pair, cast, clip, plain, full = (
        tmp_path / f"{n}.onnx" for n in ("pair", "cast", "clip", "plain", "full")
    )
    tool("convert_fp32_to_bf16", saved, pair, "--format", "customqdq")
    tool("replace_bfloat16_qdq_cast", "--input_model", pair, "--output_model", cast)
    tool("insert_clip_bfloat16_qdq", "--input_model", pair, "--output_model", clip)
    tool("remove_bf16_cast", cast, plain)
    tool("convert_fp16_to_fp32", "--input", cast, "--output", full)
    first = ort.InferenceSession(str(pair)).run(None, sample)[0]
    for path in (cast, clip):
        assert np.array_equal(ort.InferenceSession(str(path)).run(None, sample)[0], first)
    assert {n.op_type for n in onnx.load(cast).graph.node} >= {"Cast", "Conv"}
    assert sum(n.op_type == "Clip" for n in onnx.load(clip).graph.node) > 0
    assert "Cast" not in {n.op_type for n in onnx.load(full).graph.node}


def test_bfloat16_typed_graphs_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="run nowhere"):
        tool("convert_fp32_to_bf16", saved, tmp_path / "o.onnx", "--format", "bf16")


def test_float16_files(saved: Path, tmp_path: Path, float_model, sample) -> None:
    half, full = tmp_path / "half.onnx", tmp_path / "full.onnx"
    tool("convert_fp32_to_fp16", saved, half)
    tool("convert_fp16_to_fp32", "--input", half, "--output", full)
    sizes = [sum(a.nbytes for a in initializers(onnx.load(path)).values()) for path in (half, saved)]
    assert 2 * sizes[0] == sizes[1]
    assert np.allclose(run(onnx.load(full), sample)[0], run(float_model, sample)[0], atol=0.02)


def test_histograms_of_weights(saved: Path, tmp_path: Path) -> None:
    tool("save_weights_hist", "--input_model", saved, "--output", tmp_path / "all")
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == ["k.png", "w.png"]
    tool("save_weights_hist", "--input_model", saved, "--output", tmp_path / "each", "--perchannel")
    assert len(list((tmp_path / "each").iterdir())) == 4 + 4
    with Image.open(tmp_path / "all" / "w.png") as picture:
        assert len(np.unique(np.asarray(picture))) > 2


def test_histograms_of_tensors(saved: Path, tmp_path: Path, sample) -> None:
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "one.npy", sample["x"])
    tool("save_tensor_hist", "--input_model", saved, "--data_path", data, "--output_path", tmp_path / "h")
    names = {p.stem for p in (tmp_path / "h").iterdir()}
    assert {"x", "c", "r", "y"} <= names
