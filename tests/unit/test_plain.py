"""Plain values: what JSON can hold, and back."""

from __future__ import annotations

import enum
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import pytest
from pydantic import ValidationError

from roundel.plain import from_plain, to_plain


class _Place(enum.Enum):
    NPU = "npu"


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    power: float
    range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Whole:
    place: _Place
    kind: Literal["a", "b"]
    parts: tuple[_Part, ...]
    by_name: Mapping[str, _Part]
    seconds: float = 0.0


WHOLE = _Whole(
    _Place.NPU,
    "b",
    (_Part("x", math.inf), _Part("y", -math.inf, (0.0, 1.5))),
    {"z": _Part("z", 1.0)},
)


def test_there_and_back_through_json() -> None:
    assert from_plain(_Whole, json.loads(json.dumps(to_plain(WHOLE), allow_nan=False))) == WHOLE


def test_plain_values_are_what_json_says() -> None:
    assert to_plain(WHOLE) == {
        "place": "npu",
        "kind": "b",
        "parts": [
            {"name": "x", "power": "inf", "range": None},
            {"name": "y", "power": "-inf", "range": [0.0, 1.5]},
        ],
        "by_name": {"z": {"name": "z", "power": 1.0, "range": None}},
        "seconds": 0.0,
    }


def test_numbers_that_are_not_finite_come_back() -> None:
    assert to_plain(math.nan) == "nan"
    assert math.isnan(from_plain(float, "nan"))
    assert from_plain(float, "-inf") == -math.inf


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Path("a/b"), "a/b"),
        (MappingProxyType({_Place.NPU: 1, 3: 2}), {"npu": 1, "3": 2}),
        (np.float32(0.5), 0.5),
        (np.float64(math.inf), "inf"),
        (np.int64(7), 7),
        (np.bool_(True), True),
    ],
)
def test_values_that_are_not_plain_yet(value: object, plain: object) -> None:
    found = to_plain(value)

    assert found == plain
    assert type(found) is type(plain)


def test_what_has_no_plain_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        to_plain(object())


def test_what_is_no_such_value_is_refused() -> None:
    with pytest.raises(ValidationError):
        from_plain(_Part, {"name": "x"})


def test_importing_it_does_not_import_pydantic() -> None:
    code = "import sys, roundel.plain; sys.exit('pydantic' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
