"""Histograms of weights and of activations, as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from roundel.data import open_samples
from roundel.errors import ModelError, OutputError
from roundel.model.graph import input_specs
from roundel.model.session import open_session
from roundel.passes import refresh_shapes
from roundel.quark.tools.files import read_model
from roundel.quark.tools.tool import Parameter, Tool
from roundel.quark.tools.wiring import LAYERS, is_dequantize, stored_values

_WIDTH, _HEIGHT, _MARGIN = 640, 400, 40
_BINS = 128
_CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1}


def picture(values: NDArray[Any], title: str) -> Image.Image:
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
    words = (
        f"{finite.size} values, mean {finite.mean():.5g}, deviation {finite.std():.5g}" if finite.size else ""
    )
    draw.text((_MARGIN, 8), title[:90], fill="black")
    draw.text((_MARGIN, 22), words, fill="black")
    return image


def weights(model: ir.Model, *, per_channel: bool = False) -> Iterator[tuple[str, NDArray[Any]]]:
    """Weights of layers by name, as the model uses them; each output channel by itself when asked for."""
    for node in model.graph:
        if node.op_type not in (*LAYERS, "MatMul") or len(node.inputs) < 2:
            continue
        value = node.inputs[1]
        maker = value.producer() if value is not None else None
        array = stored_values(maker) if maker is not None and is_dequantize(maker) else None
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


def tensors(model: ir.Model, data: object) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every float tensor's values over all samples, by name."""
    result = model.clone()
    refresh_shapes(result)
    shown = {str(v.name): v for node in result.graph for v in node.outputs if v.dtype is ir.DataType.FLOAT}
    result.graph.outputs.extend(v for v in shown.values() if not v.is_graph_output())
    session = open_session(result)
    names = [out.name for out in session.get_outputs()]
    specs = input_specs(result)
    gathered: dict[str, list[NDArray[Any]]] = {}
    for sample in open_samples(data, specs):
        pairs = [*sample.items(), *zip(names, session.run(None, sample), strict=True)]
        for name, array in pairs:
            if np.asarray(array).dtype.kind == "f":
                gathered.setdefault(name, []).append(np.asarray(array).reshape(-1))
    for name, parts in gathered.items():
        yield name, np.concatenate(parts)


def _save(found: Sequence[tuple[str, NDArray[Any]]], folder: str, what: str) -> str:
    if not found:
        raise ModelError(f"The model has no {what}.")
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("The folder cannot be made.", where=place, observed=error.strerror) from error
    for name, array in found:
        picture(array, name).save(place / f"{_safe(name)}.png")
    return f"wrote {len(found)} histograms\n{place}"


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:150]


def _save_weights(source: str, target: str, perchannel: bool) -> str:
    return _save(
        list(weights(read_model(source), per_channel=perchannel)), target, "layer with constant weights"
    )


def _save_tensors(source: str, data: str, target: str) -> str:
    return _save(list(tensors(read_model(source), data)), target, "float tensor")


_MODEL = Parameter("source", "the ONNX model", ("--input_model", "--input", "--input_model_path"))

HISTOGRAM_TOOLS = (
    Tool(
        "save_weights_hist",
        "Pictures of how the weights of each layer are distributed.",
        _save_weights,
        (
            _MODEL,
            Parameter(
                "target", "the folder to write into", ("--output", "--output_path"), default="weights_hist"
            ),
            Parameter(
                "perchannel",
                "one picture for each output channel",
                ("--perchannel", "--per_channel"),
                default=False,
                positional=False,
                switch=True,
            ),
        ),
    ),
    Tool(
        "save_tensor_hist",
        "Pictures of how the values of each tensor are distributed over data.",
        _save_tensors,
        (
            _MODEL,
            Parameter("data", "a folder of images, .npy or .npz files", ("--data_path", "--data")),
            Parameter(
                "target", "the folder to write into", ("--output_path", "--output"), default="tensor_hist"
            ),
        ),
    ),
)
