"""The custom-operator library that Roundel's models do not need.

Scripts register it all the same before they open a model. `get_library_path` therefore hands out the path of
a file that stands for "nothing to register", and importing this module teaches the process's `SessionOptions`
to take it for that. It must be the import: in `options.register_custom_ops_library(get_library_path())` the
method is looked up before `get_library_path` is called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization.calibrate import CalibrationDataReader
from rich.console import Console

from roundel.data import RandomSpec, Samples, open_samples
from roundel.data.samples import Item, Source
from roundel.model.graph import input_specs
from roundel.model.load import load_model
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness
from roundel.qdq.nodes import QUARK
from roundel.qdq.read import is_quantize
from roundel.quark.errors import QuarkConfigError, QuarkDataError
from roundel.result import QuantizeResult
from roundel.types import InputSpec, Sample

Model = str | Path | onnx.ModelProto


def random_spec(
    shapes: Mapping[str, Sequence[int]] | None, ranges: Mapping[str, Sequence[float]] | None = None
) -> RandomSpec:
    """One random sample, with shapes and [low, high] by input name."""
    return RandomSpec(
        count=1,
        shapes={name: tuple(shape) for name, shape in (shapes or {}).items()},
        ranges={name: (low, high) for name, (low, high) in (ranges or {}).items()},
    )


def channels_last(data: object, model: Model, limit: int | None = None) -> Samples:
    """Data for the model as it is given, with the channels of images moved to the last axis.

    Args:
        data: whatever `open_samples` takes, in the layout of the float model.
        model: the float model.
        limit: the largest number of samples.
    """
    given = open_samples(data, input_specs(load_model(model).model), limit=limit)
    images = {spec.name for spec in given.inputs if spec.shape is not None and len(spec.shape) == 4}

    def items() -> Generator[Item, None, None]:
        for sample in given:
            yield Item({name: _turned(array) if name in images else array for name, array in sample.items()})

    facts = {key: value for key, value in given.description.items() if key in ("random", "seed")}
    source = Source("data with channels moved last", items, repeatable=given.repeatable, facts=facts)
    return Samples(source, [_turned_spec(spec) if spec.name in images else spec for spec in given.inputs])


def _turned(array: Any) -> Any:
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def _turned_spec(spec: InputSpec) -> InputSpec:
    assert spec.shape is not None, "only images are turned"
    batch, channels, *sides = spec.shape
    return replace(spec, shape=(batch, *sides, channels))


class _SampleReader(CalibrationDataReader):  # type: ignore[misc]
    """Hands out samples one by one, and again after `reset_iter` or `rewind`."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples
        self._left: Iterator[Sample] | None = None

    def get_next(self) -> Sample | None:
        """The next sample; None at the end."""
        if self._left is None:
            self._left = iter(self._samples)
        return next(self._left, None)

    def reset_iter(self) -> None:
        """Begin again."""
        self._left = None

    rewind = reset_iter

    def __len__(self) -> int:
        known = self._samples.count if isinstance(self._samples, Samples) else None
        return sum(1 for _ in self._samples) if known is None else known


