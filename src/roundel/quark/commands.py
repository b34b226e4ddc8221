"""`quark-cli`: its command for ONNX models; the others say what to do instead."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundel.errors import RoundelError
from roundel.quark.config import Config, QuantizationConfig
from roundel.quark.enums import CalibrationMethod, LayerWiseMethod
from roundel.quark.errors import QuarkConfigError
from roundel.quark.presets import DEFAULT_ADAQUANT_PARAMS, DEFAULT_ADAROUND_PARAMS, get_default_config
from roundel.quark.quantizer import ModelQuantizer

_ELSEWHERE = {
    "onnx-autosearch": "roundel auto MODEL --data FOLDER",
    "onnx-validate": "roundel evaluate MODEL --data FOLDER",
    "onnx-prepare-data": "roundel lint-data MODEL --data FOLDER, on a folder of images or arrays",
    "shapeshifter": "roundel tools, or the options of a recipe under `prepare`",
    "onnx-adapter": "roundel tools, or the options of a recipe under `prepare`",
    "export-onnx": "torch.onnx.export, or roundel quantize MODULE.pt2",
    "export-oga": "onnxruntime-genai's model builder",
    "torch-llm-ptq": "AMD Quark: PyTorch models of languages are not Roundel's",
    "torch-mixed-precision": "AMD Quark: PyTorch models of languages are not Roundel's",
}
# ImageNet's, as the original's reader has them.
_PICTURES = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_SAMPLES, _SIDE = 1000, 224


def main(raw_args: Sequence[str] | None = None) -> None:
    """The command line of this process, or the given one; ends the process where something is wrong."""
    status = run(list(sys.argv[1:] if raw_args is None else raw_args))
    if status:
        sys.exit(status)


def run(arguments: list[str]) -> int:
    """Do what the words after `quark-cli` say; returns the exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("", "-h", "--help"):
        sys.stdout.write("usage: quark-cli onnx-ptq --input_model_path MODEL [ARGUMENT …]\n")
        return 0 if name else 2
    try:
        if name != "onnx-ptq":
            what = f"quark-cli {name} is not Roundel's."
            if name in _ELSEWHERE:
                raise QuarkConfigError(what, hint=f"Use {_ELSEWHERE[name]}.")
            raise QuarkConfigError.unknown(what, name, ("onnx-ptq", *_ELSEWHERE))
        _quantize(_parser().parse_args(rest))
    except RoundelError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quark-cli onnx-ptq", allow_abbrev=False)
    parser.add_argument("--input_model_path", required=True)
    parser.add_argument("--output_model_path", default="quantized.onnx")
    parser.add_argument("--config", default="XINT8", help="a preset's name")
    parser.add_argument(
        "--calib_data_path", "--calibration_dataset_path", help="a folder of images or arrays"
    )
    parser.add_argument("--num_calib_data", type=int, default=_SAMPLES)
    parser.add_argument("--calib_image_dim", type=int, default=_SIDE)
    parser.add_argument("--calib_method", default="", help="minmax, percentile, percentile+99.9 …")
    parser.add_argument("--exclude_nodes", default="", help="separated by ;")
    parser.add_argument("--exclude_subgraphs", default="", help="([start, …], [end, …]); …")
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--num_iters", type=int)
    parser.add_argument("--sq_alpha", type=float, default=0.5)
    parser.add_argument("--hidden_size", type=int, default=4096)
    parser.add_argument("--num_head", type=int, default=32, help="of no effect: heads are found in the graph")
    parser.add_argument("--r_config_path", default="")
    for flag in ("adaround", "adaquant", "include_sq", "include_rotation", "use_random_had", "use_gptq"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--cle", "--include_cle", action="store_true")
    for flag in ("use_moving_average", "save_as_external_data", "use_crypto"):
        parser.add_argument(f"--{flag}", action="store_true")
    for flag in ("auto_search_config", "calib_dataset_name", "device", "model_name", "batch_size", "workers"):
        parser.add_argument(f"--{flag}", default=None, help="of no effect here")
    return parser


def _quantize(asked: argparse.Namespace) -> None:
    if asked.calib_dataset_name:
        raise QuarkConfigError(
            "Data sets are not downloaded.",
            where="--calib_dataset_name",
            observed=asked.calib_dataset_name,
            hint="Give a folder of arrays: --calib_data_path FOLDER.",
        )
    config = get_default_config(asked.config)
    options = config.extra_options
    config.crypto_mode, config.use_external_data_format = asked.use_crypto, asked.save_as_external_data
    config.include_cle = asked.cle and not asked.include_rotation
    config.include_sq, config.include_rotation = asked.include_sq, asked.include_rotation
    config.nodes_to_exclude = [name.strip() for name in asked.exclude_nodes.split(";") if name.strip()]
    config.subgraphs_to_exclude = _subgraphs(asked.exclude_subgraphs)
    options["OpTypesToExcludeOutputQuantization"] = ["MatMul", "Gemm"]
    options["CalibDataSize"] = asked.num_calib_data
    if asked.include_sq:
        options["SmoothAlpha"] = asked.sq_alpha
    if asked.use_gptq:
        options["UseGPTQ"] = True
    if asked.use_moving_average:
        options["CalibMovingAverage"] = True
    _tune(config, asked)
    _method(config, asked.calib_method)
    data = None
    if asked.calib_data_path is None:
        options.setdefault("UseRandomData", True)
    else:
        data = asked.calib_data_path
        options["Recipe"] = {"data": _pictures(data, asked.calib_image_dim)}
    ModelQuantizer(Config(config)).quantize_model(
        asked.input_model_path, asked.output_model_path, calibration_data_path=data
    )


def _pictures(folder: str, side: int) -> dict[str, Any]:
    """How images become input; arrays are input already."""
    images = any(file.suffix.lower() not in (".npy", ".npz") for file in Path(folder).rglob("*.*"))
    return {**_PICTURES, "resize": side, "crop": side} if images else {}


def _subgraphs(text: str) -> list[Any]:
    from roundel.quark.tools import subgraphs  # the tools quantize, too

    return subgraphs(text)


def _tune(config: QuantizationConfig, asked: argparse.Namespace) -> None:
    if not (asked.adaround or asked.adaquant):
        return
    usual = DEFAULT_ADAQUANT_PARAMS if asked.adaquant else DEFAULT_ADAROUND_PARAMS
    given = {"LearningRate": asked.learning_rate, "NumIterations": asked.num_iters}
    config.include_fast_ft = True
    config.extra_options["FastFinetune"] = {**usual, **{k: v for k, v in given.items() if v is not None}}


def _method(config: QuantizationConfig, words: str) -> None:
    name, _, share = words.partition("+")
    known: dict[str, Any] = {
        "minmax": CalibrationMethod.MinMax,
        "percentile": CalibrationMethod.Percentile,
        "layerwise_percentile": LayerWiseMethod.LayerWisePercentile,
    }
    if not name:
        return
    if name not in known:
        raise QuarkConfigError.unknown(f"There is no method '{name}'.", name, known, where="--calib_method")
    config.calibrate_method = known[name]
    if share:
        config.extra_options["Percentile"] = float(share)
