"""Which layers get 16-bit activations first: those whose own rounding costs most at the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundel.model.load import ModelSource
from roundel.recipe import merge
from roundel.report.listener import Listener
from roundel.sensitivity.measure import sensitivity
from roundel.sensitivity.types import LayerCost

_SHARES = (0.5, 0.8, 0.95, 0.99)  # of what all activations cost; a few tries, each more than the last
_WIDE = "int16"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Some layers in A16W8, the rest as the recipe has them.

    Attributes:
        layers: how many.
        of: how many there are.
        changes: to the recipe.
    """

    layers: int
    of: int
    changes: dict[str, Any]


def mixtures(
    model: ModelSource, preset: str, data: object, changes: Mapping[str, Any], told: Listener
) -> Iterator[Mixture]:
    """Growing sets of the most costly layers; the ranking is measured once, at the first."""
    ranking = sensitivity(model, recipe=preset, data=data, changes=changes, listener=told)
    yield from grown(ranking.layers, changes)


def grown(layers: Sequence[LayerCost], changes: Mapping[str, Any]) -> Iterator[Mixture]:
    """The sets, from the costs of the layers' activations."""
    moving = [layer for layer in layers if layer.activations > 0]
    ranked = sorted(moving, key=lambda layer: -layer.activations)
    total, before = sum(layer.activations for layer in ranked), 0
    for share in _SHARES:
        count = _reaching(ranked, share * total)
        if count > before:
            nodes = [name for layer in ranked[:count] for name in layer.nodes]
            own = list(changes.get("overrides", ()))
            override = {"overrides": [*own, {"nodes": nodes, "type": _WIDE}]}
            yield Mixture(count, len(layers), merge(dict(changes), override))
        before = max(before, count)


def _reaching(ranked: Sequence[LayerCost], wanted: float) -> int:
    """How many of the first layers it takes."""
    reached = 0.0
    for count, layer in enumerate(ranked, 1):
        reached += layer.activations
        if reached >= wanted:
            return count
    return len(ranked)