class RandomDataReader(_SampleReader):
    """Random samples of the model's input shapes.

    Args:
        model_input: gives names, types and shapes.
        input_shape: shape by input name, where the model leaves it open.
        input_data_range: [low, high] by input name.
    """

    def __init__(
        self,
        model_input: Model,
        input_shape: Mapping[str, Sequence[int]] | None = None,
        input_data_range: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        spec = random_spec(input_shape, input_data_range)
        super().__init__(open_samples(spec, input_specs(load_model(model_input).model)))


class PathDataReader(_SampleReader):
    """Arrays from a folder: .npy files, in a sub-folder for each input where there are several inputs.

    Args:
        model_input: gives names, types and shapes, which every array is checked against.
        data_path: the folder.
        input_shape: not needed; the model's own shapes count.
    """

    def __init__(self, model_input: Model, data_path: str | Path, input_shape: Sequence[Any] = ()) -> None:
        super().__init__(open_samples(data_path, input_specs(load_model(model_input).model)))


class CachedDataReader(_SampleReader):
    """All samples of another reader in memory, to be read several times.

    Args:
        dr: the reader.
        data_size: keep at most this many.
        convert_nchw_to_nhwc: move the channels of 4-D samples to the last axis.
        quantize_fp16: hand out float32 samples as float16.
    """

    def __init__(
        self,
        dr: Any,
        data_size: int | None = None,
        convert_nchw_to_nhwc: bool = False,
        quantize_fp16: bool = False,
    ) -> None:
        cache: list[Sample] = []
        while (data_size is None or len(cache) < data_size) and (sample := dr.get_next()) is not None:
            arrays = {name: np.asarray(value) for name, value in sample.items()}
            if convert_nchw_to_nhwc:
                arrays = {n: a.transpose(0, 2, 3, 1) if a.ndim == 4 else a for n, a in arrays.items()}
            if quantize_fp16:
                arrays = {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in arrays.items()}
            cache.append(arrays)
        super().__init__(cache)


def get_data_reader(
    model_input: Model,
    calibration_data_reader: Any = None,
    calibration_data_path: str | Path | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> Any:
    """The reader, else one for the folder, else random samples."""
    if calibration_data_reader is not None:
        return calibration_data_reader
    if calibration_data_path is not None:
        return PathDataReader(model_input, calibration_data_path)
    given = (extra_options or {}).get
    shapes, ranges = given("RandomDataReaderInputShape"), given("RandomDataReaderInputDataRange")
    return RandomDataReader(model_input, shapes, ranges)


COP_DOMAIN = QUARK
COP_VERSION = 1
COP_QUANT_OP_NAME = "ExtendedQuantizeLinear"
COP_DEQUANT_OP_NAME = "ExtendedDequantizeLinear"
COP_IN_OP_NAME = "ExtendedInstanceNormalization"
COP_LSTM_OP_NAME = "ExtendedLSTM"
COP_BFP_OP_NAME = "BFPQuantizeDequantize"
COP_MX_OP_NAME = "MXQuantizeDequantize"

_MARKER = Path(__file__).with_name("no_custom_operators.txt")
_DEVICES = ("CPU", "CUDA", "GPU", "ROCM")


def get_library_path(device: str = "CPU", lib: str = "custom_ops") -> str:
    """A path that `SessionOptions.register_custom_ops_library` accepts.

    There is nothing to register: Roundel's models hold standard operators, or carry the definition of
    AMD's as model-local functions.

    Raises:
        QuarkConfigError: the device is none of those that scripts choose from.
    """
    if str(device).upper() not in _DEVICES:
        raise QuarkConfigError.unknown("There is no such device.", device, _DEVICES, observed=device)
    return str(_MARKER)


def register_custom_ops_library(session_options: ort.SessionOptions, device: str = "CPU") -> None:
    """Register what `get_library_path` names."""
    session_options.register_custom_ops_library(get_library_path(device))


def create_infer_session_for_onnx_model(
    model_input: Model,
    sess_options: ort.SessionOptions | None = None,
    providers: list[str] | None = None,
) -> ort.InferenceSession:
    """A plain ONNX Runtime session."""
    source = model_input.SerializeToString() if isinstance(model_input, onnx.ModelProto) else str(model_input)
    return ort.InferenceSession(source, sess_options, providers=providers or ["CPUExecutionProvider"])


def _accept_marker() -> None:
    """For this process: registering the marker does nothing, anything else is as before."""
    register = ort.SessionOptions.register_custom_ops_library

    @wraps(register)
    def register_custom_ops_library(self: Any, path: Any) -> None:
        try:
            marker = Path(path).samefile(_MARKER)
        except (OSError, TypeError, ValueError):  # no path, or no such file: ONNX Runtime says so better
            marker = False
        if not marker:
            register(self, path)

    ort.SessionOptions.register_custom_ops_library = register_custom_ops_library


_accept_marker()


def dump_model(
    model_input: Model,
    dump_data_reader: Any = None,
    random_data_reader_input_shape: Mapping[str, Sequence[int]] | None = None,
    dump_float: bool = False,
    output_dir: str | Path = "./dump_results",
) -> None:
    """Run one sample and write the codes of every quantized tensor: NAME.bin, and NAME.txt to be read.

    Args:
        model_input: the quantized model.
        dump_data_reader: gives the sample; random values without one.
        random_data_reader_input_shape: shapes by input name, for random values.
        dump_float: also write every float tensor, as NAME_float.bin and NAME_float.txt.
        output_dir: the folder to write into; made when it is not there.
    """
    model = load_model(model_input, allow_quantized=True).model
    wanted = {
        str(node.outputs[0].name): str(node.inputs[0].name if node.inputs[0] is not None else node.name)
        for node in model.graph
        if is_quantize(node)
    }
    seen = {str(v.name): v for node in model.graph for v in node.outputs if v.name}
    shown = [v for name, v in seen.items() if dump_float or name in wanted]
    model.graph.outputs.extend(v for v in shown if not v.is_graph_output())
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    source = random_spec(random_data_reader_input_shape) if dump_data_reader is None else dump_data_reader
    sample = next(iter(open_samples(source, input_specs(model))), None)
    if sample is None:
        raise QuarkDataError("The reader gives no sample.", expected="at least one")
    session = open_session(model, simulate=True)
    for out, array in zip(session.get_outputs(), session.run(None, sample), strict=True):
        if out.name not in wanted and not (dump_float and array.dtype.kind == "f"):
            continue
        name = wanted.get(out.name, f"{out.name}_float").replace("/", "_").replace(":", "_")
        flat = array.reshape(-1)
        flat.tofile(folder / f"{name}.bin")
        np.savetxt(folder / f"{name}.txt", flat, fmt="%d" if flat.dtype.kind in "iu" else "%.9g")


def show_evaluation(console: Console, source: Model, result: QuantizeResult, data: object) -> None:
    """Print how far the first outputs are apart; without a reader, the verification has done so already."""
    turned = bool(result.record.recipe["prepare"]["nchw_to_nhwc"])
    if data is None:
        words = "EvalMetrics: see 'against the float model' above; EvalDataReader gives other samples"
        console.print(words, highlight=True)
        return
    before = load_model(source).model
    sessions = open_session(before), open_session(result.ir)
    found = []
    for sample in open_samples(data, input_specs(before)):
        last = {n: _turned(a) if turned and a.ndim == 4 else a for n, a in sample.items()}
        one, other = (
            session.run([session.get_outputs()[0].name], feed)[0]
            for session, feed in zip(sessions, (sample, last), strict=True)
        )
        found.append(Closeness.of(_turned(one) if turned and one.ndim == 4 else one, other))
    cosines = [pair.cosine for pair in found] or [math.nan]
    lengths = [math.sqrt(pair.noise) for pair in found] or [math.nan]
    console.print(
        f"first output over {len(found)} samples: "
        f"cosine mean {sum(cosines) / len(cosines):.6f}, min {min(cosines):.6f}; "
        f"L2 mean {sum(lengths) / len(lengths):.6g}, max {max(lengths):.6g}"
    )


Function = TypeVar("Function", bound=Callable[..., Any])


class ScreenLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger by name; nothing is configured, the script decides."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})


def log_errors(function: Function) -> Function:
    """The function itself: errors are raised, which is where they are seen."""
    return function
