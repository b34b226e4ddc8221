"""Weight-only quantization of a small transformer: rounding, GPTQ, and what GPTQ may not do."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import roundel
from helpers import Feed, assert_sound, build, initializers, node, normal, ops, rng, session
from roundel.errors import DataError, RecipeError
from roundel.model.memory import Budget, within
from roundel.numerics.metrics import Closeness
from roundel.result import QuantizeResult

WIDTH, HEADS, WORDS = 48, 4, 60


@cache
def transformer() -> onnx.ModelProto:
    """Two blocks with attention and a gate of two layers; batch and length are open."""
    nodes = [node("Gather", ["words", "ids"], ["h0"], name="words")]
    constants: dict[str, Any] = {"words": _words(), "root": np.float32((WIDTH // HEADS) ** 0.5)}
    constants["split"] = np.int64([0, 0, HEADS, WIDTH // HEADS])
    constants["flat"] = np.int64([0, 0, WIDTH])
    for index in range(2):
        nodes += _block(index, constants)
    nodes.append(node("Identity", ["h2"], ["y"], name="last"))
    shape = ["batch", "length", WIDTH]
    return build(
        nodes, {"ids": ["batch", "length"]}, {"y": shape}, constants, types={"ids": TensorProto.INT64}
    )


def _words() -> Any:
    """Of low rank but for some noise: the entries of a word depend on each other, as they do in life."""
    return normal(WORDS, 8, seed=1) @ normal(8, WIDTH, seed=2) + normal(WORDS, WIDTH, seed=3, scale=0.1)


def _block(index: int, constants: dict[str, Any]) -> list[onnx.NodeProto]:
    def name(part: str) -> str:
        return f"{part}{index}"

    def weight(part: str, *shape: int) -> str:
        scale = 1 / shape[0] ** 0.5 if len(shape) == 2 else 0.1
        constants[name(part)] = normal(*shape, seed=10 * index + len(constants), scale=scale)
        return name(part)

    nodes = []
    for part in ("q", "k", "v"):
        product, shaped = name(f"{part}_product"), name(f"{part}_shaped")
        nodes += [
            node("MatMul", [f"h{index}", weight(f"w{part}", WIDTH, WIDTH)], [product], name=name(part)),
            node("Reshape", [product, "split"], [shaped]),
            node("Transpose", [shaped], [name(f"{part}_heads")], perm=[0, 2, 1, 3]),
        ]
    constants[name("gamma")], constants[name("beta")] = np.ones(WIDTH, np.float32), normal(WIDTH, seed=9)
    return [
        *nodes,
        node("Transpose", [name("k_heads")], [name("turned")], perm=[0, 1, 3, 2]),
        node("MatMul", [name("q_heads"), name("turned")], [name("scores")], name=name("scores")),
        node("Div", [name("scores"), "root"], [name("scaled")]),
        node("Softmax", [name("scaled")], [name("shares")], axis=-1),
        node("MatMul", [name("shares"), name("v_heads")], [name("mixed")], name=name("mixed")),
        node("Transpose", [name("mixed")], [name("back")], perm=[0, 2, 1, 3]),
        node("Reshape", [name("back"), "flat"], [name("joined")]),
        node("MatMul", [name("joined"), weight("wo", WIDTH, WIDTH)], [name("o")], name=name("out")),
        node("Add", [name("o"), f"h{index}"], [name("skip")]),
        node("LayerNormalization", [name("skip"), name("gamma"), name("beta")], [name("n")]),
        node("MatMul", [name("n"), weight("wu", WIDTH, 80)], [name("u")], name=name("up")),
        node("Add", [name("u"), weight("bu", 80)], [name("ub")]),
        node("Relu", [name("ub")], [name("r")]),
        node("MatMul", [name("r"), weight("wd", 80, WIDTH)], [name("d")], name=name("down")),
        node("Add", [name("d"), name("n")], [f"h{index + 1}"]),
    ]


LAYERS = [f"{part}{index}" for index in range(2) for part in ("q", "k", "v", "out", "up", "down")]


@cache
def texts(seed: int = 0, count: int = 20) -> tuple[Feed, ...]:
    """Each of a length of its own."""
    generator = rng(seed)
    lengths = generator.integers(6, 14, count)
    return tuple({"ids": generator.integers(0, WORDS, (1, int(length)))} for length in lengths)


def packed(model: onnx.ModelProto, data: Any = None, **options: Any) -> QuantizeResult:
    settings = {"group_size": 16, "accuracy_level": 0, **options}
    data = data if data is None else list(data)
    return roundel.quantize(model, recipe="matmul_nbits", data=data, changes={"weight_only": settings})


def sqnr(model: onnx.ModelProto, result: QuantizeResult, data: Iterable[Feed]) -> float:
    """Of all outputs together, in dB."""
    one, other = session(model), session(result.model)
    total = Closeness()
    for feed in data:
        for a, b in zip(one.run(None, feed), other.run(None, feed), strict=True):
            total = total.merge(Closeness.of(a, b))
    return total.sqnr_db


@pytest.mark.parametrize("kind", ["matmul_nbits", "qdq"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_needs_no_data(kind: str, bits: int) -> None:
    if (kind, bits) == ("qdq", 2):
        pytest.skip("refused, see the tests of the writer")
    result = packed(transformer(), bits=bits, format=kind)
    assert_sound(transformer(), result.model)
    assert result.record.counts["quantized_nodes"] == {"MatMul": 12}
    assert result.record.data == {"kind": "none needed"}
    assert not result.record.outputs
    if kind == "matmul_nbits":
        assert ops(result.model).count("MatMulNBits") == 12
        assert ops(result.model).count("MatMul") == 4, "attention multiplies two computed tensors"
    assert sqnr(transformer(), result, texts(1)) > {2: 1, 4: 12, 8: 35}[bits]


def test_the_outputs_are_measured_where_there_is_data() -> None:
    result = packed(transformer(), texts(), bits=8)
    (output,) = result.record.outputs
    assert output.sqnr_db > 35
    assert result.record.data["samples_seen"] == 20
    assert any("12 weights in 8 bits" in note for note in result.record.notes)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("order", [True, False])
def test_gptq_is_better_on_texts_that_it_has_not_seen(bits: int, size: int, order: bool) -> None:
    plain = packed(transformer(), bits=bits, group_size=size)
    solved = packed(transformer(), texts(), bits=bits, group_size=size, algorithm="gptq", act_order=order)
    assert_sound(transformer(), solved.model)
    gain = sqnr(transformer(), solved, texts(1)) - sqnr(transformer(), plain, texts(1))
    assert gain > 2


def test_the_record_tells_what_gptq_did_layer_by_layer() -> None:
    (step,) = packed(transformer(), texts(), algorithm="gptq").record.improvements
    assert step.step == "gptq"
    assert step.kept
    assert step.after_db > step.before_db + 1
    assert sorted(layer.layer for layer in step.layers) == sorted(LAYERS)
    assert sum(layer.kept and layer.after_db > layer.before_db for layer in step.layers) >= 10
    assert all(layer.after_db == layer.before_db for layer in step.layers if not layer.kept)


@pytest.mark.parametrize("index", [0, 9, 19])
def test_every_sample_counts(index: int) -> None:
    changed = [*texts()]
    changed[index] = {"ids": changed[index]["ids"][:, ::2]}
    one, other = (packed(transformer(), data, algorithm="gptq") for data in (texts(), changed))
    assert one.model.SerializeToString() != other.model.SerializeToString()


def test_the_same_data_give_the_same_file_wherever_values_are_kept() -> None:
    files = [packed(transformer(), texts(), algorithm="gptq").model.SerializeToString()]
    files.append(packed(transformer(), iter(texts()), algorithm="gptq").model.SerializeToString())
    with within(Budget(held=0)):
        files.append(packed(transformer(), texts(), algorithm="gptq").model.SerializeToString())
    assert files[0] == files[1] == files[2]


def _contrary() -> tuple[onnx.ModelProto, list[Feed]]:
    """Two layers; the samples that judge contradict those that teach what there is to know about one."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="misled"),
        node("MatMul", ["z", "v"], ["b"], name="taught"),
        node("Concat", ["a", "b"], ["y"], axis=1),
    ]
    constants = {"w": normal(32, 8, seed=1), "v": normal(32, 8, seed=2)}
    model = build(nodes, {"x": [16, 32], "z": [16, 32]}, ["y"], constants)
    data = []
    for index in range(10):
        # Neighbours are alike, so that one can make up for the other; in the end, they are opposites.
        signs = 1 if index < 8 else np.float32([1, -1] * 16)
        x = np.repeat(normal(16, 16, seed=index), 2, axis=1) * signs
        z = normal(16, 4, seed=20 + index) @ normal(4, 32, seed=7)
        data.append({"x": x, "z": z})
    return model, data


