"""Random small graphs: whatever their shape, the quantized model is sound and close."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from helpers import activations, assert_sound, feeds, initializers, quantize, run, sqnr
from random_graphs import random_graph


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    return random_graph(lambda options: draw(st.sampled_from(options)))


RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "a8w8": ("a8w8", {}),
    "u8s8_aaws": ("u8s8_aaws", {}),
    "s8s8_aaws-aligned": ("s8s8_aaws", {"placement": {"align_concat": True, "align_pool": True}}),
    "a16w8-dedicated": ("a16w8", {"placement": {"dedicated_pairs": True}}),
    "per-channel": ("a8w8", {"weights": {"per_channel": True}}),
}


@pytest.mark.parametrize("name", RECIPES)
@given(model=graphs(), pick=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
def test_random_graphs(name: str, model: onnx.ModelProto, pick: Any) -> None:
    recipe, changes = RECIPES[name]
    data = feeds({v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input})
    result = quantize(model, recipe, data, **changes)
    assert_sound(model, result.model)
    note(onnx.printer.to_text(model))
    event("quantized" if result.record.quantized else "passed through")
    for feed in data:
        for a, b in zip(run(model, feed), run(result.model, feed), strict=True):
            assert a.shape == b.shape
            assert np.isfinite(b).all()
    # Eight layers deep, an 8-bit model is still far from noise; a lost Relu or a wrong scale is not.
    # Where the inputs of a Concat share a scale, a small one among them keeps few of its bits.
    assert sqnr(model, result, data) > (5 if name.endswith("aligned") else 14)


@given(model=graphs(), pick=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
def test_excluded_nodes_keep_their_float_weights(model: onnx.ModelProto, pick: Any) -> None:
    chosen = pick.choice([n.name for n in model.graph.node])
    plain = {"fold_batch_norm": False, "fold_constants": False, "unshare_biases": False}
    result = quantize(model, "a8w8", selection={"exclude": [chosen]}, prepare=plain)
    assert_sound(model, result.model)
    before, after = initializers(model), initializers(result.model)
    [old] = [n for n in model.graph.node if n.name == chosen]
    [new] = [n for n in result.model.graph.node if n.name == chosen]
    for was, now in zip(old.input, new.input, strict=True):
        if was in before:
            assert was == now
            np.testing.assert_array_equal(before[was], after[now])


@given(model=graphs())
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
def test_the_same_model_and_data_give_the_same_file(model: onnx.ModelProto) -> None:
    first, second = (quantize(model, "a8w8").model for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert activations(first).keys() == activations(second).keys()
