"""The custom-operator library that Roundel's models do not need.

Scripts register it all the same before they open a model. `get_library_path` therefore hands out the path of
a file that stands for "nothing to register", and importing this module teaches the process's `SessionOptions`
to take it for that. It must be the import: in `options.register_custom_ops_library(get_library_path())` the
method is looked up before `get_library_path` is called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from rich.console import Console

from roundel.data import open_samples
from roundel.model.graph import input_specs
from roundel.model.load import load_model
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness
from roundel.qdq.names import QUARK
from roundel.qdq.read import is_quantize
from roundel.quark.errors import QuarkConfigError, QuarkDataError, expected_names
from roundel.quark.readers import random_spec
from roundel.result import QuantizeResult

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
        raise QuarkConfigError(
            "There is no such device.", observed=device, **expected_names(str(device), _DEVICES)
        )
    return str(_MARKER)


def register_custom_ops_library(session_options: ort.SessionOptions, device: str = "CPU") -> None:
    """Register what `get_library_path` names."""
    session_options.register_custom_ops_library(get_library_path(device))


def create_infer_session_for_onnx_model(
    model_input: str | Path | onnx.ModelProto,
    sess_options: ort.SessionOptions | None = None,
    providers: list[str] | None = None,
) -> ort.InferenceSession:
    """A plain ONNX Runtime session."""
    source = model_input.SerializeToString() if isinstance(model_input, onnx.ModelProto) else str(model_input)
    return ort.InferenceSession(source, sess_options, providers=providers or ["CPUExecutionProvider"])


def _accept_marker() -> None:
    """For this process: registering the marker does nothing, anything else is as before."""
    register = ort.SessionOptions.register_custom_ops_library

    def register_custom_ops_library(self: Any, path: Any) -> None:
        if not _is_marker(path):
            register(self, path)

    register_custom_ops_library.__doc__ = register.__doc__
    ort.SessionOptions.register_custom_ops_library = register_custom_ops_library


def _is_marker(path: Any) -> bool:
    try:
        return Path(path).samefile(_MARKER)
    except (OSError, TypeError, ValueError):  # no path, or no such file: ONNX Runtime says so better
        return False


_accept_marker()


def dump_model(
    model_input: str | Path | onnx.ModelProto,
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
    for name, array in _run(model, dump_data_reader, random_data_reader_input_shape).items():
        if name in wanted:
            _write(folder / _safe(wanted[name]), array)
        elif dump_float and array.dtype.kind == "f":
            _write(folder / f"{_safe(name)}_float", array)


def _run(model: ir.Model, reader: Any, shapes: Mapping[str, Sequence[int]] | None) -> dict[str, NDArray[Any]]:
    random = random_spec(shapes) if reader is None else None
    sample = next(iter(open_samples(reader, input_specs(model), random=random)), None)
    if sample is None:
        raise QuarkDataError("The reader gives no sample.", expected="at least one")
    session = open_session(model, simulate=True)
    names = [out.name for out in session.get_outputs()]
    return dict(zip(names, session.run(None, sample), strict=True))


def _safe(name: str) -> str:
    return name.replace("/", "_").replace(":", "_")


def _write(path: Path, array: NDArray[Any]) -> None:
    flat = array.reshape(-1)
    flat.tofile(path.with_name(f"{path.name}.bin"))
    np.savetxt(path.with_name(f"{path.name}.txt"), flat, fmt="%d" if flat.dtype.kind in "iu" else "%.9g")


def show_evaluation(
    console: Console, source: str | Path | onnx.ModelProto, result: QuantizeResult, data: object
) -> None:
    """Print how far the first outputs are apart; without a reader, the verification has done so already."""
    if data is None:
        console.print("EvalMetrics: see 'against the float model' above; EvalDataReader gives other samples")
        return
    before = load_model(source).model
    sessions = open_session(before), open_session(result.ir)
    found = []
    for sample in open_samples(data, input_specs(before)):
        one, other = (session.run([session.get_outputs()[0].name], sample)[0] for session in sessions)
        found.append(Closeness.of(one, other))
    cosines = [pair.cosine for pair in found] or [math.nan]
    lengths = [math.sqrt(pair.noise) for pair in found] or [math.nan]
    console.print(
        f"first output over {len(found)} samples: "
        f"cosine mean {sum(cosines) / len(cosines):.6f}, min {min(cosines):.6f}; "
        f"L2 mean {sum(lengths) / len(lengths):.6g}, max {max(lengths):.6g}",
        highlight=False,
    )


Function = TypeVar("Function", bound=Callable[..., Any])


class ScreenLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger by name; nothing is configured, the script decides."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})


def log_errors(function: Function) -> Function:
    """The function itself: errors are raised, which is where they are seen."""
    return function
