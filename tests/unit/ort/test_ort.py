"""ONNX Runtime's quantizer, same call: placement and types as the original's, numbers at least as good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as theirs
import pytest
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

import roundel.ort as ours
from helpers import activations, build, node, normal, ops, rng, run, weights
from roundel.ort import CalibrationMethod, DynamicQuantConfig, QuantFormat, QuantType, StaticQuantConfig
from roundel.ort.running import install, uninstall
from script_cases import network

pytestmark = pytest.mark.usefixtures("capsys")
WIDE = {"activation_type": QuantType.QUInt16, "weight_type": QuantType.QUInt8}


def convolutions() -> onnx.ModelProto:
    """As pre-processing leaves them: without batch norms; a clip, a pool and a join."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="stem", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "k"], ["d"], name="block", pads=[1, 1, 1, 1]),
        node("Clip", ["d", "low", "high"], ["e"], name="clip"),
        node("Add", ["e", "r"], ["a"], name="sum"),
        node("Concat", ["a", "r"], ["j"], name="join", axis=1),
        node("AveragePool", ["j"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Sigmoid", ["p"], ["s"], name="gate"),
        node("Flatten", ["s"], ["f"], name="flatten"),
        node("Gemm", ["f", "l", "m"], ["y"], name="head", transB=1),
    ]
    constants = {
        "w": normal(4, 3, 3, 3),
        "b": normal(4, seed=1),
        "k": normal(4, 4, 3, 3, seed=4, scale=0.3),
        "low": np.float32(0),
        "high": np.float32(6),
        "l": normal(5, 128, seed=5, scale=0.2),
        "m": normal(5, seed=6),
    }
    return build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)


def encoder() -> onnx.ModelProto:
    """A norm, a product with a bias, a softmax."""
    nodes = [
        node("LayerNormalization", ["x", "g", "b"], ["n"], name="norm"),
        node("MatMul", ["n", "w"], ["m"], name="product"),
        node("Add", ["m", "o"], ["a"], name="bias"),
        node("Transpose", ["a"], ["t"], name="turn", perm=[0, 2, 1]),
        node("MatMul", ["a", "t"], ["q"], name="scores"),
        node("Softmax", ["q"], ["y"], name="softmax", axis=-1),
    ]
    constants = {
        "g": 1 + normal(16),
        "b": normal(16, seed=1),
        "w": normal(16, 16, seed=2, scale=0.1),
        "o": normal(16, seed=3, scale=0.3),
    }
    return build(nodes, {"x": [1, 8, 16]}, ["y"], constants)


class Data(theirs.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, model: onnx.ModelProto, count: int = 16, seed: int = 1) -> None:
        shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
        generator = rng(seed)
        self._left = iter([{"x": generator.normal(0, 1, shape).astype(np.float32)} for _ in range(count)])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)


