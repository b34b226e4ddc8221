"""Ranges by their error at the output, and the probe that measures it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from helpers import build, node, normal
from roundel.improve.probe import QuantizerProbe
from roundel.improve.ranges import as_wide_as_seen, choose_ranges, movable, probe_of
from roundel.model.session import open_session
from roundel.numerics.affine import fake_quantize
from roundel.numerics.metrics import Closeness
from roundel.plan import build_plan
from roundel.recipe.load import load_recipe
from roundel.recipe.settings import Recipe
from roundel.stages import collect, plan, prepare, resolve
from roundel.state import State
from roundel.types import Sample

Case = tuple[ir.Model, State, list[Sample], list[Sample], Recipe]


def probed(state, samples, outputs):
    probe = probe_of(state, samples, outputs)
    assert probe is not None
    return probe


def calibrated(preset: str, *, loud: float = 100.0, quiet: float = 1e-5) -> Case:
    """Conv, Relu, Conv: the first channel between them is `loud`, and counts for `quiet`."""
    first, second = normal(8, 3, 3, 3), normal(8, 8, 1, 1, seed=2)
    first[0] *= loud
    second[:, 0] *= quiet
    model = build(
        [
            node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
            node("Relu", ["c"], ["r"], name="relu"),
            node("Conv", ["r", "k"], ["y"], name="conv2"),
        ],
        {"x": [1, 3, 8, 8]},
        ["y"],
        {"w": first, "b": np.zeros(8, np.float32), "k": second},
    )
    recipe = load_recipe(preset, {"effort": "fast"})
    data = [{"x": normal(1, 3, 8, 8, seed=i)} for i in range(8)]
    state = resolve(collect(plan(prepare(model, recipe)), data))
    return state.model, state, state.inputs, state.outputs, recipe


@pytest.mark.parametrize("preset", ["a8w8_minmax", "a16w8_minmax", "u8s8_aaws", "xint8_plain"])
def test_one_switch_quantizes_one_tensor_and_nothing_else(preset: str) -> None:
    model, state, samples, outputs, recipe = calibrated(preset)
    groups = movable(state)
    probe = QuantizerProbe(model, state, groups, recipe, samples, outputs)
    group = next(names[0] for names in groups if "x" in names)
    params = state.params["x"]
    seen = probe.error({group: params.scale}, len(samples))
    session = open_session(model, simulate=True)
    wanted = Closeness()
    for sample, out in zip(samples, outputs, strict=True):
        given = session.run(None, {"x": fake_quantize(sample["x"], params)})[0]
        wanted = wanted.merge(Closeness.of(out["y"], given))
    assert seen.noise == pytest.approx(wanted.noise, rel=1e-5)
    assert seen.noise > 0


def test_a_loud_channel_that_does_not_count_is_cut_off() -> None:
    _model, state, samples, outputs, _recipe = calibrated("a8w8_minmax")
    better, reports = choose_ranges(state, probed(state, samples, outputs))
    assert float(better.params["r"].scale) < 0.5 * float(state.params["r"].scale)
    assert [r.layer for r in reports if r.kept] == ["r"]
    assert all(r.after_db >= r.before_db for r in reports)


def test_a_loud_channel_that_counts_keeps_its_range() -> None:
    _model, state, samples, outputs, _recipe = calibrated("a8w8_minmax", quiet=1.0)
    better, _ = choose_ranges(state, probed(state, samples, outputs))
    assert float(better.params["r"].scale) == float(state.params["r"].scale)


def test_powers_of_two_stay_powers_of_two() -> None:
    _model, state, samples, outputs, _recipe = calibrated("xint8_plain")
    better, _ = choose_ranges(state, probed(state, samples, outputs))
    moved = float(better.params["r"].scale) / float(state.params["r"].scale)
    assert moved < 1
    assert np.log2(moved).is_integer()


def test_derived_biases_follow() -> None:
    _model, state, samples, outputs, _recipe = calibrated("a8w8_minmax")
    better, _ = choose_ranges(state, probed(state, samples, outputs))
    for name, tensor in better.plan.tensors.items():
        source = tensor.source
        if hasattr(source, "weight"):
            expected = better.params[source.input].scale * better.params[source.weight].scale
            assert np.allclose(better.params[name].scale, expected, rtol=1e-6)


def test_ranges_that_the_user_gave_do_not_move() -> None:
    model, state, *_ = calibrated("a8w8_minmax")
    recipe = load_recipe("a8w8_minmax", {"overrides": [{"tensors": ["r"], "range": [-1, 1]}]})
    plan = build_plan(model, recipe)
    fixed = replace(state, plan=plan)
    assert not any("r" in names for names in movable(fixed))
    assert any("r" in names for names in movable(state))


def test_sixteen_bits_keep_the_room_that_they_have() -> None:
    _model, state, samples, outputs, _recipe = calibrated("a16w8_minmax")
    assert movable(state)
    assert probe_of(state, samples, outputs) is None


def with_rare_peaks(*last: ir.Node) -> Case:
    """Conv, Relu and what follows, on pictures in which a few pixels are much brighter than the rest."""
    model = build(
        [node("Conv", ["x", "w"], ["c"], name="conv"), node("Relu", ["c"], ["r"], name="relu"), *last],
        {"x": [1, 3, 64, 64]},
        ["y"],
        {"w": normal(8, 3, 1, 1)},
    )
    recipe = load_recipe("a8w8", {"effort": "fast"})
    data = [{"x": normal(1, 3, 64, 64, seed=i) ** 3} for i in range(8)]
    state = resolve(collect(plan(prepare(model, recipe)), data))
    return state.model, state, state.inputs, state.outputs, recipe


def test_ranges_become_as_wide_as_seen_where_peaks_count() -> None:
    _, state, samples, outputs, _ = with_rare_peaks(node("GlobalMaxPool", ["r"], ["y"], name="pool"))
    wide = as_wide_as_seen(state, probed(state, samples, outputs))
    seen = max(float(out["y"].max()) for out in outputs)
    assert float(wide.params["r"].scale) * 127 == pytest.approx(seen, rel=1e-5)
    assert float(state.params["r"].scale) * 127 < 0.9 * seen
    assert wide.same_as(as_wide_as_seen(wide, probed(wide, samples, outputs))), "there is nothing wider"


def test_ranges_stay_where_peaks_hardly_count() -> None:
    _, state, samples, outputs, _ = with_rare_peaks(node("GlobalAveragePool", ["r"], ["y"], name="pool"))
    assert as_wide_as_seen(state, probed(state, samples, outputs)) is state
