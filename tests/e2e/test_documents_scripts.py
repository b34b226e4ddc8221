"""The documents' ways to quantize, in our own words: the same calls, each as a script that runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from roundel.quark.importing import install, uninstall
from script_cases import Reader, network

IMPORTS = """
import os
import numpy as np
import onnxruntime
from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod
from quark.onnx import ModelQuantizer, PowerOfTwoMethod, QuantType, QuantFormat, get_library_path
from quark.onnx import ExtendedQuantFormat, ExtendedQuantType
from quark.onnx.quantization.config import get_default_config
from quark.onnx.quantization.config.config import Config, QuantizationConfig
from quark.onnx.quantization.config.custom_config import DEFAULT_ADAROUND_PARAMS
"""
QUANTIZE = """
config = Config(global_quant_config=settings)
print(f"quantizing with {config}")
quantizer = ModelQuantizer(config)
quantizer.quantize_model(source, target, reader)
"""

# Eight-bit powers of two for the NPU's integer engine, spelt out; once with equalization asked for by name.
XINT8 = """
settings = QuantizationConfig(
    calibrate_method=PowerOfTwoMethod.MinMSE,
    activation_type=QuantType.QUInt8,
    weight_type=QuantType.QInt8,
    enable_npu_cnn=True,
    extra_options={"ActivationSymmetric": True},
)
"""
XINT8_CLE = XINT8.replace("enable_npu_cnn=True,", "enable_npu_cnn=True, include_cle=True,")

# A preset by name, with a reader class that loads a folder.
BY_NAME = """
class FolderReader(CalibrationDataReader):
    def __init__(self, folder, input_name):
        self.input_name = input_name
        self.data = [np.load(os.path.join(folder, name)) for name in sorted(os.listdir(folder))]
        self.data_iter = None

    def get_next(self):
        if self.data_iter is None:
            self.data_iter = iter([{self.input_name: data} for data in self.data])
        return next(self.data_iter, None)

