"""`roundel.convert`: whole models to short floats, between their forms, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import roundel
from helpers import build, feeds, node, normal
from roundel.example import load_example
from roundel.rules import check

SHAPES = {"x": [1, 3, 6, 6]}
FORMS: list[dict[str, Any]] = [
    {"form": "pair"},
    {"form": "pair", "half_weights": True},
    {"form": "cast"},
    {"form": "cast", "half_weights": True},
]


def network(dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Its feature output is read on, and one weight serves two layers."""
    half = np.float16 if dtype == TensorProto.FLOAT16 else np.float32
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Conv", ["c", "w"], ["features"], name="again", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["features", "g", "h", "m", "v"], ["n"], name="norm"),
        node("HardSigmoid", ["n"], ["y"], name="gate", alpha=0.3),
    ]
    constants = {
        "w": normal(3, 3, 3, 3),
        "g": np.abs(normal(3, seed=1)) + 1,
        "h": normal(3, seed=2),
        "m": normal(3, seed=3),
        "v": np.abs(normal(3, seed=4)) + 1,
    }
    constants = {name: array.astype(half) for name, array in constants.items()}
    types = dict.fromkeys(("x", "y", "features"), dtype)
    return build(nodes, SHAPES, ["y", "features"], constants, types=types)


def outputs(model: onnx.ModelProto | Path, seed: int = 0) -> list[bytes]:
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    feed = {"x": normal(*SHAPES["x"], seed=seed, scale=3)}
    return [np.asarray(value).tobytes() for value in session.run(None, feed)]


def converted(source: Any, path: Path, **options: Any) -> Path:
    roundel.convert(source, path, **options)
    return path


@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_any_form_becomes_any_other(to: Any, tmp_path: Path) -> None:
    first = converted(network(), tmp_path / "first.onnx", to=to)
    expected = outputs(first)
    assert expected != outputs(network())
    for index, before in enumerate(FORMS):
        middle = converted(first, tmp_path / f"{index}.onnx", to=to, **before)
        assert outputs(middle) == expected
        for number, after in enumerate(FORMS):
            last = converted(middle, tmp_path / f"{index}.{number}.onnx", to=to, **after)
            assert outputs(last) == expected


def test_it_is_what_quantize_writes(tmp_path: Path) -> None:
    roundel.quantize(network(), tmp_path / "q.onnx", recipe="bf16")
    converted(network(), tmp_path / "c.onnx")
    assert (tmp_path / "q.onnx").read_bytes() == (tmp_path / "c.onnx").read_bytes()
    assert not (tmp_path / "c.json").exists()


def test_pairs_are_taken_out_again(tmp_path: Path) -> None:
    for form in ("pair", "cast"):
        short = converted(network(), tmp_path / f"{form}.onnx", form=form)
        back = onnx.load(converted(short, tmp_path / f"{form}.back.onnx", to="fp32"))
        assert {n.op_type for n in back.graph.node} <= {"Conv", "BatchNormalization", "HardSigmoid"}
        assert [o.name for o in back.graph.output] == ["y", "features"]
        assert not back.functions
        assert not [o for o in back.opset_import if o.domain == "com.amd.quark"]
        weight = next(i for i in back.graph.initializer if i.name == "w")
        assert np.array_equal(numpy_helper.to_array(weight), normal(3, 3, 3, 3))


def test_sixteen_bit_weights_come_back_rounded(tmp_path: Path) -> None:
    small = converted(network(), tmp_path / "small.onnx", half_weights=True)
    back = onnx.load(converted(small, tmp_path / "back.onnx", to="fp32"))
    assert {i.data_type for i in back.graph.initializer if i.dims} == {TensorProto.FLOAT}
    plain = onnx.load(converted(network(), tmp_path / "plain.onnx", form="plain"))
    a = next(numpy_helper.to_array(i) for i in back.graph.initializer if i.name == "w")
    b = next(numpy_helper.to_array(i) for i in plain.graph.initializer if i.name == "w")
    assert np.array_equal(a, b)


def test_a_plain_graph_can_be_marked_again(tmp_path: Path) -> None:
    plain = converted(network(), tmp_path / "plain.onnx", form="plain")
    cast = converted(network(), tmp_path / "cast.onnx", form="cast")
    assert outputs(plain) != outputs(cast)
    assert outputs(converted(plain, tmp_path / "marked.onnx", form="cast")) == outputs(cast)
    assert outputs(converted(cast, tmp_path / "again.onnx", form="plain")) == outputs(plain)


