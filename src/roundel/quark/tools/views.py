"""Models to look at: histograms, text, lists of layers, and folders of results side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from PIL import Image, ImageDraw

from roundel.data import open_samples
from roundel.errors import ModelError, OutputError
from roundel.measure.folders import evaluate_folders
from roundel.model.files import write_text
from roundel.model.graph import input_specs
from roundel.model.session import open_session
from roundel.passes import refresh_shapes
from roundel.qdq.read import BITS, read_quantizer, stored_values
from roundel.quark.tools import tool
from roundel.types import Array

_WIDTH, _HEIGHT, _MARGIN = 640, 400, 40
_BINS = 128
_CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1}


def picture(values: Array, title: str) -> Image.Image:
    """A bar chart of how often values occur, with their extremes, mean and deviation."""
    finite = np.asarray(values, np.float64).reshape(-1)
    finite = finite[np.isfinite(finite)]
    counts, _ = np.histogram(finite, _BINS) if finite.size else (np.zeros(_BINS, int), None)
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    bottom, top = _HEIGHT - _MARGIN, _MARGIN
    step = (_WIDTH - 2 * _MARGIN) / _BINS
    for index, count in enumerate(counts):
        height = (bottom - top) * count / max(int(counts.max()), 1)
        left = _MARGIN + index * step
        if count:
            draw.rectangle((left, bottom - max(height, 1), left + max(step - 1, 1), bottom), fill="#4060a0")
    draw.line((_MARGIN, bottom, _WIDTH - _MARGIN, bottom), fill="black")
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    draw.text((_MARGIN, bottom + 8), f"{low:.5g}", fill="black")
    draw.text((_WIDTH - _MARGIN - 60, bottom + 8), f"{high:.5g}", fill="black")
    draw.text((_MARGIN, 8), title[:90], fill="black")
    if finite.size:
        words = f"{finite.size} values, mean {finite.mean():.5g}, deviation {finite.std():.5g}"
        draw.text((_MARGIN, 22), words, fill="black")
    return image


def weights(model: ir.Model, *, per_channel: bool = False) -> Iterator[tuple[str, Array]]:
    """Weights of layers by name, as the model uses them; each output channel by itself when asked for."""
    for node in model.graph:
        if node.op_type not in (*tool.LAYERS, "MatMul") or len(node.inputs) < 2:
            continue
        value = node.inputs[1]
        array = stored_values(tool.dequantizer(value))
        if array is None and value is not None and value.const_value is not None:
            array = np.asarray(value.const_value.numpy())
        if array is None or value is None:
            continue
        if not per_channel or array.ndim < 2:
            yield str(value.name), array
            continue
        axis = _CHANNEL_AXIS.get(node.op_type, array.ndim - 1)
        for index in range(array.shape[axis]):
            yield f"{value.name}_channel_{index}", np.take(array, index, axis)


def tensors(model: ir.Model, data: object) -> Iterator[tuple[str, Array]]:
    """Every float tensor's values over all samples, by name."""
    result = model.clone()
    refresh_shapes(result)
    shown = {str(v.name): v for node in result.graph for v in node.outputs if v.dtype is ir.DataType.FLOAT}
    result.graph.outputs.extend(v for v in shown.values() if not v.is_graph_output())
    session = open_session(result)
    names = [out.name for out in session.get_outputs()]
    specs = input_specs(result)
    gathered: dict[str, list[Array]] = {}
    for sample in open_samples(data, specs):
        pairs = [*sample.items(), *zip(names, session.run(None, sample), strict=True)]
        for name, array in pairs:
            if np.asarray(array).dtype.kind == "f":
                gathered.setdefault(name, []).append(np.asarray(array).reshape(-1))
    for name, parts in gathered.items():
        yield name, np.concatenate(parts)


def _save(found: Sequence[tuple[str, Array]], folder: str, what: str) -> str:
    if not found:
        raise ModelError(f"The model has no {what}.")
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("The folder cannot be made.", where=place, observed=error.strerror) from error
    for name, array in found:
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:150]
        picture(array, name).save(place / f"{plain}.png")
    return f"wrote {len(found)} histograms\n{place}"


def _save_weights(source: str, target: str, perchannel: bool) -> str:
    found = list(weights(tool.read_model(source), per_channel=perchannel))
    return _save(found, target, "layer with constant weights")


def _save_tensors(source: str, data: str, target: str) -> str:
    return _save(list(tensors(tool.read_model(source), data)), target, "float tensor")


