"""Smoothing moves outliers into weights and changes no output: every case runs before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from equalize_cases import check_equalized
from helpers import build, feeds, node, normal
from roundel.improve.smooth import SmoothReport, find_groups, look_at_channels, smooth, smoothing_factors
from roundel.model.graph import constant_array
from roundel.passes.shapes import refresh_shapes
from roundel.plan import build_plan
from roundel.recipe.load import load_recipe
from roundel.stages import prepare
from roundel.types import Sample
from transformer_models import Kind, tokens, transformer

X = {"x": (4, 6)}


class Done:
    """A model before and after."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        samples: list[Sample],
        recipe: str = "int8_transformer_default",
        **o: Any,
    ) -> None:
        settings = load_recipe(recipe, {"improve": {"smooth": {"enabled": True, **o}}})
        self.before = prepare(proto, settings).model
        self.after = self.before.clone()
        plan = build_plan(self.after, settings)
        groups = find_groups(self.after.graph, plan)
        seen = look_at_channels(self.after, groups, samples[:-2], samples[-2:])
        self.reports: tuple[SmoothReport, ...] = smooth(self.after, groups, seen, plan, settings)
        refresh_shapes(self.after)
        onnx.checker.check_model(ir.to_proto(self.after), full_check=True)
        assert check_equalized(self.before, self.after, samples) < 1e-5

    @property
    def places(self) -> list[str]:
        return [report.where for report in self.reports]

    def constant(self, name: str, index: int) -> Any:
        found = next(n for n in self.after.graph if n.name == name)
        return constant_array(found.inputs[index])


def outliers(count: int = 6) -> list[Sample]:
    """One channel far larger than the others."""
    samples = feeds(X, count)
    return [{"x": s["x"] * np.float32([1, 40, 1, 0.2, 1, 1])} for s in samples]


def normed(*more: onnx.NodeProto, outputs: tuple[str, ...] = ("y", "z")) -> onnx.ModelProto:
    """A norm with an outlier channel, and two layers that read it."""
    nodes = [
        node("LayerNormalization", ["x", "g", "h"], ["t"], name="norm"),
        node("MatMul", ["t", "w"], ["y"], name="first"),
        node("Gemm", ["t", "v"], ["z"], name="second", transB=1),
        *more,
    ]
    constants = {
        "g": np.float32([1, 50, 1, 0.1, 1, 1]),
        "h": normal(6, seed=4),
        "w": normal(6, 8),
        "v": normal(3, 6, seed=2),
    }
    return build(nodes, X, outputs, constants)


def test_the_factors_are_the_formula() -> None:
    weights = [np.array([[1.0, -4.0], [9.0, 2.0]]), np.array([[16.0], [1.0]])]
    found = smoothing_factors(np.array([4.0, 100.0]), weights, 0.5)
    np.testing.assert_allclose(found, [np.sqrt(4 / 16), np.sqrt(100 / 9)])
    np.testing.assert_allclose(smoothing_factors(np.array([4.0, 100.0]), weights, 1.0), [4, 100])
    np.testing.assert_allclose(smoothing_factors(np.array([4.0, 100.0]), weights, 0.0), [1 / 16, 1 / 9])


def test_silent_and_unread_channels_get_finite_factors() -> None:
    weights = [np.array([[1.0], [0.0], [2.0]])]
    found = smoothing_factors(np.array([0.0, 5.0, 1.0]), weights, 0.5)
    assert np.all(np.isfinite(found))
    assert np.all(found > 0)


def test_layers_of_one_tensor_share_the_factors_of_its_norm() -> None:
    done = Done(normed(), feeds(X, 6))
    assert done.places == ["folded into LayerNormalization"]
    ratios = done.constant("norm", 1) / np.float32([1, 50, 1, 0.1, 1, 1])
    np.testing.assert_allclose(done.constant("norm", 2) / normal(6, seed=4), ratios, rtol=1e-5)
    np.testing.assert_allclose(done.constant("first", 1) * ratios[:, None], normal(6, 8), rtol=1e-5)
    np.testing.assert_allclose(done.constant("second", 1) * ratios, normal(3, 6, seed=2), rtol=1e-5)
    assert ratios.argmin() == 1, "the outlier is made smaller"
    assert done.reports[0].alpha == 0.5
    assert [layer.layer for layer in done.reports[0].layers] == ["first", "second"]
    assert all(layer.after_db > layer.before_db for layer in done.reports[0].layers)