reader = FolderReader(folder, "x")
settings = get_default_config(PRESET)
"""

# Float scales with fine-tuning, spelt out.
FLOAT_SCALES = """
settings = QuantizationConfig(
    calibrate_method=CalibrationMethod.MinMax,
    quant_format=ExtendedQuantFormat.QDQ,
    activation_type=ACTIVATION,
    weight_type=QuantType.QInt8,
    include_fast_ft=True,
    extra_options={
        "ActivationSymmetric": True,
        "AlignSlice": False,
        "FoldRelu": True,
        "AlignConcat": True,
        "AlignEltwiseQuantType": True,
        "FastFinetune": {"NumIterations": 200, "LearningRate": RATE, "OptimAlgorithm": ALGORITHM},
    },
)
"""
ADAROUND_A8 = FLOAT_SCALES.replace("ACTIVATION", "QuantType.QInt8").replace("RATE", "0.1")
ADAROUND_A8 = ADAROUND_A8.replace("ALGORITHM", '"adaround"')
ADAQUANT_A16 = FLOAT_SCALES.replace("ACTIVATION", "ExtendedQuantType.QInt16").replace("RATE", "1e-6")
ADAQUANT_A16 = ADAQUANT_A16.replace("ALGORITHM", '"adaquant"')

# Unsigned activations, percentile ranges and the default AdaRound parameters.
ACCURATE = """
settings = QuantizationConfig(
    calibrate_method=CalibrationMethod.Percentile,
    activation_type=QuantType.QUInt8,
    weight_type=QuantType.QInt8,
    include_fast_ft=True,
    extra_options={
        "Percentile": 99.9999,
        "FastFinetune": {**DEFAULT_ADAROUND_PARAMS, "NumIterations": 200},
    },
)
"""

# bfloat16: as casts, with scales, and fine-tuned without the flag that switches fine-tuning on.
BF16 = """
settings = QuantizationConfig(
    calibrate_method=CalibrationMethod.MinMax,
    quant_format=ExtendedQuantFormat.QDQ,
    activation_type=ExtendedQuantType.QBFloat16,
    weight_type=ExtendedQuantType.QBFloat16,
    extra_options=OPTIONS,
)
"""
TUNED = {
    **{"NumIterations": 50, "LearningRate": 1e-6, "OptimAlgorithm": "adaquant"},
    **{"OptimDevice": "cpu", "InferDevice": "cpu"},
}
BF16_CAST = BF16.replace("OPTIONS", "{'BF16QDQToCast': True}")
BF16_SCALED = BF16.replace("OPTIONS", "{'WeightScaled': True, 'ActivationScaled': True}")
BF16_TUNED = BF16.replace("OPTIONS", repr({"FastFinetune": TUNED}))

# Opening the result with the custom-operator library, as one does for models that need it.
OPEN = """
providers = onnxruntime.get_available_providers()
device = "ROCM" if "ROCMExecutionProvider" in providers else "CPU"
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(get_library_path(device))
session = onnxruntime.InferenceSession(target, options, providers=["CPUExecutionProvider"])
"""

SCRIPTS = {
    "xint8": (XINT8, "uint8", False),
    "xint8 with equalization": (XINT8_CLE, "uint8", False),
    "a8w8 by name": (BY_NAME.replace("PRESET", '"A8W8"'), "int8", False),
    "a16w8 by name": (BY_NAME.replace("PRESET", '"A16W8"'), "int16", False),
    "xint8 by name": (BY_NAME.replace("PRESET", '"XINT8"'), "uint8", False),
    "a8w8 with adaround": (ADAROUND_A8, "int8", True),
    "a16w8 with adaquant": (ADAQUANT_A16, "int16", True),
    "int8 cnn accurate": (ACCURATE, "uint8", True),
    "bf16 as casts": (BF16_CAST, None, False),
    "bf16 with scales": (BF16_SCALED, None, False),
    "bf16 fine-tuned": (BF16_TUNED, None, True),
}


@pytest.fixture
def quark():
    install()
    yield
    uninstall()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_documents(name: str, quark: None, tmp_path: Path, capsys) -> None:
    script, stored, tuned = SCRIPTS[name]
    if tuned:
        pytest.importorskip("torch")
    source, target, folder = tmp_path / "float.onnx", tmp_path / "out.onnx", tmp_path / "data"
    onnx.save(network(), source)
    folder.mkdir()
    samples = Reader(6)
    for index in range(6):
        np.save(folder / f"{index}.npy", samples.get_next()["x"])
    names = {"source": str(source), "target": str(target), "folder": str(folder), "reader": Reader(6)}
    exec(compile(IMPORTS + script + QUANTIZE + OPEN, name, "exec"), names)
    model = onnx.load(target)
    onnx.checker.check_model(model)
    zero_points = {t.name: t for t in model.graph.initializer if t.name == "x_zero_point"}
    if stored is not None:
        kind = onnx.helper.tensor_dtype_to_np_dtype(zero_points["x_zero_point"].data_type)
        assert kind == np.dtype(stored)
    sample = Reader(1).get_next()
    got = names["session"].run(None, sample)[0]
    expected = ort.InferenceSession(str(source)).run(None, sample)[0]
    assert np.linalg.norm(got - expected) < 0.08 * np.linalg.norm(expected)
    record = json.loads(target.with_suffix(".json").read_text())
    steps = [step["step"] for step in record["improvements"]]
    assert ("fine-tuning" in steps) == tuned
    assert "quantizing with QuantizationConfig(" in capsys.readouterr().out


def test_results_are_saved_and_compared(quark: None, tmp_path: Path) -> None:
    """Float and quantized results in two folders, then the documents' comparison of both."""
    source, target = tmp_path / "float.onnx", tmp_path / "out.onnx"
    onnx.save(network(), source)
    script = BY_NAME.split("reader =")[0] + 'settings = get_default_config("A8W8")\n' + QUANTIZE
    exec(IMPORTS + script, {"source": str(source), "target": str(target), "reader": Reader(6)})
    for path, folder in ((source, "baseline"), (target, "quantized")):
        session = ort.InferenceSession(str(path))
        (tmp_path / folder).mkdir()
        samples = Reader(4)
        for index in range(4):
            np.save(tmp_path / folder / f"{index}.npy", session.run(None, samples.get_next())[0])
    from quark.onnx.tools import evaluate  # type: ignore[import-not-found]

    scores = evaluate.evaluate_folders(tmp_path / "baseline", tmp_path / "quantized")
    assert scores.metrics["cosine"].worst > 0.99
