"""Small pieces of scripts, in Quark's documented API, run as they are under Quark and under Roundel.

    PYTHON_OF_QUARK bench/fragments.py run quark.json
    python -m roundel.quark bench/fragments.py run roundel.json
    python bench/fragments.py table quark.json roundel.json > bench/results/fragments.md

Each runs on a network of convolutions or of products, with 16 random samples; the SQNR is that of 8 others.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

SHAPES = {"net": [1, 3, 16, 16], "mat": [1, 8, 32]}

CLASSIC = "from quark.onnx.quantization.config import Config, QuantizationConfig, get_default_config\n"
NEW = (
    "from quark.onnx import (QConfig, QLayerConfig, Int8Spec, UInt8Spec, Int16Spec, UInt16Spec, XInt8Spec, "
    "BFloat16Spec, BFP16Spec, MXInt8Spec, CalibMethod, QuantGranularity, CLEConfig, SmoothQuantConfig, "
    "AdaRoundConfig, AdaQuantConfig, GPTQConfig, BiasCorrectionConfig, AutoMixprecisionConfig)\n"
)
TYPES = (
    "from quark.onnx import (CalibrationMethod, PowerOfTwoMethod, LayerWiseMethod, QuantFormat, QuantType, "
    "ExtendedQuantFormat, ExtendedQuantType)\n"
)
TUNE = "{'NumIterations': 20, 'BatchSize': 2, 'DataSize': 8, 'OptimAlgorithm': '%s', 'LearningRate': %s%s}"


def preset(name: str, *changes: str) -> str:
    """A preset, changed."""
    lines = [f"c = get_default_config('{name}')", *changes, "config = Config(global_quant_config=c)"]
    return CLASSIC + TYPES + "\n".join(lines)


def by_hand(words: str) -> str:
    """A classic config written out."""
    return CLASSIC + TYPES + f"config = Config(QuantizationConfig({words}))"


def newer(words: str, before: str = "") -> str:
    """The newer API."""
    return NEW + before + f"\nconfig = QConfig({words})"


def option(**options: Any) -> str:
    """A8W8 with extra options."""
    return preset("A8W8", f"c.extra_options.update({options!r})")


_EIGHT = "QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())"
FRAGMENTS: dict[str, tuple[str, str]] = {
    **{
        f"get_default_config('{name}')": ("net", preset(name))
        for name in (
            *("XINT8", "A8W8", "A16W8", "S8S8_AAWS", "U8S8_AAWS", "U8U8_AAWA", "S16S8_ASWS", "U16S8_AAWS"),
            *("BF16", "BFP16", "MX6", "MX9", "MXINT8", "MXFP8E4M3", "BF16_BFP16", "INT8_CNN_DEFAULT"),
            *("INT16_CNN_DEFAULT", "VINT8", "S16S16_MIXED_S8S8", "BF16_MIXED_BFP16"),
        )
    },
    "INT8_TRANSFORMER_DEFAULT": ("mat", preset("INT8_TRANSFORMER_DEFAULT")),
    "MATMUL_NBITS": ("mat", preset("MATMUL_NBITS", "c.extra_options['MatMulNBitsParams']['GroupSize'] = 32")),
    "UINT8_DYNAMIC_QUANT": ("mat", preset("UINT8_DYNAMIC_QUANT")),
    "XINT8, CLE off": ("net", preset("XINT8", "c.include_cle = False")),
    "XINT8, unsigned off": ("net", preset("XINT8", "c.activation_type = QuantType.QInt8")),
    "A8W8, MinMax": ("net", by_hand("quant_format=ExtendedQuantFormat.QDQ")),
    "U8S8, Entropy": (
        "net",
        by_hand("calibrate_method=CalibrationMethod.Entropy, activation_type=QuantType.QUInt8"),
    ),
    "Percentile 99.9": (
        "net",
        by_hand("calibrate_method=CalibrationMethod.Percentile, extra_options={'Percentile': 99.9}"),
    ),
    "LayerWisePercentile": ("net", by_hand("calibrate_method=LayerWiseMethod.LayerWisePercentile")),
    "LayerWisePercentile, no histogram": (
        "net",
        by_hand(
            "calibrate_method=LayerWiseMethod.LayerWisePercentile, extra_options={'LWPUseHistogram': False}"
        ),
    ),
    "NonOverflow": ("net", by_hand("calibrate_method=PowerOfTwoMethod.NonOverflow")),
    "per channel": ("net", by_hand("per_channel=True")),
    "exclude nodes": ("net", preset("A8W8", "c.nodes_to_exclude = ['head']")),
    "exclude by pattern": ("net", preset("A8W8", "c.nodes_to_exclude = ['^he.*']")),
    "exclude a node that is not there": ("net", preset("A8W8", "c.nodes_to_exclude = ['nothing']")),
    "exclude a subgraph": ("net", preset("A8W8", "c.subgraphs_to_exclude = [(['block'], ['sum'])]")),
    "types to quantize": ("net", preset("A8W8", "c.op_types_to_quantize = ['Conv']")),
    "a misspelt setting": ("net", preset("A8W8", "c.include_cls = True")),
    "a misspelt option": ("net", option(ActivationSymetric=True)),
    "channels last": ("net", preset("A8W8", "c.convert_nchw_to_nhwc = True")),
    "opset 19": ("net", option(ConvertOpsetVersion=19)),
    "no input initializers removed": ("net", option(RemoveInputInit=False)),
    "bias scale left": ("net", option(AdjustBiasScale=False)),
    "biases in 16 bits": ("net", option(Int16Bias=True)),
    "float biases": ("net", option(QuantizeBias=False)),
    "CopyBiasInit None": ("net", option(CopyBiasInit=None)),
    "balance method mean": ("net", option(CLEBalanceMethod="mean")),
    "dedicated pairs": ("net", option(DedicatedQDQPair=True)),
    "weights only": ("net", option(WeightsOnly=True)),
    "overrides": (
        "net",
        preset(
            "A8W8",
            "c.extra_options['TensorQuantOverrides'] = {'a': [{'quant_type': ExtendedQuantType.QInt16}]}",
        ),
    ),
    "overrides of a tensor that is not there": (
        "net",
        preset(
            "A8W8",
            "c.extra_options['TensorQuantOverrides'] = {'q': [{'quant_type': ExtendedQuantType.QInt16}]}",
        ),
    ),
    "AdaRound": (
        "net",
        preset(
            "A8W8",
            "c.include_fast_ft = True",
            f"c.extra_options['FastFinetune'] = {TUNE % ('adaround', 0.1, '')}",
        ),
    ),
    "AdaQuant": (
        "net",
        preset(
            "A8W8",
            "c.include_fast_ft = True",
            f"c.extra_options['FastFinetune'] = {TUNE % ('adaquant', 1e-5, '')}",
        ),
    ),
    "AdaRound on cuda:0": (
        "net",
        preset(
            "A8W8",
            "c.include_fast_ft = True",
            "c.extra_options['FastFinetune'] = "
            + TUNE % ("adaround", 0.1, ", 'OptimDevice': 'cuda:0', 'InferDevice': 'cuda:0'"),
        ),
    ),
    "BF16 as casts": ("net", preset("BF16", "c.extra_options['BF16QDQToCast'] = True")),
    "BF16 for Vaiml": ("net", preset("BF16", "c.extra_options['EnableVaimlBF16'] = True")),
    "BF16 by hand, CLE": (
        "net",
        by_hand(
            "quant_format=ExtendedQuantFormat.QDQ, activation_type=ExtendedQuantType.QBFloat16, "
            "weight_type=ExtendedQuantType.QBFloat16, include_cle=True"
        ),
    ),
    "operator format": (
        "net",
        by_hand("quant_format=QuantFormat.QOperator, activation_type=QuantType.QUInt8"),
    ),
    "QConfig A8W8": ("net", newer(f"global_config={_EIGHT}")),
    "QConfig XINT8": (
        "net",
        newer("global_config=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())"),
    ),
    "QConfig uint16, per channel": (
        "net",
        newer(
            "global_config=QLayerConfig(input_tensors=UInt16Spec(), "
            "weight=Int8Spec(quant_granularity=QuantGranularity.Channel))"
        ),
    ),
    "QConfig BF16": (
        "net",
        newer("global_config=QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec())"),
    ),
    "QConfig BFP16": (
        "net",
        newer("global_config=QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec())"),
    ),
    "QConfig, activation=": (
        "net",
        newer("global_config=QLayerConfig(activation=Int8Spec(), weight=Int8Spec())"),
    ),
    "QConfig, a layer apart": (
        "net",
        newer(
            f"global_config={_EIGHT}, specific_layer_config="
            "{QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec()): ['head']}"
        ),
    ),
    "QConfig, a type in float": (
        "net",
        newer(f"global_config={_EIGHT}, layer_type_config={{None: ['Gemm']}}"),
    ),
    "QConfig, CLE": ("net", newer(f"global_config={_EIGHT}, algo_config=[CLEConfig(cle_steps=2)]")),
    "QConfig, SmoothQuant": (
        "mat",
        newer(f"global_config={_EIGHT}, algo_config=[SmoothQuantConfig(alpha=0.6)]"),
    ),
    "QConfig, GPTQ": ("mat", newer(f"global_config={_EIGHT}, algo_config=[GPTQConfig()]")),
    "QConfig, GPTQ on convolutions": ("net", newer(f"global_config={_EIGHT}, algo_config=[GPTQConfig()]")),
    "QConfig, bias correction": (
        "net",
        newer(f"global_config={_EIGHT}, algo_config=[BiasCorrectionConfig()]"),
    ),
    "QConfig written down and read": (
        "net",
        NEW + f"config = QConfig.from_dict(QConfig(global_config={_EIGHT}, exclude=['head']).to_dict())",
    ),
    "QConfig, mixed precision": (
        "net",
        newer(
            "global_config=QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec()), "
            f"algo_config=[AutoMixprecisionConfig(target_layer_config={_EIGHT})]"
        ),
    ),
}


def network(kind: str) -> onnx.ModelProto:
    """The float model."""
    generator = np.random.default_rng(0)

    def constant(name: str, *shape: int, scale: float = 0.3) -> TensorProto:
        return numpy_helper.from_array(generator.normal(0, scale, shape).astype(np.float32), name)

    if kind == "net":
        nodes = [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], name="stem", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("Conv", ["r", "k"], ["d"], name="block", pads=[1, 1, 1, 1]),
            helper.make_node("Add", ["d", "r"], ["a"], name="sum"),
            helper.make_node("GlobalAveragePool", ["a"], ["p"], name="pool"),
            helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
            helper.make_node("Gemm", ["f", "l", "m"], ["y"], name="head", transB=1),
        ]
        weights = [constant("w", 16, 3, 3, 3), constant("b", 16), constant("k", 16, 16, 3, 3, scale=0.1)]
        weights += [constant("l", 10, 16), constant("m", 10)]
        shape = [1, 10]
    else:
        nodes = [
            helper.make_node("LayerNormalization", ["x", "g", "h"], ["n"], name="norm"),
            helper.make_node("MatMul", ["n", "w"], ["c"], name="first"),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("MatMul", ["r", "k"], ["d"], name="second"),
            helper.make_node("Add", ["d", "x"], ["y"], name="sum"),
        ]
        weights = [constant("g", 32), constant("h", 32), constant("w", 32, 64), constant("k", 64, 32)]
        shape = [1, 8, 32]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPES[kind])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, kind, inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def samples(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Random ones."""
    generator = np.random.default_rng(seed)
    return [{"x": generator.normal(0, 1, SHAPES[kind]).astype(np.float32)} for _ in range(count)]


