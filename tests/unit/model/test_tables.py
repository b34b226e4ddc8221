"""Integer inputs that are rows of a table: random ids exist."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from helpers import build, node, normal
from roundel import forecasting
from roundel.errors import DataError
from roundel.model.graph import table_rows


def embedding(rows: int = 7, *, through: str | None = None) -> onnx.ModelProto:
    """Ids to rows of a table, and a layer behind it."""
    ids = "ids" if through is None else "moved"
    nodes = [] if through is None else [node(through, ["ids"], ["moved"], name="t")]
    nodes += [
        node("Gather", ["table", ids], ["e"], name="gather"),
        node("MatMul", ["e", "k"], ["y"], name="mm"),
    ]
    constants = {"table": normal(rows, 8), "k": normal(8, 4, seed=2)}
    return build(nodes, {"ids": [1, 5]}, ["y"], constants, types={"ids": onnx.TensorProto.INT64})


@pytest.mark.parametrize("through", [None, "Identity", "Transpose"])
def test_rows_of_the_table(through: str | None) -> None:
    assert table_rows(ir.from_proto(embedding(through=through)).graph) == {"ids": 7}


def test_a_number_that_is_computed_with_is_no_row() -> None:
    model = embedding()
    model.graph.node[0].input[1] = "other"
    model.graph.node.insert(0, node("Neg", ["ids"], ["other"], name="n"))
    assert table_rows(ir.from_proto(model).graph) == {}


def test_random_ids_exist(tmp_path: Path) -> None:
    found = roundel.quantize(
        embedding(), tmp_path / "q.onnx", recipe="a8w8", data=roundel.RandomData(count=6)
    )
    assert found.record.data["ranges"] == {"ids": [0, 7]}
    wide = roundel.quantize(
        embedding(300), tmp_path / "w.onnx", recipe="a8w8", data=roundel.RandomData(count=6)
    )
    assert "ranges" not in wide.record.data


def test_a_forecast_names_the_sample_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "_MOMENT_SECONDS", 0.0)  # of a longer run, which is timed
    ids = {"ids": np.full((1, 5), 50)}
    with pytest.raises(DataError, match="could not run a sample"):
        roundel.forecast(embedding(), recipe="a8w8", data=[ids])
