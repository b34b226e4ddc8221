"""A layer whose rounding makes the outputs infinite comes first, and leaves the others their shares."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import onnx
import pytest
from rich.console import Console

import roundel
from helpers import Feed, build, node, normal, rng
from roundel.report.views import show_sensitivity


def divided() -> onnx.ModelProto:
    """Two matrices, and between them a root of a mean square, which rounding makes zero for quiet samples."""
    nodes = [
        node("MatMul", ["x", "w1"], ["a"], name="first"),
        node("Mul", ["a", "a"], ["q"], name="square"),
        node("ReduceMean", ["q"], ["m"], name="mean", axes=[1]),
        node("Sqrt", ["m"], ["r"], name="root"),
        node("Reciprocal", ["r"], ["d"], name="reciprocal"),
        node("Mul", ["a", "d"], ["n"], name="scale"),
        node("MatMul", ["n", "w2"], ["y"], name="last"),
    ]
    return build(nodes, {"x": [1, 16]}, ["y"], {"w1": normal(16, 16), "w2": normal(16, 4, seed=1)})


def samples(count: int = 8) -> list[Feed]:
    """Each ten times as loud or as quiet as the one before."""
    return [
        {"x": (10.0 ** -(k % 4) * rng(k).standard_normal((1, 16))).astype(np.float32)} for k in range(count)
    ]


@pytest.fixture(scope="module")
def found() -> Any:
    return roundel.sensitivity(divided(), recipe="a8w8_minmax", data=samples())


def test_it_comes_first_and_is_advised_on(found: Any) -> None:
    endless = [layer for layer in found.layers if not math.isfinite(layer.cost)]
    assert endless
    assert list(found.layers[: len(endless)]) == endless
    assert all(layer.share == 1 for layer in endless)
    assert all(layer.remedies for layer in endless)
    assert found.together


def test_the_others_share_what_is_finite(found: Any) -> None:
    finite = [layer for layer in found.layers if math.isfinite(layer.cost)]
    assert sum(layer.share for layer in finite) == pytest.approx(1)
    assert sum(layer.share > 0 for layer in finite) > 1


def test_the_json_is_valid(found: Any) -> None:
    def refuse(literal: str) -> None:
        raise AssertionError(literal)

    tree = json.loads(json.dumps(found.to_dict()), parse_constant=refuse)
    for layer in tree["layers"]:
        assert isinstance(layer["share"], float)
        assert isinstance(layer["left"], float)
        assert layer["won_back"] is None or isinstance(layer["won_back"], float)


def test_it_is_shown(found: Any) -> None:
    shown = Console(record=True, width=100)
    show_sensitivity(shown, json.loads(json.dumps(found.to_dict())), everything=True)
    assert "100.0%" in shown.export_text()