class Reader:
    """Hands out samples, then None."""

    def __init__(self, kind: str) -> None:
        self._left = iter(samples(kind, 16, 1))

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)


def sqnr(kind: str, source: str, made: str) -> float:
    """In dB, over samples that calibration has not seen."""
    from quark.onnx import get_library_path

    options = ort.SessionOptions()
    with contextlib.suppress(Exception):
        options.register_custom_ops_library(get_library_path("CPU"))
    before = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    after = ort.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    last = after.get_inputs()[0].shape != before.get_inputs()[0].shape
    signal = noise = 0.0
    for feed in samples(kind, 8, 2):
        turned = {"x": feed["x"].transpose(0, 2, 3, 1)} if last else feed
        a, b = before.run(None, feed)[0].astype(float), after.run(None, turned)[0].astype(float)
        signal, noise = signal + float((a**2).sum()), noise + float(((a - b) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def one(name: str) -> dict[str, Any]:
    """Run a fragment: outcome, seconds, and the SQNR where a model was written."""
    kind, code = FRAGMENTS[name]
    from quark.onnx import ModelQuantizer

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        onnx.save(network(kind), "in.onnx")
        start = time.perf_counter()
        try:
            room: dict[str, Any] = {}
            exec(compile(code, name, "exec"), room)
            ModelQuantizer(room["config"]).quantize_model("in.onnx", "out.onnx", Reader(kind))
            took = time.perf_counter() - start
            if not Path("out.onnx").exists():
                return {"outcome": "no file", "seconds": took}
            return {"outcome": "ok", "seconds": took, "sqnr": sqnr(kind, "in.onnx", "out.onnx")}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
            words = str(error).strip().splitlines() or [""]
            return {
                "outcome": f"{type(error).__name__}: {words[0][:90]}",
                "seconds": time.perf_counter() - start,
            }


def table(reference: dict[str, Any], ours: dict[str, Any]) -> str:
    """In Markdown."""
    rows = ["| fragment | Quark 0.13 | Roundel |", "|---|---|---|"]
    for name in FRAGMENTS:
        cells = []
        for side in (reference.get(name), ours.get(name)):
            if side is None:
                cells.append("not run")
            elif side["outcome"] == "ok":
                cells.append(f"{side['sqnr']:.1f} dB, {side['seconds']:.1f} s")
            else:
                cells.append(side["outcome"].replace("|", "/"))
        rows.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def main(words: list[str]) -> None:
    """Run, or print the table."""
    if words[0] == "table":
        both = [json.loads(Path(path).read_text(encoding="utf-8")) for path in words[1:3]]
        sys.stdout.write(
            f"# Fragments of scripts under both\n\n{(__doc__ or '').split(chr(10) * 2)[-1].strip()}\n\n"
        )
        sys.stdout.write(table(*both) + "\n")
        return
    target, limit = Path(words[1]), float(words[2]) if len(words) > 2 else math.inf
    found = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    start = time.perf_counter()
    for name in FRAGMENTS:
        if name in found or time.perf_counter() - start > limit:
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found[name] = one(name)
        target.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.write(f"{len(found)} of {len(FRAGMENTS)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
