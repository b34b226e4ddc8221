"""Compare: the right partners, the right figures, and the error where it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import roundel
from comparison_models import chain, images, ort_quantized, renamed, residual_net, with_weight
from helpers import Feed, build, feeds, initializers, node, normal, quantize, session
from roundel.errors import ModelError
from roundel.example import load_example
from roundel.measure import paired
from roundel.measure.compare import compare_models
from roundel.measure.types import Comparison
from roundel.numerics.metrics import Closeness


def sqnrs(comparison: Comparison) -> Mapping[str, float]:
    return {t.name: t.introduced.sqnr_db for t in comparison.tensors if t.introduced is not None}


def tensor(model: onnx.ModelProto, name: str, feed: Feed) -> NDArray[np.float32]:
    """An inner tensor, by making it an output."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return np.asarray(session(copy).run([name], feed)[0])


@pytest.fixture(scope="module")
def ort_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    model = residual_net()
    return model, ort_quantized(model, tmp_path_factory.mktemp("ort"), images())


def test_finds_every_tensor_of_a_model_that_onnx_runtime_quantized(
    ort_pair: tuple[onnx.ModelProto, onnx.ModelProto],
) -> None:
    result = compare_models(*ort_pair, images())
    # Its Relus are gone (the quantizers cut off), the batch norm has stayed, the output was renamed.
    assert [(t.name, t.op) for t in result.tensors] == [
        ("x", "Input"),
        ("c1", "Conv"),
        ("a1", "BatchNormalization"),
        ("a2", "Conv"),
        ("s", "Add"),
        ("p", "GlobalAveragePool"),
        ("f", "Flatten"),
        ("y", "Gemm"),
    ]
    assert result.unmatched == {}
    assert result.tensor("s").sources == ("a1", "a2")
    assert result.tensor("a1").nodes == ("bn1",)
    assert [(w.name, w.role) for w in result.weights] == [
        ("w1", "weight"),
        ("gamma", "constant"),
        ("beta", "constant"),
        ("w2", "weight"),
        ("b2", "bias"),
        ("w3", "weight"),
        ("b3", "bias"),
    ]
    assert all(t.total.sqnr_db > 30 for t in result.tensors)


def test_figures_are_those_of_a_direct_computation(
    ort_pair: tuple[onnx.ModelProto, onnx.ModelProto], tmp_path: Path
) -> None:
    model, quantized = ort_pair
    data = images(3)
    found = compare_models(model, quantized, data).tensor("a2")
    onnx.save(quantized, tmp_path / "q.onnx")
    onnx.utils.extract_model(
        tmp_path / "q.onnx",
        tmp_path / "layer.onnx",
        ["a1_DequantizeLinear_Output"],
        ["a2_DequantizeLinear_Output"],
    )
    layer = onnx.load(tmp_path / "layer.onnx")
    total, introduced, inherited = Closeness(), Closeness(), Closeness()
    for feed in data:
        wanted = tensor(model, "a2", feed)
        shown = tensor(quantized, "a2_DequantizeLinear_Output", feed)
        alone = session(layer).run(None, {"a1_DequantizeLinear_Output": tensor(model, "a1", feed)})[0]
        total = total.merge(Closeness.of(wanted, shown))
        introduced = introduced.merge(Closeness.of(wanted, alone))
        inherited = inherited.merge(Closeness.of(alone, shown))
    assert found.introduced is not None
    assert found.inherited is not None
    for said, meant in ((found.total, total), (found.introduced, introduced), (found.inherited, inherited)):
        assert said.sqnr_db == pytest.approx(meant.sqnr_db, abs=1e-3)
        assert said.cosine == pytest.approx(meant.cosine, abs=1e-6)
        assert said.worst == pytest.approx(meant.worst, rel=1e-5)
        assert said.mse == pytest.approx(meant.noise / meant.count, rel=1e-4)


