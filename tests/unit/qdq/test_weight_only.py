"""Weights in few bits in a written file: ONNX Runtime computes exactly with what they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

import roundel
from helpers import assert_sound, build, feeds, initializers, node, normal, ops, run, session
from roundel.errors import ModelError, RecipeError

B = normal(24, seed=2)


def _packed(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """With accuracy level 0, so that nothing but the weights changes."""
    changes = {"weight_only": {"accuracy_level": 0, **options}}
    if "exclude" in options:
        changes = {"selection": {"exclude": changes["weight_only"].pop("exclude")}, **changes}
    result = roundel.quantize(model, recipe="matmul_nbits", changes=changes).model
    assert_sound(model, result)
    return result


def _restored(model: onnx.ModelProto, name: str, inputs: int) -> NDArray[np.float64]:
    """The matrix (outputs, inputs) behind a MatMulNBits node, unpacked by the operator's definition."""
    constants = initializers(model)
    (found,) = [n for n in model.graph.node if n.name == name]
    wanted = {a.name: a.i for a in found.attribute}
    assert wanted["K"] == inputs
    bits, size = wanted["bits"], wanted["block_size"]
    blob = constants[found.input[1]]
    assert blob.shape == (wanted["N"], -(-inputs // size), size * bits // 8)
    codes = _codes(blob, bits).astype(np.float64)
    scale = constants[found.input[2]].astype(np.float64)
    zero = np.full(scale.shape, 2.0 ** (bits - 1))
    if len(found.input) > 3:
        zero = _codes(constants[found.input[3]], bits)[:, : scale.shape[1]].astype(np.float64)
    return ((codes - zero[..., None]) * scale[..., None]).reshape(wanted["N"], -1)[:, :inputs]


def _codes(blob: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    single = np.unpackbits(blob, axis=-1, bitorder="little")
    parts = single.reshape(*blob.shape[:-1], -1, bits).astype(np.int64)
    return np.asarray(parts @ (1 << np.arange(bits)), np.uint8)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_operator_computes_with_what_was_stored(bits: int, size: int, symmetric: bool) -> None:
    for inputs in (2 * size, 2 * size - 3, 5):
        weight = normal(inputs, 24, seed=1)
        nodes = [node("MatMul", ["x", "w"], ["y"], name="product")]
        model = build(nodes, {"x": ["batch", "rows", inputs]}, {"y": ["batch", "rows", 24]}, {"w": weight})
        result = _packed(model, bits=bits, group_size=size, symmetric=symmetric)
        assert ops(result) == ["MatMulNBits"]
        restored = _restored(result, "product", inputs)
        for shape in ((1, 1), (3, 5)):
            x = normal(*shape, inputs, seed=3)
            np.testing.assert_allclose(run(result, {"x": x})[0], x @ restored.T, rtol=1e-4, atol=1e-4)
        assert np.square(restored - weight.T).mean() < 5 * 0.25**bits * np.square(weight).mean()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("transposed", [0, 1])
def test_blocks_of_a_dequantizer(bits: int, symmetric: bool, transposed: int) -> None:
    weight = normal(37, 24, seed=1)
    stored = weight.T.copy() if transposed else weight
    nodes = [node("Gemm", ["x", "w", "b"], ["y"], name="product", transB=transposed)]
    model = build(nodes, {"x": ["rows", 37]}, {"y": ["rows", 24]}, {"w": stored, "b": B})
    result = _packed(model, bits=bits, group_size=16, symmetric=symmetric, format="qdq")
    assert [n.op_type for n in result.graph.node] == ["DequantizeLinear", "Gemm"]
    assert result.opset_import[0].version == 21
    kinds = {t.name: t.data_type for t in result.graph.initializer}
    signed = {4: TensorProto.INT4, 8: TensorProto.INT8}[bits]
    unsigned = {4: TensorProto.UINT4, 8: TensorProto.UINT8}[bits]
    assert kinds["w_quantized"] == (signed if symmetric else unsigned)
    assert (initializers(result)["w_scale"] > 0).all(), "readers of Q/DQ nodes count on positive scales"
    x = normal(5, 37, seed=3)
    (got,) = run(result, {"x": x})
    np.testing.assert_allclose(got, x @ weight + B, atol=(2.5, 0.15)[bits == 8])
    fused = ort.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])
    # ONNX Runtime's own choice for what it fuses: activations in int8.
    np.testing.assert_allclose(fused.run(None, {"x": x})[0], got, atol=0.2)


@pytest.mark.parametrize("kind", ["matmul_nbits", "qdq"])
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", [[24], [1, 24], [5, 24], [5, 1], [], None])
def test_gemm_keeps_its_bias(kind: str, transposed: int, bias: list[int] | None) -> None:
    weight = normal(40, 24, seed=1)
    constants = {"w": weight.T.copy() if transposed else weight}
    added: Any = 0
    if bias is not None:
        added = constants["b"] = np.asarray(normal(*bias, seed=2) if bias else np.float32(0.7))
    names = ["x", "w", *(["b"] if bias is not None else [])]
    model = build(
        [node("Gemm", names, ["y"], transB=transposed, name="product")], {"x": [5, 40]}, ["y"], constants
    )
    result = _packed(model, bits=8, group_size=16, format=kind)
    if kind == "matmul_nbits":
        assert ops(result) == ["MatMulNBits", *(["Add"] if bias is not None else [])]
    x = normal(5, 40, seed=3)
    np.testing.assert_allclose(run(result, {"x": x})[0], x @ weight + added, atol=0.1)


def test_a_bias_that_is_computed() -> None:
    nodes = [node("Tanh", ["z"], ["b"]), node("Gemm", ["x", "w", "b"], ["y"], name="product")]
    model = build(nodes, {"x": [5, 40], "z": [5, 24]}, ["y"], {"w": normal(40, 24, seed=1)})
    result = _packed(model, bits=8)
    feed = feeds({"x": (5, 40), "z": (5, 24)}, 1)[0]
    np.testing.assert_allclose(run(result, feed)[0], run(model, feed)[0], atol=0.1)


@pytest.mark.parametrize("kind", ["matmul_nbits", "qdq"])
def test_readers_of_one_weight_share_what_is_stored(kind: str) -> None:
    """Gather keeps the float one, and a Gemm that reads it the other way round needs its own."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="one"),
        node("MatMul", ["a", "w"], ["b"], name="two"),
        node("Gemm", ["b", "w"], ["c"], name="three", transB=1),
        node("Gather", ["w", "i"], ["d"], name="words"),
        node("Add", ["c", "d"], ["y"], name="sum"),
    ]
    constants = {"w": normal(32, 32, seed=1, scale=0.2)}
    model = build(nodes, {"x": [4, 32], "i": [4]}, ["y"], constants, types={"i": TensorProto.INT64})
    result = _packed(model, bits=8, group_size=16, format=kind)
    suffix = "packed" if kind == "matmul_nbits" else "quantized"
    assert {name for name in initializers(result) if suffix in name} == {f"w_{suffix}", f"w_{suffix}_1"}
    np.testing.assert_array_equal(initializers(result)["w"], constants["w"])
    feed = {"x": normal(4, 32, seed=3), "i": np.int64([3, 1, 4, 1])}
    np.testing.assert_allclose(run(result, feed)[0], run(model, feed)[0], atol=0.1)


def test_outputs_keep_their_names_and_readers() -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"], name="one"), node("Gemm", ["y", "w", "b"], ["z"], name="two")]
    model = build(nodes, {"x": [4, 24]}, ["y", "z"], {"w": normal(24, 24, seed=1), "b": B})
    result = _packed(model, bits=8)
    feed = feeds({"x": (4, 24)}, 1)[0]
    for got, wanted in zip(run(result, feed), run(model, feed), strict=True):
        np.testing.assert_allclose(got, wanted, atol=0.3)


def test_a_vector_as_input() -> None:
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [40]}, ["y"], {"w": normal(40, 24, seed=1)})
    result = _packed(model, bits=8)
    x = normal(40, seed=3)
    np.testing.assert_allclose(run(result, {"x": x})[0], run(model, {"x": x})[0], atol=0.1)


FLOAT = {
    "transposed input": (node("Gemm", ["x", "w"], ["y"], transA=1), "transposes its input"),
    "alpha": (node("Gemm", ["x", "w"], ["y"], alpha=0.5), "alpha"),
    "beta": (node("Gemm", ["x", "w", "b"], ["y"], beta=0.5), "beta"),
    "weight first": (node("MatMul", ["w", "x"], ["y"]), "two computed"),
    "stack": (node("MatMul", ["x", "v"], ["y"]), "not a float32 matrix"),
    "vector": (node("MatMul", ["x", "u"], ["y"]), "not a float32 matrix"),
    "other operator": (node("Tanh", ["x"], ["y"]), "not in the operator table"),
}


@pytest.mark.parametrize("name", FLOAT)
def test_what_has_no_packed_form_stays_with_a_reason(name: str) -> None:
    op, reason = FLOAT[name]
    constants = {"w": normal(8, 8), "b": normal(8), "v": normal(2, 8, 8), "u": normal(8)}
    model = build([op], {"x": [8, 8]}, ["y"], {k: v for k, v in constants.items() if k in op.input})
    result = roundel.quantize(model, recipe="matmul_nbits")
    assert ops(result.model) == [op.op_type]
    assert not result.record.quantized
    (told,) = result.record.float_nodes.values()
    assert reason in told


def test_infinite_weights_stay() -> None:
    weight = normal(8, 8)
    weight[3, 3] = np.inf
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [8, 8]}, ["y"], {"w": weight})
    assert ops(_packed(model)) == ["MatMul"]


def test_excluded_layers_stay() -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"], name="one"), node("MatMul", ["a", "w"], ["y"], name="two")]
    model = build(nodes, {"x": [4, 24]}, ["y"], {"w": normal(24, 24, seed=1)})
    result = _packed(model, exclude=["two"])
    assert ops(result) == ["MatMulNBits", "MatMul"]
    np.testing.assert_array_equal(initializers(result)["w"], normal(24, 24, seed=1))


def test_a_layer_inside_a_body_stays() -> None:
    inner = onnx.helper.make_graph(
        [node("MatMul", ["a", "w"], ["r"], name="inner")],
        "body",
        [],
        [onnx.helper.make_tensor_value_info("r", TensorProto.FLOAT, [4, 24])],
    )
    other = onnx.helper.make_graph(
        [node("Identity", ["a"], ["s"], name="same")],
        "other",
        [],
        [onnx.helper.make_tensor_value_info("s", TensorProto.FLOAT, [4, 24])],
    )
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="one"),
        node("If", ["which"], ["y"], name="if", then_branch=inner, else_branch=other),
    ]
    model = build(
        nodes,
        {"x": [4, 24], "which": []},
        {"y": [4, 24]},
        {"w": normal(24, 24, seed=1)},
        types={"which": TensorProto.BOOL},
    )
    result = _packed(model, bits=8)
    assert ops(result) == ["MatMulNBits", "If"]
    feed = {"x": normal(4, 24, seed=3), "which": np.array(True)}
    np.testing.assert_allclose(run(result, feed)[0], run(model, feed)[0], atol=1)


@pytest.mark.parametrize("level", [0, 1, 4])
def test_the_accuracy_level_is_written(level: int) -> None:
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [4, 64]}, ["y"], {"w": normal(64, 24, seed=1)})
    result = _packed(model, accuracy_level=level)
    attributes = {a.name: a.i for a in result.graph.node[0].attribute}
    assert attributes.get("accuracy_level", 0) == level
    x = normal(4, 64, seed=3)
    miss = np.abs(run(result, {"x": x})[0] - x @ _restored(result, result.graph.node[0].name, 64).T).max()
    assert (1e-3 < miss < 0.3) if level == 4 else miss < 1e-4


def test_weights_beside_the_model(tmp_path: Any) -> None:
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [4, 64]}, ["y"], {"w": normal(64, 24, seed=1)})
    changes = {"output": {"external_data": True}, "weight_only": {"format": "qdq", "accuracy_level": 0}}
    roundel.quantize(model, tmp_path / "y.onnx", recipe="matmul_nbits", changes=changes)
    assert (tmp_path / "y.onnx.data").stat().st_size >= 64 * 24 // 2
    ort.InferenceSession(str(tmp_path / "y.onnx"), providers=["CPUExecutionProvider"])


def test_a_format_that_the_runtime_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [4, 64]}, ["y"], {"w": normal(64, 24, seed=1)})

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("no", observed="bits 2 are not implemented")

    monkeypatch.setattr("roundel.qdq.weight_only.open_session", refuse)
    with pytest.raises(RecipeError, match="does not compute this format") as caught:
        _packed(model, bits=2)
    assert caught.value.observed == "bits 2 are not implemented"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_only": {"format": "qdq", "bits": 2, "accuracy_level": 0}}, "2 bits need matmul_nbits"),
        ({"weight_only": {"format": "qdq", "accuracy_level": 1}}, "a setting of MatMulNBits"),
        ({"weight_only": {"act_order": False}}, "belongs to gptq"),
        ({"weight_only": {"percdamp": 0.5}}, "belongs to gptq"),
        ({"mode": "static"}, "means mode weight_only"),
        ({"effort": "fast"}, "weight_only.algorithm"),
        ({"overrides": [{"tensors": ["w"], "type": "int8"}]}, "selection.exclude"),
        (
            {"output": {"opset": 17}, "weight_only": {"format": "qdq", "accuracy_level": 0}},
            "output.opset is 17",
        ),
        ({"weight_only": {"group_size": 48}}, "16, 32, 64, 128 or 256"),
        ({"weight_only": {"bits": 3}}, "2, 4 or 8"),
    ],
)
def test_settings_without_sense(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        roundel.load_recipe("matmul_nbits", changes)
    assert words in (caught.value.expected or "")


def test_the_file_is_refused_as_input_and_opens_elsewhere(tmp_path: Any) -> None:
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [4, 64]}, ["y"], {"w": normal(64, 24, seed=1)})
    path = tmp_path / "y.onnx"
    record = roundel.quantize(model, path, recipe="matmul_nbits").record
    assert record.quantized
    assert record.counts["quantized_nodes"] == {"MatMul": 1}
    assert record.counts["tensors"]["weight"] == 1
    with pytest.raises(ModelError, match="already quantized"):
        roundel.quantize(path, recipe="matmul_nbits")
    loaded = onnx.load(path)
    assert {i.domain for i in loaded.opset_import} >= {"com.microsoft"}
    assert numpy_helper.to_array(loaded.graph.initializer[0]).dtype == np.uint8
    assert session(loaded)
