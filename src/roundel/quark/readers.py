"""Data readers that scripts use by name. Roundel itself takes any reader, iterable or folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import CalibrationDataReader

from roundel.data import RandomSpec, Samples, open_samples
from roundel.model.graph import input_specs
from roundel.model.load import load_model

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


class _SampleReader(CalibrationDataReader):  # type: ignore[misc]
    """Hands out samples one by one, and again after `reset_iter` or `rewind`."""

    def __init__(self, samples: Iterable[dict[str, NDArray[Any]]]) -> None:
        self._samples = samples
        self._left: Iterator[dict[str, NDArray[Any]]] | None = None

    def get_next(self) -> dict[str, NDArray[Any]] | None:
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
        super().__init__(open_samples(None, input_specs(load_model(model_input).model), random=spec))


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
        cache: list[dict[str, NDArray[Any]]] = []
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
    options = extra_options or {}
    return RandomDataReader(
        model_input,
        options.get("RandomDataReaderInputShape"),
        options.get("RandomDataReaderInputDataRange"),
    )
