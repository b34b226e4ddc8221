"""ModelQuantizer and its functional forms: translate, then run Roundel's pipeline."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from roundel.model.files import save_model
from roundel.outputs import model_targets, refuse_overwriting
from roundel.pipeline import quantize
from roundel.quark.config import Config, QuantizationConfig
from roundel.quark.enums import CalibrationMethod, QuantFormat, QuantType
from roundel.quark.errors import QuarkConfigError, QuarkDataError, QuarkModelMissingError
from roundel.quark.qconfig import QConfig, check_config
from roundel.quark.request import INTEGERS
from roundel.quark.runtime import Model, channels_last, random_spec, show_evaluation
from roundel.quark.specs import AlgoConfig
from roundel.quark.translate import Translation, translate
from roundel.report.console import show_plan, show_summary, terminal
from roundel.report.progress import listener_of
from roundel.result import QuantizeResult


class ModelQuantizer:
    """Quantizes float models as a config says.

    Args:
        config: a `Config` or a `QConfig`. It is copied when a model is quantized and never changed.

    Raises:
        QuarkConfigError: it is of another kind.
    """

    def __init__(self, config: Config | QConfig) -> None:
        check_config(config, Config, QConfig)
        self.config: Config | QConfig = config

    def quantize_model(
        self,
        model_input: Model,
        model_output: str | Path | None = None,
        calibration_data_reader: object = None,
        calibration_data_path: str | Path | None = None,
        algorithms: list[AlgoConfig] | None = None,
    ) -> onnx.ModelProto | None:
        """Quantize, verify and save a model.

        Args:
            model_input: a file or a model; neither is changed.
            model_output: the file to write; None returns the model instead.
            calibration_data_reader: anything with `get_next()`, or any iterable of samples.
            calibration_data_path: a folder of .npy files instead of a reader.
            algorithms: further algorithms, for a classic config.

        Returns:
            The model when there is no `model_output`, else None.

        Raises:
            RoundelError: something is wrong with the config, the model or the data; nothing was written.
        """
        if isinstance(model_input, str | Path) and not Path(model_input).exists():
            what = "The model file does not exist."
            raise QuarkModelMissingError(what, where=model_input, hint="Check the path.")
        told = translate(self.config, model_input, algorithms or ())
        if told.operators and model_output is not None:
            refuse_overwriting(model_targets(model_output), {"input model": model_input})
        data = _data(told, calibration_data_reader, calibration_data_path)
        if data is None and told.recipe.mode == "static":
            told = told.without_data()
        if told.recipe.prepare.nchw_to_nhwc and data is not None:  # which stays in the float model's layout
            data = channels_last(data, model_input, told.recipe.data.samples)
        with _temporary_folder(told.run.get("temporary_folder")):
            result = quantize(
                model_input,
                None if told.operators else model_output,
                recipe=told.recipe,
                data=data,
                stats=told.run.get("statistics"),
                listener=listener_of(terminal(stderr=True)) if told.config.print_summary else None,
            )
        model, notes = (result.model, told.notes) if not told.operators else _as_operators(result, told)
        _report(model_input, result, replace(told, notes=notes))
        if told.operators and model_output is not None:
            save_model(model, Path(model_output), external_data=told.config.use_external_data_format)
        if model_output is not None:
            return None
        return model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)


def _as_operators(result: QuantizeResult, told: Translation) -> tuple[ir.Model, tuple[str, ...]]:
    """The model with QLinear operators, as quant_format=QOperator asks for."""
    from roundel.quark.tools.operators import convert_qdq_to_qop  # the tools quantize, too

    model, done = convert_qdq_to_qop(result.ir)
    said = (
        f"QOperator: {done} in place of their pairs; what has none keeps its pairs, and no record is written"
    )
    return model, (*told.notes, said)


def _report(source: Model, result: QuantizeResult, told: Translation) -> None:
    console = terminal()
    if told.config.print_summary:
        show_summary(console, result.record)
        for note in told.notes:
            console.print(f"note: {note}", highlight=False, markup=False)
    if told.config.debug_mode:
        show_plan(console, result.plan)
    if "evaluate" in told.run:
        show_evaluation(console, source, result, told.run.get("evaluation_data"))


def _data(told: Translation, reader: object, folder: str | Path | None) -> object:
    """The reader, else the folder, else random samples where the config allows them."""
    if reader is not None:
        return reader
    if folder is not None:
        return folder
    if told.run.get("random_data"):
        return random_spec(told.run.get("random_shapes"), told.run.get("random_ranges"))
    moving = told.recipe.activations
    learns = told.recipe.finetuning != "none" or told.config.extra_options.get("BiasCorrection")
    calibrated = moving.type in INTEGERS or moving.scaled or learns
    if told.recipe.mode == "static" and calibrated:
        raise QuarkDataError(
            "There is no calibration data.",
            expected="calibration_data_reader or calibration_data_path",
            hint="For a first look set extra_options={'UseRandomData': True}.",
        )
    return None


@contextmanager
def _temporary_folder(folder: str | Path | None) -> Iterator[None]:
    """Let temporary files of this run lie in a folder of the user's choice."""
    if folder is None:
        yield
        return
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def quantize_static(
    model_input: Model,
    model_output: str | Path | None = None,
    calibration_data_reader: object = None,
    calibration_data_path: str | Path | None = None,
    quant_format: Any = QuantFormat.QDQ,
    calibrate_method: Any = CalibrationMethod.MinMax,
    input_nodes: list[str] | None = None,
    output_nodes: list[str] | None = None,
    op_types_to_quantize: list[str] | None = None,
    extra_op_types_to_quantize: list[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = QuantType.QInt8,
    weight_type: Any = QuantType.QInt8,
    **settings: Any,
) -> onnx.ModelProto | None:
    """Quantize with calibration data: `QuantizationConfig` and `ModelQuantizer` in one call.

    The arguments are the fields of `QuantizationConfig`; `enable_dpu` is the old name of `enable_npu_cnn`.
    """
    config = _config(
        settings,
        quant_format=quant_format,
        calibrate_method=calibrate_method,
        input_nodes=input_nodes or [],
        output_nodes=output_nodes or [],
        op_types_to_quantize=op_types_to_quantize or [],
        extra_op_types_to_quantize=extra_op_types_to_quantize or [],
        per_channel=per_channel,
        reduce_range=reduce_range,
        activation_type=activation_type,
        weight_type=weight_type,
    )
    return ModelQuantizer(Config(config)).quantize_model(
        model_input, model_output, calibration_data_reader, calibration_data_path
    )


def quantize_dynamic(
    model_input: Model,
    model_output: str | Path | None = None,
    op_types_to_quantize: list[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: list[str] | None = None,
    nodes_to_exclude: list[str] | None = None,
    **settings: Any,
) -> onnx.ModelProto | None:
    """Quantize weights; activations are measured when the model runs, so no data is needed."""
    config = _config(
        settings,
        op_types_to_quantize=op_types_to_quantize or [],
        per_channel=per_channel,
        reduce_range=reduce_range,
        weight_type=weight_type,
        nodes_to_quantize=nodes_to_quantize or [],
        nodes_to_exclude=nodes_to_exclude or [],
        use_dynamic_quant=True,
    )
    return ModelQuantizer(Config(config)).quantize_model(model_input, model_output)


def _config(settings: Mapping[str, Any], **known: Any) -> QuantizationConfig:
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        return QuantizationConfig(**known, **given)
    except TypeError as error:
        raise QuarkConfigError("An argument is not known.", observed=error) from error
