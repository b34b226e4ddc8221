"""Other treatment for single tensors, in the words that scripts have for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roundel.quark.blocks import block_type
from roundel.quark.enums import element_type
from roundel.quark.errors import QuarkConfigError, expected_names
from roundel.quark.request import Request
from roundel.types import QType

_WORDS = (
    *("quant_type", "symmetric", "rmin", "rmax", "scale", "zero_point", "axis", "reduce_range", "convert"),
)


def from_tensor_overrides(given: Mapping[str, Any], request: Request) -> tuple[dict[str, Any], ...]:
    """Recipe overrides for {tensor: [{quant_type, symmetric, rmin, rmax, scale, zero_point, axis}]}.

    Raises:
        QuarkConfigError: an entry has another form, or asks for what a recipe cannot say.
    """
    return tuple(_override(name, _only(name, entries), request) for name, entries in given.items())


def from_mixed_precision(given: Mapping[Any, Sequence[str]]) -> tuple[dict[str, Any], ...]:
    """Recipe overrides for {type: [tensors]}."""
    where = "extra_options['MixedPrecisionTensor']"
    return tuple(
        {"tensors": tuple(names), "type": element_type(kind, where)} for kind, names in given.items() if names
    )


def _only(name: str, entries: Any) -> Mapping[str, Any]:
    where = f"extra_options['TensorQuantOverrides']['{name}']"
    if not isinstance(entries, list | tuple) or not entries or not isinstance(entries[0], Mapping):
        raise QuarkConfigError(
            "An override has another form.", where=where, observed=entries, expected="[{'quant_type': …}]"
        )
    if len(entries) > 1:
        raise QuarkConfigError(
            "An override lists its channels.",
            where=where,
            observed=f"{len(entries)} entries",
            expected="one entry; {'axis': N} gives each channel its own scale",
        )
    for word in entries[0]:
        if word not in _WORDS:
            raise QuarkConfigError(
                f"An override has no '{word}'.", where=where, **expected_names(str(word), _WORDS)
            )
    return entries[0]


def _override(name: str, entry: Mapping[str, Any], request: Request) -> dict[str, Any]:
    where = f"extra_options['TensorQuantOverrides']['{name}']"
    for word, why in (
        ("reduce_range", "one bit less is for all weights: reduce_range=True in the config"),
        ("convert", "a tensor has one type"),
    ):
        if entry.get(word):
            raise QuarkConfigError(f"An override cannot say '{word}'.", where=where, hint=f"{why}.")
    return {"tensors": (name,), **dict(_parts(entry, request, where))}


def _parts(entry: Mapping[str, Any], request: Request, where: str) -> Iterator[tuple[str, Any]]:
    if entry.get("quant_type") is not None:
        yield "type", block_type(element_type(entry["quant_type"], where), request.options)
    if entry.get("symmetric") is not None:
        yield "symmetric", bool(entry["symmetric"])
    if entry.get("axis") is not None:
        yield "per_channel", True
    bounds = _bounds(entry, request, where)
    if bounds is not None:
        yield "range", bounds


def _bounds(entry: Mapping[str, Any], request: Request, where: str) -> tuple[float, float] | None:
    """The range that is given, or the one that a given scale and zero point reach."""
    if ("rmin" in entry) != ("rmax" in entry) or ("scale" in entry) != ("zero_point" in entry):
        raise QuarkConfigError(
            "An override gives half of a pair.",
            where=where,
            observed=dict(entry),
            expected="rmin and rmax, or scale and zero_point",
        )
    if "rmin" in entry:
        return float(entry["rmin"]), float(entry["rmax"])
    if "scale" not in entry:
        return None
    word = element_type(entry["quant_type"], where) if "quant_type" in entry else request.activation
    kind, scale, zero = QType(word), float(entry["scale"]), int(entry["zero_point"])
    low = kind.qmin + (1 if kind.signed and zero == 0 else 0)
    return (low - zero) * scale, (kind.qmax - zero) * scale