def test_scales_and_clips_go_along(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"activations": {"scaled": True}, "weights": {"scaled": True}}
    source = tmp_path / "scaled.onnx"
    roundel.quantize(
        network(), source, recipe="bf16", data=feeds(SHAPES), changes={**recipe, "floats": {"clip": True}}
    )
    for index, options in enumerate(FORMS):
        path = converted(source, tmp_path / f"{index}.onnx", **options)
        assert outputs(path) == outputs(source)
        kinds = [n.op_type for n in onnx.load(path).graph.node]
        assert kinds.count("Clip") == [n.op_type for n in onnx.load(source).graph.node].count("Clip") > 0


def test_a_cast_around_a_product_of_other_casts_is_left_in_order(tmp_path: Path) -> None:
    """A reader that looks past the pair keeps doing so."""
    nodes = [
        node("Cast", ["x"], ["h"], to=TensorProto.BFLOAT16),
        node("Cast", ["h"], ["s"], to=TensorProto.FLOAT),
        node("Relu", ["s"], ["r"]),
        node("Cast", ["r"], ["rh"], to=TensorProto.BFLOAT16),
        node("Cast", ["rh"], ["rs"], to=TensorProto.FLOAT),
        node("Add", ["rs", "x"], ["y"]),
    ]
    model = build(nodes, SHAPES, ["y"])
    pair = converted(model, tmp_path / "pair.onnx")
    assert outputs(pair) == outputs(model)
    assert [n.op_type for n in onnx.load(pair).graph.node].count("ExtendedQuantizeLinear") == 2


def test_half_precision_models_widen(tmp_path: Path) -> None:
    model = network(TensorProto.FLOAT16)
    back = onnx.load(converted(model, tmp_path / "wide.onnx", to="fp32"))
    assert {v.type.tensor_type.elem_type for v in (*back.graph.input, *back.graph.output)} == {1}
    short = roundel.convert(model, tmp_path / "b.onnx", data=feeds(SHAPES))
    assert short.outputs[0].sqnr_db > 20


def test_closeness_is_measured_where_data_are_given() -> None:
    data = feeds(SHAPES)
    bf16 = roundel.convert(network(), data=data)
    fp16 = roundel.convert(network(), to="fp16", data=data, samples=2)
    assert bf16.path is None
    assert bf16.counts == {"activations": 5, "constants": 5}
    assert 20 < bf16.outputs[0].sqnr_db < fp16.outputs[0].sqnr_db
    for short, to in ((bf16, "bf16"), (fp16, "fp16")):
        cast = roundel.convert(short.ir, to=to, form="cast", data=data)  # type: ignore[arg-type]
        back = roundel.convert(cast.ir, to=to, data=data)  # type: ignore[arg-type]
        assert all(report.sqnr_db == np.inf for report in (*cast.outputs, *back.outputs))


def test_the_bare_form_can_be_read_back(tmp_path: Path) -> None:
    bare = converted(network(), tmp_path / "bare.onnx", strip_functions=True)
    assert not onnx.load(bare).functions
    whole = converted(network(), tmp_path / "whole.onnx")
    assert outputs(converted(bare, tmp_path / "again.onnx")) == outputs(whole)


def test_external_data_are_written_and_read(tmp_path: Path) -> None:
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [1, 64]}, ["y"], {"w": normal(64, 64)})
    (tmp_path / "a").mkdir()
    short = converted(model, tmp_path / "a" / "m.onnx", external_data=True, half_weights=True)
    assert (tmp_path / "a" / "m.onnx.data").stat().st_size >= 64 * 64 * 2
    with pytest.raises(roundel.OutputError, match="external data"):
        roundel.convert(short, tmp_path / "a" / "m.onnx.data")
    back = onnx.load(converted(short, tmp_path / "back.onnx", to="fp32"))
    assert not any(i.external_data for i in back.graph.initializer)


