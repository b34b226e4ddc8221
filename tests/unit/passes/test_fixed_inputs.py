"""Inputs become constants, and the branch of an If that they decide takes its place: bit for bit the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import roundel
from helpers import build, feeds, node, normal, session
from roundel.errors import DataError, RecipeError
from roundel.passes import prepare
from roundel.recipe.settings import Prepare


def _branch(name: str, nodes: list[onnx.NodeProto], outputs: list[str], **constants: Any) -> onnx.GraphProto:
    values = [helper.make_tensor_value_info(out, TensorProto.FLOAT, None) for out in outputs]
    weights = [numpy_helper.from_array(np.asarray(array), key) for key, array in constants.items()]
    return helper.make_graph(nodes, name, [], values, weights)


def rated(*, shape: tuple[int, ...] = ()) -> onnx.ModelProto:
    """A network for each of two rates; inside the first, another If on the rate; names occur twice."""
    inner = node(
        "If",
        ["high"],
        ["z"],
        name="inner",
        then_branch=_branch("loud", [node("Mul", ["h", "two"], ["t"], name="act")], ["t"], two=np.float32(2)),
        else_branch=_branch("soft", [node("Identity", ["h"], ["t"], name="act")], ["t"]),
    )
    wide = _branch(
        "wide",
        [node("MatMul", ["x", "w"], ["h"], name="layer"), node("Relu", ["h"], ["r"], name="relu"), inner],
        ["z", "r"],
        w=normal(8, 4),
    )
    narrow = _branch(
        "narrow",
        [node("MatMul", ["x", "w"], ["h"], name="layer"), node("Neg", ["h"], ["n"], name="neg")],
        ["h", "n"],
        w=normal(8, 4, seed=1),
    )
    nodes = [
        node("Equal", ["sr", "rate"], ["wide"], name="equal"),
        node("Greater", ["sr", "least"], ["high"], name="greater"),
        node("If", ["wide"], ["a", "b"], name="choose", then_branch=wide, else_branch=narrow),
        node("Relu", ["a"], ["r"], name="relu"),
        node("Add", ["r", "b"], ["y"], name="sum"),
    ]
    constants = {"rate": np.int64(16000), "least": np.int64(12000)}
    inputs = {"x": [1, 8], "sr": list(shape)}
    return build(nodes, inputs, {"y": [1, 4]}, constants, types={"sr": TensorProto.INT64})


def _prepared(proto: onnx.ModelProto, **fixed: Any) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    prepare(model, Prepare(fixed_inputs=fixed))
    done = ir.to_proto(model)
    onnx.checker.check_model(done, full_check=True)
    return done


@pytest.mark.parametrize("rate", [16000, 8000])
def test_the_taken_branch_takes_the_place_of_the_if(rate: int) -> None:
    done = _prepared(rated(), sr=rate)
    assert [value.name for value in done.graph.input] == ["x"]
    assert [value.name for value in done.graph.output] == ["y"]
    assert not {"If", "Equal", "Greater"} & {one.op_type for one in done.graph.node}
    names = [one.name for one in done.graph.node] + [out for one in done.graph.node for out in one.output]
    assert len(set(names)) == len(names)
    for sample in feeds({"x": [1, 8]}, 4):
        (wanted,) = session(rated()).run(None, {**sample, "sr": np.asarray(rate)})
        (given,) = session(done).run(None, sample)
        assert np.array_equal(wanted, given)


def test_a_branch_that_gives_a_constant() -> None:
    taken = _branch("same", [node("Identity", ["c"], ["i"])], ["i", "k"], k=normal(1, 8))
    other = _branch("other", [node("Neg", ["c"], ["n"]), node("Abs", ["c"], ["m"])], ["n", "m"])
    nodes = [
        node("Relu", ["x"], ["c"], name="relu"),
        node("If", ["on"], ["y", "z"], name="choose", then_branch=taken, else_branch=other),
    ]
    proto = build(nodes, {"x": [1, 8], "on": []}, {"y": [1, 8], "z": [1, 8]}, types={"on": TensorProto.BOOL})
    for on in (True, False):
        done = _prepared(proto, on=on)
        assert "If" not in {one.op_type for one in done.graph.node}
        (sample,) = feeds({"x": [1, 8]}, 1)
        wanted = session(proto).run(None, {**sample, "on": np.asarray(on)})
        for a, b in zip(wanted, session(done).run(None, sample), strict=True):
            assert np.array_equal(a, b)


def test_the_callers_model_is_never_changed() -> None:
    proto = rated()
    (taken,) = (a.g for a in proto.graph.node[2].attribute if a.name == "then_branch")
    taken.initializer[0].name = taken.node[0].input[1] = "sum"  # a name that the main graph has as well
    before = proto.SerializeToString()
    done = _prepared(proto, sr=16000)
    assert proto.SerializeToString() == before
    assert "If" not in {one.op_type for one in done.graph.node}


def test_an_if_without_constant_condition_stays() -> None:
    assert "If" in {one.op_type for one in _prepared(rated()).graph.node}


def test_a_value_takes_the_declared_shape() -> None:
    done = _prepared(rated(shape=(1,)), sr=8000)
    assert [value.name for value in done.graph.input] == ["x"]


@pytest.mark.parametrize(
    ("fixed", "what"),
    [
        ({"srr": 16000}, "Did you mean 'sr'"),
        ({"sr": 16000.5}, "int64"),
        ({"sr": (1, 2)}, "1 numbers"),
        ({"x": 3.0}, "8 numbers"),
        ({"x": (3e39,) * 8}, "float"),
    ],
)
def test_what_does_not_fit_is_refused(fixed: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match="(?s)" + what):
        _prepared(rated(), **fixed)


def _quantized(data: list[dict[str, Any]], **words: Any) -> roundel.QuantizeResult:
    return roundel.quantize(rated(), preset="a8w8", data=data, **words)


def test_what_is_inside_is_quantized_like_anything_else() -> None:
    done = _quantized(feeds({"x": [1, 8]}, 8), fix_inputs={"sr": 16000})
    assert done.plan.nodes["layer"].quantized
    assert [value.name for value in done.model.graph.input] == ["x"]
    assert done.record.outputs[0].sqnr_db > 25
    assert done.record.recipe["prepare"]["fixed_inputs"] == {"sr": 16000}
    numpys = _quantized(feeds({"x": [1, 8]}, 8), fix_inputs={"sr": np.array(16000)})
    assert numpys.model.SerializeToString() == done.model.SerializeToString()


def test_samples_may_hold_the_constant_and_nothing_else() -> None:
    samples = feeds({"x": [1, 8]}, 8)
    rate = np.int64(16000)
    done = _quantized([{**sample, "sr": rate} for sample in samples], fix_inputs={"sr": 16000})
    assert sum("'sr'" in note for note in done.record.notes) == 1
    stacked = {"x": np.stack([s["x"] for s in samples]), "sr": np.full(8, rate)}
    again = _quantized(stacked, fix_inputs={"sr": 16000})  # type: ignore[arg-type]
    assert sum("'sr'" in note for note in again.record.notes) == 1
    with pytest.raises(DataError, match="sr"):
        _quantized([{**sample, "sr": np.int64(8000)} for sample in samples], fix_inputs={"sr": 16000})
    with pytest.raises(DataError, match="sr"):
        _quantized({**stacked, "sr": np.full(8, 8000)}, fix_inputs={"sr": 16000})  # type: ignore[arg-type]


def test_files_and_readers_may_hold_it_too(tmp_path: Any) -> None:
    samples = feeds({"x": [1, 8]}, 8)

    class Reader:
        def __init__(self, rate: int) -> None:
            self.rows = iter([{**sample, "sr": np.asarray(rate)} for sample in samples])

        def get_next(self) -> Any:
            return next(self.rows, None)

    def file(rate: int) -> Any:
        path = tmp_path / f"{rate}.npz"
        np.savez(path, x=np.stack([s["x"] for s in samples]), sr=np.full(8, rate, np.int64))
        return path

    for make in (Reader, file):
        done = _quantized(make(16000), fix_inputs={"sr": 16000})  # type: ignore[arg-type]
        assert sum("'sr'" in note for note in done.record.notes) == 1
        with pytest.raises(DataError, match="sr"):
            _quantized(make(8000), fix_inputs={"sr": 16000})  # type: ignore[arg-type]


def test_other_functions_take_it() -> None:
    fixed = {"sr": 16000}
    assert roundel.explain(rated(), preset="a8w8", fix_inputs=fixed).nodes["layer"].quantized
    places = roundel.check(rated(), preset="a8w8", fix_inputs=fixed).before.nodes
    assert "layer" in {place.name for place in places}
    found = roundel.sensitivity(rated(), preset="a8w8", data=feeds({"x": [1, 8]}, 8), fix_inputs=fixed)
    assert "layer" in {layer.name for layer in found.layers}