def both(model: onnx.ModelProto, folder: Path, **settings: Any) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The same call under both."""
    made = []
    for name, door in (("a", theirs.quantize_static), ("b", ours.quantize_static)):
        given = onnx.ModelProto()
        given.CopyFrom(model)  # the original changes what it is given
        door(given, folder / f"{name}.onnx", Data(model), **settings)
        made.append(onnx.load(folder / f"{name}.onnx"))
    return made[0], made[1]


def placed(model: onnx.ModelProto) -> dict[str, str]:
    found = {**activations(model), **weights(model)}
    return {name: str(one.dtype) for name, one in found.items()}


def sqnr(model: onnx.ModelProto, made: onnx.ModelProto) -> float:
    signal = noise = 0.0
    for feed in iter(Data(model, 8, seed=9).get_next, None):
        wanted, got = run(model, feed)[0], run(made, feed)[0]
        signal, noise = signal + float((wanted**2).sum()), noise + float(((wanted - got) ** 2).sum())
    return 10 * np.log10(signal / noise)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unsigned": {"activation_type": QuantType.QUInt8},
    "wide": WIDE,
    "signed wide": {"activation_type": QuantType.QInt16, "extra_options": {"ActivationSymmetric": True}},
    "per channel": {"per_channel": True, "extra_options": {"ActivationSymmetric": True}},
    "percentile": {"calibrate_method": CalibrationMethod.Percentile},
    "some types": {"op_types_to_quantize": ["Conv", "MatMul"]},
    "all inputs": {"extra_options": {"ForceQuantizeNoInputCheck": True, "MatMulConstBOnly": True}},
    "kept activations": {"extra_options": {"QDQKeepRemovableActivations": True}},
    "float biases": {"extra_options": {"QuantizeBias": False}},
}


@pytest.mark.parametrize("network", [convolutions, encoder])
@pytest.mark.parametrize("call", CALLS)
def test_the_same_tensors_in_the_same_types_and_numbers_no_worse(
    call: str, network: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    model = network()
    first, second = both(model, tmp_path, **CALLS[call])
    assert placed(first) == placed(second)
    kinds = [
        {(n.op_type, n.domain) for n in made.graph.node if "Linear" in n.op_type} for made in (first, second)
    ]
    assert kinds[0] == kinds[1]
    # Noise as data: a range of least error may cut what other noise has.
    assert sqnr(model, second) > sqnr(model, first) - 3


def test_overrides_and_names(tmp_path: Path) -> None:
    model = convolutions()
    overrides = {"a": [{"quant_type": QuantType.QUInt16, "symmetric": False}]}
    options = {"TensorQuantOverrides": overrides}
    first, second = both(model, tmp_path, nodes_to_exclude=["head"], extra_options=options)
    assert placed(first) == placed(second)
    assert placed(second)["a"] == "uint16"
    assert "l" not in placed(second)
    first, second = both(model, tmp_path, nodes_to_quantize=["block"])
    assert placed(first) == placed(second)


def test_an_override_with_two_types_takes_the_wider(tmp_path: Path, capsys) -> None:
    model = convolutions()
    entry = {
        "quant_type": QuantType.QUInt8,
        "convert": {"quant_type": QuantType.QUInt16, "recv_nodes": {"sum"}},
    }
    out = tmp_path / "out.onnx"
    options = {"TensorQuantOverrides": {"r": [entry]}}
    ours.quantize_static(model, out, Data(model), activation_type=QuantType.QUInt8, extra_options=options)
    assert placed(onnx.load(out))["r"] == "uint16"
    assert "one type for all its readers" in capsys.readouterr().out.replace("\n", " ")


def test_config_objects(tmp_path: Path) -> None:
    model = convolutions()
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    config = StaticQuantConfig(Data(model), **WIDE, extra_options={"ActivationSymmetric": False})
    ours.quantize(source, out, config)
    assert placed(onnx.load(out))["x"] == "uint16"
    ours.quantize(
        source, out, ours.get_qdq_config(str(source), Data(model), activation_type=QuantType.QUInt8)
    )
    assert placed(onnx.load(out))["x"] == "uint8"
    for_qnn = get_qnn_qdq_config(str(source), Data(model), **WIDE)
    ours.quantize(source, out, for_qnn)
    assert placed(onnx.load(out))["x"] == "uint16"
    ours.quantize(source, out, DynamicQuantConfig(weight_type=QuantType.QInt8))
    assert "MatMulInteger" in ops(onnx.load(out)) or "ConvInteger" in ops(onnx.load(out))
    with pytest.raises(ValueError, match="not a config"):
        ours.quantize(source, out, {"quant_format": QuantFormat.QDQ})


def test_what_changes_nothing_is_said_and_what_is_unknown_is_warned_about(
    tmp_path: Path, capsys, caplog
) -> None:
    model, out = convolutions(), tmp_path / "out.onnx"
    options = {"CalibMaxIntermediateOutputs": 4, "ActivationSymetric": True, "QuantizeBias": True}
    ours.quantize_static(model, out, Data(model), extra_options=options)
    assert "CalibMaxIntermediateOutputs: calibration holds one sample" in capsys.readouterr().out.replace(
        "\n", " "
    )
    assert "no extra option 'ActivationSymetric'" in caplog.text
    kept = {"Recipe": {"calibration": {"method": "minmax"}, "effort": "none"}}
    ours.quantize_static(model, out, Data(model), extra_options=kept)
    theirs.quantize_static(model, tmp_path / "a.onnx", Data(model))  # which changes the model
    ends = [activations(onnx.load(path))["x"] for path in (out, tmp_path / "a.onnx")]
    assert float(ends[0].scale) == pytest.approx(float(ends[1].scale))


def test_ranges_are_kept_for_the_next_run(tmp_path: Path) -> None:
    model, cache = convolutions(), tmp_path / "ranges.npz"
    for name in ("a", "b"):
        ours.quantize_static(model, tmp_path / f"{name}.onnx", Data(model), calibration_cache_path=cache)
    assert cache.exists()
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_smooth_quant_and_the_operator_format(tmp_path: Path) -> None:
    model, out = encoder(), tmp_path / "out.onnx"
    ours.quantize_static(
        model, out, Data(model), extra_options={"SmoothQuant": True, "SmoothQuantAlpha": 0.6}
    )
    assert '"smoothing"' in out.with_suffix(".json").read_text()
    plain = convolutions()
    ours.quantize_static(plain, out, Data(plain), quant_format=QuantFormat.QOperator)
    assert "QLinearConv" in ops(onnx.load(out))


def test_everything_else_is_the_original_s() -> None:
    assert ours.CalibrationDataReader is theirs.CalibrationDataReader
    assert ours.quant_pre_process is theirs.quant_pre_process
    assert {"quantize_static", "QuantType", "get_qdq_config", "install"} <= set(dir(ours))
    with pytest.raises(AttributeError, match="has no 'quantise_static'"):
        ours.quantise_static  # noqa: B018


def test_installing_changes_both_places_and_can_be_undone() -> None:
    original = theirs.quantize_static
    install()
    try:
        from onnxruntime.quantization.quantize import quantize_static

        assert theirs.quantize_static is quantize_static is ours.quantize_static
    finally:
        uninstall()
    assert theirs.quantize_static is original


SCRIPT = """
import sys
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization import quant_pre_process
from onnxruntime.quantization import qdq_loss_debug as debug
import numpy as np

class Reader(CalibrationDataReader):
    def __init__(self):
        self.left = iter([{"x": np.random.RandomState(k).randn(1, 3, 8, 8).astype("f")} for k in range(6)])
    def get_next(self):
        return next(self.left, None)

if __name__ == "__main__":
    source, ready, target = sys.argv[1:]
    quant_pre_process(source, ready)
    quantize_static(ready, target, Reader(), quant_format=QuantFormat.QDQ, activation_type=QuantType.QUInt8)
    debug.modify_model_output_intermediate_tensors(target, target + ".debug.onnx")
    print(len(debug.collect_activations(target + ".debug.onnx", Reader())) > 3)
"""


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    onnx.save(network(), tmp_path / "in.onnx")
    command = [sys.executable, "-m", "roundel.ort", "script.py", "in.onnx", "ready.onnx", "out.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("True")
    assert (tmp_path / "out.json").exists(), "Roundel's record"
    assert any(n.op_type == "QuantizeLinear" for n in onnx.load(tmp_path / "out.onnx").graph.node)
    usage = subprocess.run(command[:3], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "python -m roundel.ort" in usage.stdout