def test_an_integer_model_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "q.onnx"
    roundel.quantize(network(), source, recipe="a8w8_minmax", data=feeds(SHAPES))
    for to in ("bf16", "fp32"):
        with pytest.raises(roundel.ModelError, match="already quantized"):
            roundel.convert(source, tmp_path / "x.onnx", to=to)  # type: ignore[arg-type]
    assert not (tmp_path / "x.onnx").exists()


def native() -> onnx.ModelProto:
    """Weights, inputs and arithmetic in bfloat16, as PyTorch exports a model of that type."""
    model = network()
    for tensor in model.graph.initializer:
        short = numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(numpy_helper.from_array(short, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    return model


def rounded() -> onnx.ModelProto:
    """The same numbers in float32."""
    model = network()
    for tensor in model.graph.initializer:
        short = numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(numpy_helper.from_array(short.astype(np.float32), tensor.name))
    return model


def test_a_model_of_bfloat16_itself_widens(tmp_path: Path) -> None:
    back = converted(native(), tmp_path / "wide.onnx", to="fp32")
    assert outputs(back) == outputs(rounded())
    assert outputs(converted(native(), tmp_path / "b.onnx")) == outputs(
        converted(rounded(), tmp_path / "c.onnx")
    )


def test_a_model_of_bfloat16_itself_is_quantized(tmp_path: Path) -> None:
    data = feeds(SHAPES)
    result = roundel.quantize(native(), recipe="a8w8", data=data)
    assert any("bfloat16 tensors to float32" in note for note in result.record.notes)
    assert outputs(result.model) == outputs(roundel.quantize(rounded(), recipe="a8w8", data=data).model)


def test_a_part_in_bfloat16_itself_widens() -> None:
    nodes = [
        node("Cast", ["x"], ["h"], to=TensorProto.BFLOAT16),
        node("Neg", ["h"], ["i"]),
        node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
    ]
    wide = ir.to_proto(roundel.convert(build(nodes, SHAPES, {"y": SHAPES["x"]}), to="fp32").ir)
    x = normal(*SHAPES["x"], seed=0, scale=3)
    assert outputs(wide) == [(-x).tobytes()]


def test_a_short_model_is_not_quantized_again(tmp_path: Path) -> None:
    for form in ("cast", "plain"):
        short = converted(network(), tmp_path / f"{form}.onnx", form=form)
        with pytest.raises(roundel.ModelError, match="already in bfloat16") as caught:
            roundel.quantize(short, recipe="a8w8", data=feeds(SHAPES))
        assert "--to fp32" in str(caught.value)


def test_the_source_is_never_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(network(), source)
    before = source.read_bytes()
    with pytest.raises(roundel.OutputError, match="overwrite the input model"):
        roundel.convert(source, source)
    assert source.read_bytes() == before


def test_an_older_result_survives_a_failure(tmp_path: Path) -> None:
    target = tmp_path / "out.onnx"
    target.write_bytes(b"before")
    with pytest.raises(roundel.RoundelError):
        roundel.convert(network(), target, data=[{"x": np.zeros((1, 2), np.float32)}])
    assert target.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "bf15"}, "no to 'bf15'"),
        ({"form": "pairs"}, "no form 'pairs'"),
        ({"to": "fp32", "half_weights": True}, "float32 model has no short floats"),
        ({"to": "fp32", "form": "cast"}, "float32 model has no short floats"),
        ({"form": "cast", "strip_functions": True}, "Only the form 'pair'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(roundel.RecipeError, match=message):
        roundel.convert(network(), **options)


@pytest.mark.parametrize("options", [*FORMS, {"form": "plain"}, {"strip_functions": True}])
def test_the_check_reads_every_form(options: dict[str, Any], tmp_path: Path) -> None:
    path = converted(network(), tmp_path / "short.onnx", **options)
    report = check(path, device="stx")
    assert report.format == "bf16"
    assert report.after.islands == 1


@pytest.mark.parametrize("preset", ["fp16", "bfp16", "mx9"])
def test_formats_that_the_npu_does_not_take(preset: str) -> None:
    with pytest.raises(roundel.RecipeError, match="compilers take no"):
        roundel.quantize(network(), recipe=preset, device="stx")


def test_the_example_keeps_its_accuracy() -> None:
    example = load_example()
    result = roundel.convert(example.model_path, data=example.calibration[:16])
    assert result.outputs[0].sqnr_db > 35
    assert result.outputs[0].same_top == 1