def test_a_spoilt_layer_is_the_only_one_to_blame(ort_pair: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    model, quantized = ort_pair
    codes = initializers(quantized)["w2_quantized"]
    spoilt = with_weight(
        quantized, "w2_quantized", np.where(np.abs(codes) < 40, 0, codes).astype(codes.dtype)
    )
    before, after = (
        sqnrs(compare_models(model, quantized, images())),
        sqnrs(compare_models(model, spoilt, images())),
    )
    assert after["a2"] < before["a2"] - 15
    assert {name: after[name] for name in after if name != "a2"} == {
        n: before[n] for n in before if n != "a2"
    }
    spoilt_result = compare_models(model, spoilt, images())
    assert spoilt_result.by_introduced()[0].name == "a2"
    summed = spoilt_result.tensor("s")
    assert summed.inherited is not None
    assert summed.inherited.sqnr_db < 25
    weight = next(w for w in spoilt_result.weights if w.name == "w2")
    assert weight.error.sqnr_db < 20


def test_renamed_tensors_are_found_by_structure(ort_pair: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    model, quantized = ort_pair
    names = {name for n in quantized.graph.node for name in n.output if name not in ("y",)}
    other = renamed(quantized, {name: f"t{i}" for i, name in enumerate(sorted(names))})
    result, wanted = compare_models(model, other, images(2)), compare_models(model, quantized, images(2))
    # The Relus' outputs cannot be told from their inputs by structure alone, but they were absorbed here.
    assert sqnrs(result) == sqnrs(wanted)


def test_a_batch_norm_folded_under_the_conv_s_name_is_no_mismatch(tmp_path: Path) -> None:
    model = residual_net(clip=True)
    prepared = roundel.quantize(model, recipe="a8w8_minmax", data=images(), effort="none")
    quantized = renamed(prepared.model, {"n1": "c1"})
    quantized.producer_name = "another tool"
    result = compare_models(model, quantized, images(2))
    assert result.tensor("a1").total.sqnr_db > 30
    assert result.tensor("a1").nodes[0] == "conv1"


def test_equalization_by_another_tool_is_taken_into_account(tmp_path: Path) -> None:
    factors = np.array([1, 3, 0.5, 2, 0.4, 1.5])
    quantized = ort_quantized(chain(scale_rows=factors), tmp_path, images())
    result = compare_models(chain(), quantized, images())
    first = result.tensor("a1")
    assert first.rescaled
    assert first.total.sqnr_db > 30
    assert not result.tensor("y").rescaled
    weight = next(w for w in result.weights if w.name == "w1")
    assert weight.rescaled
    assert weight.error.sqnr_db > 30
    ratio = [
        after[1] / before[1] for before, after in zip(weight.float_ranges, weight.stored_ranges, strict=True)
    ]
    assert ratio == pytest.approx(list(factors), rel=0.05)


@pytest.mark.parametrize("recipe", ["xint8", "a8w8"])
def test_roundel_s_own_equalization_is_taken_into_account(recipe: str, tmp_path: Path) -> None:
    wide = chain(scale_rows=np.array([1, 20, 0.1, 4, 0.3, 8]))
    result = roundel.quantize(wide, tmp_path / "q.onnx", recipe=recipe, data=images(), effort="fast")
    assert result.record.prepare["equalize"] > 0
    # With its record beside it, and in memory without one.
    for quantized in (tmp_path / "q.onnx", result.model):
        found = compare_models(wide, quantized, images())
        assert found.tensor("a1").rescaled
        assert min(sqnrs(found).values()) > 25


def test_saturation_and_range_use_are_of_the_chosen_range() -> None:
    model = build(
        [node("Conv", ["x", "w"], ["c"], "conv"), node("Relu", ["c"], ["y"], "relu")],
        {"x": [1, 2, 6, 6]},
        {"y": [1, 3, 6, 6]},
        {"w": normal(3, 2, 1, 1, scale=1.0)},
    )
    data = feeds({"x": [1, 2, 6, 6]}, 8)
    wanted = np.stack([session(model).run(None, feed)[0] for feed in data])
    top = float(np.quantile(wanted, 0.9))
    narrow = quantize(model, "a8w8", data, overrides=[{"tensors": ["y"], "range": [0.0, top]}])
    found = compare_models(model, narrow.model, data).tensor("y")
    assert found.storage is not None
    assert found.saturated == pytest.approx(np.mean(wanted > found.storage.high + found.storage.scale / 2))
    assert found.saturated > 0.05
    assert found.range_use == pytest.approx(0.5, abs=0.01)  # a symmetric range of a tensor without negatives
    assert (found.float_low, found.float_high) == (wanted.min(), wanted.max())
    assert sum(found.histogram.counts) == wanted.size
    wide = quantize(model, "a8w8", data, overrides=[{"tensors": ["y"], "range": [-99.0, 99.0]}])
    loose = compare_models(model, wide.model, data).tensor("y")
    assert loose.saturated == 0
    assert loose.range_use is not None
    assert loose.range_use < 0.1


def test_worst_channels_hold_the_error() -> None:
    weight = normal(6, 4, 1, 1)
    weight[3] *= 60  # one scale for all: the others lose, this one has the power
    model = build(
        [node("Conv", ["x", "w"], ["y"], "conv")], {"x": [1, 4, 5, 5]}, {"y": [1, 6, 5, 5]}, {"w": weight}
    )
    data = feeds({"x": [1, 4, 5, 5]})
    found = compare_models(model, quantize(model, "a8w8", data).model, data).tensor("y")
    shown = {c.channel: c for c in found.worst_channels}
    reference = np.concatenate([session(model).run(None, f)[0] for f in data])
    actual = np.concatenate([session(quantize(model, "a8w8", data).model).run(None, f)[0] for f in data])
    noise = np.square(actual - reference).sum((0, 2, 3))
    assert set(shown) <= set(range(6))
    assert next(iter(shown)) in np.argsort(-noise)[:3]


def test_the_same_model_twice_is_exact() -> None:
    model = residual_net()
    result = compare_models(model, model, images(2))
    assert all(t.total.sqnr_db == float("inf") and t.storage is None for t in result.tensors)
    assert result.outputs[0].same_top == 1.0


@pytest.mark.parametrize(
    "preset",
    ["a16w8", "bf16", "bf16_cast", "bfp16", "u8s8_aaws", "int8_transformer_default", "uint8_dynamic_quant"],
)
def test_every_kind_of_quantized_example(preset: str) -> None:
    example = load_example()
    data = example.calibration[:4]
    quantized = roundel.quantize(example.model_path, recipe=preset, data=data, effort="none")
    result = compare_models(example.model_path, quantized.model, data)
    assert result.outputs[0].difference.sqnr_db > 5
    if any(t.storage for t in result.tensors):
        assert all(t.introduced is not None for t in result.tensors)
    limited = [t for t in result.tensors if t.storage is not None and t.storage.dtype == "bfloat16"]
    assert preset.startswith("bf16") == bool(limited)
    assert all(t.saturated is None for t in limited)


def test_little_memory_gives_the_same_figures(
    ort_pair: tuple[onnx.ModelProto, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compare_models(*ort_pair, images(3))
    monkeypatch.setattr(paired, "MAX_LIVE_BYTES", 20_000)
    parts = compare_models(*ort_pair, images(3))
    assert sqnrs(parts) == pytest.approx(sqnrs(whole), abs=1e-3)
    assert [sum(t.histogram.counts) for t in parts.tensors] == [
        sum(t.histogram.counts) for t in whole.tensors
    ]


def test_a_branch_of_its_own_keeps_its_inherited_error_apart() -> None:
    """A node with a body (If) cannot be computed twice: its error stays whole, and nothing fails."""
    body = {
        side: onnx.helper.make_graph(
            [node(op, ["c"], ["b"], f"{side}_node")],
            side,
            [],
            [onnx.helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, [1, 3, 6, 6])],
        )
        for side, op in (("then_branch", "Abs"), ("else_branch", "Neg"))
    }
    model = build(
        [
            node("Conv", ["x", "w"], ["c"], "conv"),
            node("If", ["flag"], ["d"], "if", **body),
            node("Relu", ["d"], ["y"], "relu"),
        ],
        {"x": [1, 2, 6, 6]},
        {"y": [1, 3, 6, 6]},
        {"w": normal(3, 2, 1, 1), "flag": np.array(True)},
    )
    data = feeds({"x": [1, 2, 6, 6]})
    result = compare_models(model, quantize(model, "a8w8", data).model, data)
    assert result.tensor("c").introduced is not None
    assert result.outputs[0].difference.sqnr_db > 20


def test_json_and_back(ort_pair: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    result = compare_models(*ort_pair, images(1))
    assert Comparison.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_models_that_do_not_belong_together_are_refused() -> None:
    other = build(
        [node("Relu", ["x"], ["u"], "r"), node("Abs", ["x"], ["v"], "a")], {"x": [1, 3]}, ["u", "v"]
    )
    with pytest.raises(ModelError, match="same outputs"):
        compare_models(residual_net(), other, images(1))


def test_the_float_model_must_be_float(ort_pair: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    model, quantized = ort_pair
    with pytest.raises(ModelError, match="already quantized"):
        compare_models(quantized, model, images(1))


def test_roundel_compare_is_callable_whatever_was_imported_first() -> None:
    import subprocess
    import sys

    for first in ("import roundel.measure.compare", "roundel.compare"):
        code = f"import roundel\n{first}\nprint(callable(roundel.compare), roundel.compare.__name__)"
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert shown.stdout.split() == ["True", "compare"]


def test_a_tensor_that_quantization_silences() -> None:
    model = build([node("Sigmoid", ["x"], ["y"], "s")], {"x": [1, 40]}, {"y": [1, 40]})
    data = [{"x": normal(1, 40, seed=i) - 12} for i in range(4)]
    quantized = quantize(model, "a8w8", data, overrides=[{"tensors": ["y"], "range": [-1.0, 1.0]}])
    found = compare_models(model, quantized.model, data).tensor("y")
    assert (found.total.sqnr_db, found.total.cosine) == (pytest.approx(0.0), pytest.approx(0.0, abs=1e-3))


def test_weights_that_constant_nodes_hold(ort_pair: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    model, quantized = ort_pair
    moved = onnx.ModelProto()
    moved.CopyFrom(quantized)
    held = [
        onnx.helper.make_node("Constant", [], [t.name], f"c_{t.name}", value=t)
        for t in moved.graph.initializer
    ]
    nodes = [*held, *moved.graph.node]
    del moved.graph.initializer[:], moved.graph.node[:]
    moved.graph.node.extend(nodes)
    result, wanted = compare_models(model, moved, images(1)), compare_models(model, quantized, images(1))
    assert result.unmatched == {}
    assert [w.error for w in result.weights] == [w.error for w in wanted.weights]
    assert [w.name for w in result.weights] == [w.name for w in wanted.weights]


def test_smoothing_that_a_norm_took_is_taken_into_account() -> None:
    def net(factors: NDArray[np.float32]) -> onnx.ModelProto:
        return build(
            [
                node("LayerNormalization", ["x", "g", "b"], ["n"], "norm", axis=-1),
                node("MatMul", ["n", "w"], ["y"], "mm"),
            ],
            {"x": [1, 6, 8]},
            {"y": [1, 6, 5]},
            {
                "g": (np.abs(normal(8, seed=1)) + 0.5) / factors,
                "b": normal(8, seed=2) / factors,
                "w": normal(8, 5, seed=3) * factors[:, None],
            },
        )

    data = feeds({"x": [1, 6, 8]})
    factors = np.array([4, 1, 0.2, 1, 8, 2, 0.5, 3], np.float32)
    quantized = quantize(net(factors), "a16w8", data).model
    quantized.producer_name = "another tool"
    result = compare_models(net(np.ones(8, np.float32)), quantized, data)
    assert result.tensor("n").rescaled
    assert min(sqnrs(result).values()) > 20
    assert result.notes == ()


def test_weights_of_another_model_are_noted() -> None:
    conv = node("Conv", ["x", "w"], ["y"], "conv")
    one, other = (
        build([conv], {"x": [1, 4, 5, 5]}, {"y": [1, 6, 5, 5]}, {"w": normal(6, 4, 1, 1, seed=seed)})
        for seed in (1, 2)
    )
    data = feeds({"x": [1, 4, 5, 5]})
    assert (
        "are not those of the float model"
        in compare_models(one, quantize(other, "a8w8", data).model, data).notes[0]
    )