def test_a_layer_is_kept_only_where_held_out_samples_agree() -> None:
    model, data = _contrary()
    plain, solved = packed(model), packed(model, data, algorithm="gptq")
    (step,) = solved.record.improvements
    assert {layer.layer: layer.kept for layer in step.layers} == {"misled": False, "taught": True}
    before, after = initializers(plain.model), initializers(solved.model)
    np.testing.assert_array_equal(before["w_packed"], after["w_packed"])
    np.testing.assert_array_equal(before["w_scales"], after["w_scales"])
    assert (before["v_packed"] != after["v_packed"]).any()


def test_nothing_is_kept_where_the_whole_model_gets_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(model: Any, layers: Any, rounded: Any, *_: Any) -> Any:
        bad = {
            key: stored.__class__(stored.codes * 0, stored.params, stored.scheme)
            for key, stored in rounded.items()
        }
        return bad, ()

    monkeypatch.setattr("roundel.improve.steps.gptq_layers", spoiled)
    result = packed(transformer(), texts(), algorithm="gptq")
    (step,) = result.record.improvements
    assert not step.kept
    assert result.model.SerializeToString() == packed(transformer()).model.SerializeToString()


def test_a_weight_with_several_readers_is_solved_for_all() -> None:
    nodes = [node("Gather", ["words", "ids"], ["h0"], name="words")]
    for index in range(3):
        nodes += [
            node("MatMul", [f"h{index}", "w"], [f"p{index}"], name=f"layer{index}"),
            node("Tanh", [f"p{index}"], [f"h{index + 1}"]),
        ]
    nodes.append(node("MatMul", ["h3", "v"], ["y"], name="head"))
    constants = {"words": _words(), "w": normal(WIDTH, WIDTH, seed=4, scale=0.2), "v": normal(WIDTH, 24)}
    model = build(
        nodes, {"ids": ["n", "m"]}, {"y": ["n", "m", 24]}, constants, types={"ids": TensorProto.INT64}
    )
    plain, solved = packed(model), packed(model, texts(), algorithm="gptq")
    assert_sound(model, solved.model)
    (step,) = solved.record.improvements
    assert [layer.layer for layer in step.layers] == ["layer0", "head"]
    assert sum("packed" in name for name in initializers(solved.model)) == 2
    assert sqnr(model, solved, texts(1)) > sqnr(model, plain, texts(1)) + 1