_MODEL = tool.Parameter("source", "the ONNX model", ("--input_model", "--input", "--input_model_path"))


def _folder(default: str, *flags: str) -> tool.Parameter:
    return tool.Parameter("target", "the folder to write into", flags, default=default)


HISTOGRAM_TOOLS = (
    tool.Tool(
        "save_weights_hist",
        "Pictures of how the weights of each layer are distributed.",
        _save_weights,
        (
            _MODEL,
            _folder("weights_hist", "--output", "--output_path"),
            tool.switch("perchannel", "one picture for each output channel", "--perchannel", "--per_channel"),
        ),
    ),
    tool.Tool(
        "save_tensor_hist",
        "Pictures of how the values of each tensor are distributed over data.",
        _save_tensors,
        (
            _MODEL,
            tool.Parameter("data", "a folder of images, .npy or .npz files", ("--data_path", "--data")),
            _folder("tensor_hist", "--output_path", "--output"),
        ),
    ),
)


def a16w8_a8w8_nodes(model: ir.Model) -> tuple[list[str], list[str]]:
    """Names of Conv, ConvTranspose and Gemm nodes with 8-bit activations, and of those with 16-bit ones."""
    found: dict[int, list[str]] = {8: [], 16: []}
    for node in model.graph:
        maker = tool.dequantizer(node.inputs[0]) if node.op_type in tool.LAYERS else None
        said = read_quantizer(maker) if maker is not None else None
        bits = BITS.get(said.dtype) if said is not None else None
        if bits in found:
            found[bits].append(str(node.name))
    return found[8], found[16]


def _print(source: str) -> str:
    eight, sixteen = a16w8_a8w8_nodes(tool.read_model(source))
    lines = ["8-bit activations:", *eight, "16-bit activations:", *sixteen]
    return "\n".join([*lines, f"{len(eight)} layers with 8-bit, {len(sixteen)} with 16-bit activations"])


PRINT_NODES = tool.Tool(
    "print_a16w8_a8w8_nodes",
    "Lists the layers with 8-bit and with 16-bit activations.",
    _print,
    (tool.SOURCE,),
    {"a16w8_a8w8_nodes": lambda path: a16w8_a8w8_nodes(tool.read_model(path))},
)


def convert_onnx_to_onnxtxt(model: onnx.ModelProto) -> str:
    """The model in protobuf's text form."""
    return str(text_format.MessageToString(model))


def convert_onnxtxt_to_onnx(text: str) -> onnx.ModelProto:
    """The model that the text describes."""
    try:
        return text_format.Parse(text, onnx.ModelProto())  # type: ignore[no-any-return, unused-ignore]
    except text_format.ParseError as error:
        raise ModelError("The text is not a model.", observed=str(error)[:300]) from error


def _to_text(source: str, target: str) -> str:
    try:
        model = onnx.load(source)
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError("The model cannot be read.", where=source, observed=error) from error
    write_text(Path(target), convert_onnx_to_onnxtxt(model))
    return "wrote text"


def _to_model(source: str, target: str) -> str:
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError("The text file cannot be read.", where=source, observed=error) from error
    onnx.save(convert_onnxtxt_to_onnx(text), target)
    return "wrote a model"


TEXT_TOOLS = tuple(
    tool.from_file_to_file(export.__name__, summary, work, (tool.SOURCE, tool.TARGET), export)
    for export, summary, work in (
        (convert_onnx_to_onnxtxt, "A model as text that people can read and compare.", _to_text),
        (convert_onnxtxt_to_onnx, "A model from its text.", _to_model),
    )
)


_NAMES = {"cosine": "cosine similarity", "l2": "L2 distance", "psnr_db": "PSNR in dB", "ssim": "SSIM"}


def _evaluate(baseline: str, quantized: str) -> str:
    scores = evaluate_folders(baseline, quantized)
    lines = [
        f"{_NAMES.get(name, name)}: mean {summary.mean:.6g}, worst {summary.worst:.6g} ({summary.worst_file})"
        for name, summary in scores.metrics.items()
    ]
    return "\n".join([f"{len(scores.files)} files", *lines])


EVALUATE = tool.Tool(
    "evaluate",
    "Compares two folders of results (.npy, .png, .jpg): cosine, L2, PSNR, SSIM.",
    _evaluate,
    (
        tool.Parameter("baseline", "results of the float model", ("--baseline_results_folder", "--baseline")),
        tool.Parameter("quantized", "results of the other", ("--quantized_results_folder", "--quantized")),
    ),
    {"evaluate_folders": evaluate_folders},
)