def test_another_share() -> None:
    ratios = [Done(normed(), feeds(X, 6), alpha=a).constant("norm", 1)[1] / 50 for a in (0.3, 0.6)]
    assert ratios[1] < ratios[0] < 1


def test_auto_is_at_least_as_good_as_any_candidate() -> None:
    def error(alpha: float | str) -> float:
        layers = Done(normed(), feeds(X, 6), alpha=alpha).reports[0].layers
        return float(sum(10 ** (-layer.after_db / 10) for layer in layers))

    assert error("auto") <= min(error(alpha) for alpha in (0.3, 0.5, 0.8)) * (1 + 1e-6)


OTHERS = {
    "another node": (node("Sigmoid", ["t"], ["s"]), ("y", "z", "s")),
    "a graph output": (node("Sigmoid", ["y"], ["s"]), ("t", "z", "s")),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_others_see_is_left_alone(case: str) -> None:
    extra, outputs = OTHERS[case]
    done = Done(normed(extra, outputs=outputs), feeds(X, 6))
    assert done.places == ["others see the tensor, too"]
    np.testing.assert_array_equal(done.constant("norm", 1), np.float32([1, 50, 1, 0.1, 1, 1]))
    inserted = Done(normed(extra, outputs=outputs), feeds(X, 6), insert=True)
    assert inserted.places == ["a Mul in front of the layers"]
    assert [n.op_type for n in inserted.after.graph].count("Mul") == 1, "one for both layers"


def test_a_graph_input_needs_a_mul() -> None:
    model = build([node("MatMul", ["x", "w"], ["y"], name="only")], X, ["y"], {"w": normal(6, 8)})
    assert Done(model, outliers()).places == ["nothing above can take the factors"]
    done = Done(model, outliers(), insert=True)
    assert done.places == ["a Mul in front of the layers"]


def test_even_channels_stay_as_they_are() -> None:
    model = build([node("MatMul", ["x", "w"], ["y"], name="only")], X, ["y"], {"w": np.eye(6, dtype="f")})
    flat = [{"x": np.sign(sample["x"])} for sample in feeds(X, 6)]
    assert Done(model, flat, insert=True).places == ["the error of the layers does not fall"]


def test_layers_that_stay_float_are_no_group() -> None:
    settings = load_recipe("int8_transformer_default", {"selection": {"exclude": ["first", "second"]}})
    model = prepare(normed(), settings).model
    assert find_groups(model.graph, build_plan(model, settings)) == ()


KINDS: tuple[Kind, ...] = ("layer", "rms", "rms spelled out")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_pre_norm_transformer(kind: Kind, gated: bool) -> None:
    done = Done(transformer(kind, gated=gated), tokens(), alpha="auto")
    taken = "Mul" if kind == "rms spelled out" else "LayerNormalization" if kind == "layer" else "RMSNorm"
    assert sum(taken in place for place in done.places) >= 4
    assert "others see the tensor, too" not in done.places
    assert "nothing above can take the factors" not in done.places


def test_a_post_norm_transformer_needs_muls() -> None:
    plain = Done(transformer(post=True), tokens())
    assert plain.places.count("others see the tensor, too") == 4
    done = Done(transformer(post=True), tokens(), insert=True)
    assert done.places.count("a Mul in front of the layers") >= 3


@pytest.mark.parametrize("recipe", ["a8w8_minmax", "a16w8_minmax", "uint8_dynamic_quant", "s8s8_aaws"])
def test_other_formats(recipe: str) -> None:
    assert Done(normed(), feeds(X, 6), recipe=recipe).reports[0].layers


def test_weights_alone_have_no_outliers_to_move() -> None:
    done = Done(normed(), feeds(X, 6), recipe="matmul_nbits")
    assert set(done.places) <= {"the tensor is not stored in integers"}
