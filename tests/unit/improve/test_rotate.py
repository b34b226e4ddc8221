"""A rotated stream changes no output: every case runs before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from equalize_cases import check_equalized
from helpers import build, feeds, node, normal
from roundel.improve.rotate import RotateReport, rotate
from roundel.model.graph import constant_array, values_by_name
from roundel.model.session import open_session
from roundel.passes.shapes import refresh_shapes
from roundel.recipe.load import load_recipe
from roundel.recipe.settings import Rotate
from roundel.stages import prepare
from roundel.types import Sample
from transformer_models import OUTLIERS, WIDTH, Kind, tokens, transformer


class Done:
    """A model before and after."""

    def __init__(
        self, proto: onnx.ModelProto, samples: Sequence[Sample] | None = None, **options: Any
    ) -> None:
        self.samples = samples or tokens(3)
        self.before = prepare(proto, load_recipe("int8_transformer_default")).model
        self.after = self.before.clone()
        self.reports: tuple[RotateReport, ...] = rotate(self.after, Rotate(enabled=True, **options))
        refresh_shapes(self.after)
        onnx.checker.check_model(ir.to_proto(self.after), full_check=True)
        assert check_equalized(self.before, self.after, self.samples) < 1e-5

    @property
    def kept(self) -> list[bool]:
        return [report.kept for report in self.reports]

    def tensor(self, model: ir.Model, name: str) -> NDArray[Any]:
        clone = model.clone()
        clone.graph.outputs.append(values_by_name(clone.graph)[name])
        return np.asarray(open_session(clone).run(None, self.samples[0])[-1])


KINDS: tuple[Kind, ...] = ("layer", "rms", "rms spelled out")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_a_pre_norm_transformer_needs_no_new_node(kind: Kind, gated: bool, biases: bool) -> None:
    done = Done(transformer(kind, gated=gated, biases=biases))
    assert done.kept == [True]
    report = done.reports[0]
    assert (report.width, report.norms) == (WIDTH, 5)
    assert report.where == "folded into the layers"
    ops = [[n.op_type for n in model.graph] for model in (done.before, done.after)]
    assert "MatMul" in ops[1]
    assert ops[1].count("MatMul") == ops[0].count("MatMul")
    if biases or kind != "layer":
        # The last layer has no bias in any case: the shift of a LayerNorm before it needs one.
        assert ops[1].count("Add") == ops[0].count("Add") + (kind == "layer")


@pytest.mark.parametrize("kind", KINDS)
def test_the_scales_of_the_norms_have_moved(kind: Kind) -> None:
    done = Done(transformer(kind))
    for n in done.after.graph:
        if n.op_type in ("LayerNormalization", "RMSNormalization"):
            scale = constant_array(n.inputs[1])
            assert scale is not None
            np.testing.assert_array_equal(scale, 1)
            assert len([v for v in n.inputs if v is not None]) == 2, "no shift is left"
    gains = [n for n in done.after.graph if n.op_type == "Mul" and constant_array(n.inputs[0]) is not None]
    assert gains == []


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_outliers_are_spread(kind: Kind) -> None:
    done = Done(transformer(kind))
    peaks = []
    for model in (done.before, done.after):
        stream = np.abs(done.tensor(model, "stream")[0])
        peaks.append(float((stream.max(axis=1) / np.sqrt((stream**2).mean(axis=1))).mean()))
    assert peaks[1] < 0.75 * peaks[0]
    stream = np.abs(done.tensor(done.before, "stream")[0])
    assert set(np.argsort(stream.max(axis=0))[-2:]) == set(OUTLIERS)


def test_the_mean_that_a_layer_norm_subtracts_stays() -> None:
    done = Done(transformer("layer"))
    before, after = (done.tensor(model, "stream").mean(axis=-1) for model in (done.before, done.after))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def test_the_rotation_is_the_same_in_every_run() -> None:
    streams = [(done := Done(transformer())).tensor(done.after, "stream") for _ in range(2)]
    np.testing.assert_array_equal(streams[0], streams[1])


def test_without_a_head_the_last_norm_sees_the_stream_as_it_was() -> None:
    left = Done(transformer(head=False))
    assert left.kept == [False]
    assert "LayerNormalization 'node_last' reads the stream" in left.reports[0].where
    assert "improve.rotate.insert" in left.reports[0].where
    done = Done(transformer(head=False), insert=True)
    assert done.kept == [True]
    assert done.reports[0].where == "1 MatMul(s) at the ends of the stream"


def test_an_output_inside_the_stream_keeps_its_name_and_value() -> None:
    name = "block0.network.sum"
    left = Done(transformer(shown=name))
    assert left.kept == [False]
    assert f"'{name}' is an output of the model" in left.reports[0].where
    done = Done(transformer(shown=name), insert=True)
    assert done.kept == [True]
    assert [v.name for v in done.after.graph.outputs] == ["head.product", name]


def test_a_post_norm_transformer_is_left_alone() -> None:
    for insert in (False, True):
        done = Done(transformer(post=True), insert=insert)
        assert not any(done.kept)
        assert "as in a post-norm network" in done.reports[0].where


def patches(**changes: Any) -> onnx.ModelProto:
    """The stem of a vision transformer and two blocks' worth of norms and layers."""
    d = 8
    nodes = [
        node("Conv", ["x", "stem", "stem_b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Reshape", ["c", "flat"], ["f"]),
        node("Transpose", ["f"], ["p"], perm=changes.get("perm", [0, 2, 1])),
        node("Concat", ["cls", "p"], ["all"], axis=1),
        node("Add", ["all", "places"], ["s0"]),
        node("LayerNormalization", ["s0", "g", "h"], ["n0"]),
        node("MatMul", ["n0", "w0"], ["m0"]),
        node("Relu", ["m0"], ["r0"]),
        node("Reshape", ["r0", "rows"], ["r1"]),
        node("Gemm", ["r1", "w1", "b1"], ["m1"], transB=1),
        node("Reshape", ["m1", "back"], ["m2"]),
        node("Add", ["s0", "m2"], ["s1"]),
        node("LayerNormalization", ["s1", "g", "h"], ["n1"]),
        node("Gather", ["n1", "first"], ["token"], axis=1),
        node("Gemm", ["token", "head", "head_b"], ["y"]),
        *changes.get("more", ()),
    ]
    constants = {
        "stem": normal(d, 3, 2, 2),
        "stem_b": normal(d, seed=1),
        "flat": np.int64([1, d, 4]),
        "cls": normal(1, 1, d, seed=2),
        "places": normal(1, 5, d, seed=3, scale=5),
        "g": np.exp(normal(d, seed=4)),
        "h": normal(d, seed=5),
        "w0": normal(d, 12, seed=6),
        "w1": normal(d, 12, seed=7),
        "b1": normal(d, seed=8),
        "rows": np.int64([5, 12]),
        "back": np.int64([1, 5, d]),
        "first": np.int64(0),
        "head": normal(d, 4, seed=9),
        "head_b": normal(1, 4, seed=10),
        **changes.get("constants", {}),
    }
    return build(nodes, {"x": (1, 3, 4, 4)}, ["y", *changes.get("outputs", ())], constants)


def images() -> list[Sample]:
    return feeds({"x": (1, 3, 4, 4)}, 2)


def test_the_patches_of_a_vision_transformer() -> None:
    done = Done(patches(), images())
    assert done.kept == [True]
    assert done.reports[0].where == "folded into the layers"
    assert done.reports[0].layers == 4


def test_patches_that_others_see() -> None:
    more = {"more": (node("Sigmoid", ["c"], ["seen"]),), "outputs": ("seen",)}
    left = Done(patches(**more), images())
    assert left.kept == [False]
    assert "Transpose" in left.reports[0].where
    assert Done(patches(**more), images(), insert=True).kept == [True]


BLOCKERS = {
    "looks into a row": (node("Softmax", ["s1"], ["seen"]), "Softmax"),
    "sums a row up": (node("ReduceMean", ["s1"], ["seen"], axes=[-1]), "ReduceMean"),
    "cuts a row": (node("Split", ["s1"], ["seen", "other"], axis=-1), "Slice"),
    "gates a row": (node("Mul", ["s1", "g"], ["seen"]), "Mul"),
    "turns rows": (node("Transpose", ["s1"], ["seen"], perm=[0, 2, 1]), "Transpose"),
}


@pytest.mark.parametrize("case", BLOCKERS)
def test_readers_that_look_into_rows(case: str) -> None:
    extra, op = BLOCKERS[case]
    left = Done(patches(more=(extra,), outputs=("seen",)), images())
    assert left.kept == [False]
    assert f"{op} " in left.reports[0].where
    done = Done(patches(more=(extra,), outputs=("seen",)), images(), insert=True)
    assert done.kept == [True]
    assert done.reports[0].where == "1 MatMul(s) at the ends of the stream"


def test_row_scales_and_means_over_tokens_pass() -> None:
    more = (
        node("Mul", ["s1", "two"], ["twice"]),
        node("ReduceMean", ["twice"], ["pooled"], axes=[1], keepdims=0),
        node("MatMul", ["pooled", "w0"], ["seen"]),
    )
    model = patches(more=more, outputs=("seen",), constants={"two": np.float32(2)})
    assert Done(model, images()).kept == [True]


def test_a_network_without_norms_has_no_stream() -> None:
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": (2, 8)}, ["y"], {"w": normal(8, 8)})
    assert Done(model, feeds({"x": (2, 8)}, 1)).reports == ()
