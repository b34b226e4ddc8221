"""ONNX Runtime sessions, opened in one place."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from helpers import build, feeds, node, normal
from roundel.errors import ModelError
from roundel.model.session import open_session

FEED = feeds({"x": (1, 8)}, 1)[0]


def net() -> onnx.ModelProto:
    return build([node("MatMul", ["x", "k"], ["y"], name="mm")], {"x": [1, 8]}, ["y"], {"k": normal(8, 8)})


def test_every_source_runs_alike(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "m.onnx")
    sources = (net().SerializeToString(), tmp_path / "m.onnx", ir.from_proto(net()))
    results = [open_session(source).run(None, FEED)[0] for source in sources]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_a_model_too_large_for_memory_goes_through_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("roundel.model.session._IN_MEMORY_LIMIT", 10)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    session = open_session(ir.from_proto(net()))
    assert len(list(tmp_path.iterdir())) == 1
    np.testing.assert_array_equal(
        session.run(None, FEED)[0], open_session(net().SerializeToString()).run(None, FEED)[0]
    )
    del session
    gc.collect()
    assert list(tmp_path.iterdir()) == [], "the folder lives as long as the session"


def test_a_session_has_no_effect_on_the_model() -> None:
    model = ir.from_proto(net())
    tensor = model.graph.initializers["k"].const_value
    open_session(model)
    assert model.graph.initializers["k"].const_value is tensor


def test_threads_are_passed_on() -> None:
    session = open_session(net().SerializeToString(), threads=1)
    assert session.get_session_options().intra_op_num_threads == 1
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_simulation_computes_exactly_what_is_written() -> None:
    result = roundel.quantize(net(), data=[FEED], changes={"placement": {"domain": "ai.onnx"}})
    options = open_session(result.ir, simulate=True).get_session_options()
    assert options.get_session_config_entry("session.disable_quant_qdq") == "1"


@pytest.mark.parametrize("broken", [b"", b"no model", b"\x08\x0a"])
def test_what_does_not_load_is_a_model_error(broken: bytes) -> None:
    with pytest.raises(ModelError) as caught:
        open_session(broken)
    assert "ONNX Runtime does not load" in caught.value.what
    assert caught.value.observed


def test_an_unknown_operator_is_a_model_error() -> None:
    proto = net()
    proto.graph.node[0].op_type = "MatMulll"
    with pytest.raises(ModelError) as caught:
        open_session(proto.SerializeToString())
    assert "MatMulll" in (caught.value.observed or "")
