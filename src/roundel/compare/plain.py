"""Frozen values to plain JSON values and back."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: object) -> object:
    """Dictionaries, lists, numbers and text; a number that is not finite becomes text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_plain(kind: type[T], tree: Mapping[str, Any]) -> T:
    """The dataclass that `to_plain` made the mapping from."""
    built = _build(kind, tree)
    assert isinstance(built, kind)
    return built


def _build(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{f.name: _build(hints[f.name], value[f.name]) for f in dataclasses.fields(kind)})
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _build(next(p for p in parts if p is not type(None)), value)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return tuple(_build(parts[0], item) for item in value)
        return tuple(_build(part, item) for part, item in zip(parts, value, strict=True))
    if origin is not None and isinstance(value, Mapping):
        return {key: _build(parts[1], item) for key, item in value.items()}
    return float(value) if kind is float else value
