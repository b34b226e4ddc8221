"""Results, records and reports as plain values that JSON can hold, and back.

Pydantic does the work and is imported by the first call, so that importing this costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Dictionaries, lists, numbers and text, of dataclasses, enums, paths and containers.

    A number that is not finite becomes text (inf, -inf, nan), since JSON has none.

    Raises:
        TypeError: a value is none of these.
    """
    from pydantic_core import to_jsonable_python

    return _finite(to_jsonable_python(value, fallback=_fallback))


def from_plain(kind: type[T], tree: object) -> T:
    """What `to_plain` made plain.

    Raises:
        pydantic.ValidationError: it was no such value.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_python(tree)


def _fallback(value: object) -> object:
    """What pydantic does not know: mappings that are no dictionaries, and numpy's numbers."""
    import numpy as np

    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no plain form")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
