"""The twin as users meet it: sessions, infer, evaluate, compare; what has no twin; what the CPU runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from helpers import rng
from npu_files import QdqNet, fixture_input, fixture_model
from roundel.measure.runner import Predictor
from roundel.model.session import open_session


def _samples() -> list[dict[str, Any]]:
    return [{"x": fixture_input("phase", 32) * (1 - 0.1 * k)} for k in range(3)]


def test_has_the_methods_of_a_session() -> None:
    session = roundel.npu_session(fixture_model(32, 1, 0), "hpt")
    assert [i.name for i in session.get_inputs()] == ["x"]
    (output,) = session.get_outputs()
    feed = _samples()[0]
    np.testing.assert_array_equal(session.run([output.name], feed)[0], session.run(None, feed)[0])
    assert session.summary.exact_share == 1


def test_other_devices_have_no_twin() -> None:
    with pytest.raises(roundel.RecipeError, match="has not been measured"):
        roundel.npu_session(fixture_model(32, 1, 0), "stx")


def test_a_float_model_has_no_twin(clean_model: onnx.ModelProto) -> None:
    with pytest.raises(roundel.ModelError, match="in float"):
        roundel.npu_session(clean_model)


@pytest.fixture
def clean_model() -> onnx.ModelProto:
    net = QdqNet(1, 4, 8, 8)
    net.nodes.clear()
    net.add("Relu", "x")
    return net.model()


def test_what_the_npu_computes_wrongly_has_no_twin() -> None:
    model = fixture_model(32, 1, 0)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and not tensor.dims:
            value = onnx.numpy_helper.to_array(tensor) * np.float32(1.01)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(value), tensor.name))
    with pytest.raises(roundel.ModelError, match="computes it wrongly"):
        roundel.npu_session(model)


def test_what_is_refused_as_a_whole_runs_on_the_cpu() -> None:
    model = fixture_model(32, 1, 0)
    for node in model.graph.node:
        if node.op_type.endswith("Linear"):
            node.domain = "com.microsoft"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    session = roundel.npu_session(model)
    assert session.summary.refused is not None
    assert "com.microsoft" in session.summary.refused
    feed = _samples()[0]
    plain = open_session(model.SerializeToString(), simulate=True)
    np.testing.assert_array_equal(session.run(None, feed)[0], plain.run(None, feed)[0])


def test_predictor_keeps_its_arithmetic_on_the_way_to_another_process(tmp_path: Path) -> None:
    file = tmp_path / "conv.onnx"
    onnx.save(fixture_model(32, 1, 0), file)
    twin, plain = Predictor(file, as_npu="phx"), Predictor(file)
    assert twin.digest() != plain.digest()
    sample = _samples()[0]
    wanted = twin.run(sample, 0)
    assert any((wanted[name] != array).any() for name, array in plain.run(sample, 0).items())
    arrived = pickle.loads(pickle.dumps(twin)).open(1)
    for name, array in arrived.run(sample, 0).items():
        np.testing.assert_array_equal(array, wanted[name])


def test_infer_evaluate_and_compare(tmp_path: Path) -> None:
    random = rng(0)
    float_file, file = tmp_path / "net.onnx", tmp_path / "net.xint8.onnx"
    net = QdqNet(1, 4, 8, 8)
    net.nodes.clear()
    net.add("Conv", "x", net.const(random.normal(size=(6, 4, 3, 3))), net.const(random.normal(size=6)))
    net.add("Relu", net.x)
    net.add("GlobalAveragePool", net.x)
    onnx.save(net.model(), float_file)
    data = [{"x": random.normal(size=(1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    roundel.quantize(float_file, file, preset="xint8_plain", data=data, device="phx")
    session = roundel.npu_session(file)
    done = roundel.infer(file, data, tmp_path / "out", as_npu="phx")
    assert any("known rule" in note for note in done.notes)
    saved = [np.load(tmp_path / "out" / name) for name in done.files]
    for sample, array in zip(data, saved, strict=True):
        np.testing.assert_array_equal(array, session.run(None, sample)[0])
    scores = roundel.evaluate([float_file, file], data, as_npu="phx")
    assert isinstance(scores, tuple)
    assert not scores[0].notes
    assert any("known rule" in note for note in scores[1].notes)
    compared = roundel.compare(float_file, file, data, as_npu="phx")
    wanted = float(scores[1].sqnr_db or 0)
    assert compared.outputs[0].difference.sqnr_db == pytest.approx(wanted)
    assert any("known rule" in note for note in compared.notes)
    with pytest.raises(roundel.ModelError, match="in float"):
        roundel.infer(float_file, data, tmp_path / "other", as_npu="phx")
    with pytest.raises(roundel.ModelError, match="in float"):
        roundel.evaluate([float_file], data, as_npu="phx")