def test_a_body_between_two_layers_may_capture_what_it_likes() -> None:
    def body(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        return helper.make_graph(list(nodes), name, [], [out])

    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="one"),
        node(
            "If",
            ["which"],
            ["b"],
            name="if",
            then_branch=body("yes", node("Mul", ["a", "gain"], ["yes_out"])),
            else_branch=body("no", node("Tanh", ["a"], ["no_out"])),
        ),
        node("MatMul", ["b", "v"], ["y"], name="two"),
    ]
    constants = {"w": normal(32, 32, seed=1), "v": normal(32, 8, seed=2), "gain": np.float32([2])}
    types = {"which": TensorProto.BOOL}
    model = build(nodes, {"x": [8, 32], "which": []}, {"y": [8, 8]}, constants, types=types)
    mix = normal(6, 32, seed=3)
    data = [{"x": normal(8, 6, seed=i) @ mix, "which": np.array(i % 2 == 0)} for i in range(10)]
    plain, solved = packed(model), packed(model, data, algorithm="gptq")
    assert sqnr(model, solved, data) > sqnr(model, plain, data) + 3


def test_a_layer_on_a_graph_input_and_one_on_a_graph_output() -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"], name="one"), node("MatMul", ["a", "v"], ["y"], name="two")]
    model = build(
        nodes, {"x": [8, 32]}, ["a", "y"], {"w": normal(32, 32, seed=1), "v": normal(32, 8, seed=2)}
    )
    data = [{"x": normal(8, 6, seed=i) @ normal(6, 32, seed=3)} for i in range(10)]
    plain, solved = packed(model), packed(model, data, algorithm="gptq")
    assert_sound(model, solved.model)
    assert sqnr(model, solved, data) > sqnr(model, plain, data) + 3


def test_too_few_samples() -> None:
    with pytest.raises(DataError, match="needs calibration data"):
        packed(transformer(), algorithm="gptq")
    with pytest.raises(DataError, match="GPTQ needs more samples") as caught:
        packed(transformer(), texts()[:3], algorithm="gptq")
    assert caught.value.observed == "3 samples"


def test_inputs_that_overflow() -> None:
    nodes = [node("Exp", ["x"], ["e"]), node("MatMul", ["e", "w"], ["y"], name="one")]
    model = build(nodes, {"x": [8, 32]}, ["y"], {"w": normal(32, 8, seed=1)})
    data = [{"x": normal(8, 32, seed=i, scale=100)} for i in range(6)]
    with pytest.raises(DataError, match="not finite") as caught:
        packed(model, data, algorithm="gptq")
    assert "one" in (caught.value.where or "")


def test_data_that_do_not_fit_into_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundel.stages._KEPT_BYTES", sum(t["ids"].nbytes for t in texts()[:18]))
    result = packed(transformer(), texts(), algorithm="gptq")
    assert any("the first 18 of 20 samples" in note for note in result.record.notes)


def test_nothing_to_solve_needs_no_data() -> None:
    model = build([node("Tanh", ["x"], ["y"])], {"x": [4, 4]}, ["y"])
    assert not packed(model, algorithm="gptq").record.quantized


def test_statistics_are_refused(tmp_path: Any) -> None:
    with pytest.raises(RecipeError, match="no statistics"):
        roundel.quantize(transformer(), recipe="matmul_nbits", data=texts(), stats=tmp_path / "s.npz")
