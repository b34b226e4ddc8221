"""The order of the layers: what a proposal for one layer cures is not counted again for another."""

from __future__ import annotations

from roundel.measure.layers import LayerCost, StoredLayer
from roundel.measure.sensitivity import _ranked


def _layer(name: str, makes: str, reads: str) -> StoredLayer:
    return StoredLayer(name, "Conv", (name,), (makes,), (f"{name}.weight",), (reads, makes))


def _order(widened: bool, worst: int = 3) -> list[tuple[str, float]]:
    """Four layers in a row, a -> b -> c -> d; b costs most, a next because b reads what a makes."""
    layers = [
        _layer("a", "ta", "x"),
        _layer("b", "tb", "ta"),
        _layer("c", "tc", "tb"),
        _layer("d", "td", "tc"),
    ]
    by_tensor = {"ta": 4.0, "tb": 5.0, "tc": 0.5, "td": 0.4}
    costs = {
        layer: LayerCost(layer.name, "Conv", layer.nodes, by_tensor[layer.activations[0]], 0.025, 0.0)
        for layer in layers
    }
    return [
        (layer.name, round(costs[layer].left, 4))
        for layer in _ranked(costs, by_tensor, worst, lambda _: widened)
    ]


def test_a_layer_that_is_cured_with_its_reader_comes_later() -> None:
    assert [name for name, _ in _order(widened=True)] == ["b", "c", "d", "a"]


def test_what_is_left_is_what_the_layers_above_do_not_cure() -> None:
    left = dict(_order(widened=True))
    assert left == {"b": 0.5025, "c": 0.0525, "d": 0.0425, "a": 0.0025}


def test_where_more_bits_are_no_remedy_the_costs_decide() -> None:
    assert [name for name, _ in _order(widened=False)] == ["b", "a", "c", "d"]


def test_only_as_many_as_get_proposals_cure_others() -> None:
    assert [name for name, _ in _order(widened=True, worst=1)] == ["b", "c", "d", "a"]
    assert dict(_order(widened=True, worst=1))["d"] == 0.0425
