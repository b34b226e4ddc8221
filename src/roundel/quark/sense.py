"""Settings that mean nothing for the element types at hand: they are taken out and said so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roundel.quark.request import Request

_ALIGNED = tuple(f"placement.align_{what}" for what in ("concat", "pool", "slice", "pad"))
_INTEGER_ACTIVATIONS = (
    *("activations.symmetric", "activations.scale"),
    *("placement.fold_relu", "npu.clip_to_relu"),
    *_ALIGNED,
)
_INTEGER_WEIGHTS = tuple(f"weights.{word}" for word in ("symmetric", "scale", "method", "per_channel"))
_FLOATS = ("floats.form", "floats.clip", "weights.scaled", "activations.scaled")


def without_sense(request: Request, values: dict[str, Any], origin: Mapping[str, str]) -> Iterator[str]:
    """Remove what the types leave without effect; a sentence for each option that loses its say.

    Args:
        request: gives the types.
        values: recipe values; those without sense are removed.
        origin: the option that a value came from.
    """
    for path in _meaningless(request, values):
        if path not in values:
            continue
        value = values.pop(path)
        if path in origin and value:
            kind = (
                request.activation
                if request.activation == request.weight
                else (f"{request.activation} and {request.weight}")
            )
            yield f"{origin[path]} means nothing for {kind}"


def _meaningless(request: Request, values: Mapping[str, Any]) -> Iterator[str]:
    if not request.integer_activations:
        yield from _INTEGER_ACTIVATIONS
        if not values.get("activations.scaled"):
            yield from [path for path in values if path.startswith("calibration.")]
    if not request.integer_weights:
        yield from _INTEGER_WEIGHTS
    if not request.short_floats:
        yield from _FLOATS
    if not request.blocks:
        yield from [path for path in values if path.startswith("blocks.")]
