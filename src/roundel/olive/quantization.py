"""The pass: an ONNX model and a data config in, a quantized ONNX model out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx
from olive.common.config_utils import validate_config
from olive.data.config import DataConfig
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.onnx.common import get_external_data_config, model_proto_to_olive_model
from olive.passes.pass_config import PassConfigParam

from roundel.data import RandomSpec
from roundel.pipeline import quantize

_FIELDS: dict[str, tuple[Any, Any, str]] = {
    "preset": (str, "a8w8", "A preset of Roundel: xint8, a8w8, a16w8, bf16 …; see `roundel presets`."),
    "recipe": (dict | None, None, "Recipe values that differ from the preset's, nested or with dots."),
    "effort": (str | None, None, "none (calibration only), fast or high; the preset's own by default."),
    "device": (str | None, None, "The NPU it is for: phx, stx, krk …"),
    "exclude": (list | None, None, "Nodes that stay float: names, globs, 're:REGEX' or 'op:TYPE'."),
    "samples": (int | None, None, "Use at most this many samples."),
    "data_config": (DataConfig | dict | None, None, "Calibration data; random values without any."),
}


class RoundelQuantization(Pass):  # type: ignore[misc]
    """Quantize an ONNX model for AMD's NPUs with Roundel."""

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, Any]:
        own = {
            name: PassConfigParam(type_=kind, default_value=usual, description=words)
            for name, (kind, usual, words) in _FIELDS.items()
        }
        return {**own, **get_external_data_config()}

    def _run_for_config(
        self, model: ONNXModelHandler, config: Any, output_model_path: str
    ) -> ONNXModelHandler:
        target = resolve_onnx_path(output_model_path, Path(model.model_path).name)
        with tempfile.TemporaryDirectory(prefix="roundel_olive") as folder:
            made = Path(folder) / Path(target).name
            quantize(
                model.model_path,
                made,
                preset=config.preset,
                data=_data(config.data_config),
                changes=_changes(config),
                effort=config.effort,
                device=config.device,
                exclude=config.exclude or (),
            )
            proto = onnx.load(made)
            record = made.with_suffix(".json").read_bytes()
        handler = model_proto_to_olive_model(proto, target, config)
        Path(handler.model_path).with_suffix(".json").write_bytes(record)
        return handler


def _changes(config: Any) -> dict[str, Any]:
    samples = {} if config.samples is None else {"data.samples": config.samples}
    return {**samples, **(config.recipe or {})}


def _data(config: Any) -> object:
    if config is None:
        return RandomSpec()
    return validate_config(config, DataConfig).to_data_container().create_calibration_dataloader()
