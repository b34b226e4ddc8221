"""ONNX Runtime sessions, opened in one place."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import roundel
import roundel.model.session as session_room
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


def test_weights_are_lent_and_not_serialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundel.model.session._WORTH_LENDING", 1)
    seen: list[int] = []
    original = session_room._open
    monkeypatch.setattr(
        "roundel.model.session._open",
        lambda source, options: (seen.append(len(source)), original(source, options))[1],
    )
    session = open_session(ir.from_proto(net()))
    weights = sum(len(t.raw_data) or 4 * len(t.float_data) for t in net().graph.initializer)
    assert seen[0] < len(net().SerializeToString()) - weights // 2
    gc.collect()
    whole = original(net().SerializeToString(), ort.SessionOptions())
    np.testing.assert_array_equal(session.run(None, FEED)[0], whole.run(None, FEED)[0])


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


def test_zeros_before_a_max_pool_count() -> None:
    """ONNX Runtime's optimizer would fold the Pad into the pool, whose own padding never wins."""
    nodes = [
        node("Pad", ["x", "p"], ["v"], "pad"),
        node("MaxPool", ["v"], ["y"], "pool", kernel_shape=[2, 2]),
    ]
    model = build(nodes, {"x": [1, 1, 2, 2]}, ["y"], {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])})
    x = -np.ones((1, 1, 2, 2), np.float32)
    (found,) = open_session(model.SerializeToString()).run(None, {"x": x})
    assert found[0, 0].tolist() == [[0, 0, 0], [0, -1, 0], [0, 0, 0]]
