"""`roundel.infer`: run a model over data and save what it gives, file by file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.card import Card, counted
from roundel.data.folders import ARRAY_SUFFIXES, IMAGE_SUFFIXES, folder_name
from roundel.errors import OutputError, RecipeError, did_you_mean
from roundel.measure.folders import to_picture
from roundel.measure.runner import Predictor
from roundel.model.files import replacing
from roundel.model.structure import ModelSource
from roundel.recipe.settings import Data
from roundel.stages import open_data
from roundel.types import Listener, Silent


@dataclass(frozen=True, slots=True, repr=False)
class Inference(Card):
    """What was saved.

    Attributes:
        model: file name.
        folder: where the files are.
        outputs: the saved outputs; several have one sub-folder each.
        files: relative to the folder, in the order of the data.
        seconds: wall time of reading, running and saving.
    """

    model: str
    folder: Path
    outputs: tuple[str, ...]
    files: tuple[str, ...]
    seconds: float

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        return {
            "model": self.model,
            "outputs": ", ".join(self.outputs),
            "files": f"{counted(len(self.files), 'file')} in {self.folder}",
        }


def save_outputs(
    model: ModelSource,
    data: object,
    out: str | Path,
    *,
    options: Data | None = None,
    outputs: Sequence[str] = (),
    images: bool = False,
    listener: Listener | None = None,
) -> Inference:
    """Run a model, float or quantized, and save each output, named after its input.

    `cat.jpg` becomes `cat.npy` (`cat.png` with `images`); samples without a file are numbered from 0. A model
    with several outputs gets a sub-folder for each.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model.
        data: whatever `roundel.quantize` takes.
        out: the folder to write to; it is created when it does not exist.
        options: how files become samples, and how many; see the `data` section of recipes.
        outputs: only these outputs.
        images: save pictures instead of arrays.
        listener: told about progress.

    Raises:
        RoundelError: the model, the data or an output does not fit.
    """
    told, started, folder = listener or Silent(), time.perf_counter(), Path(out)
    predictor = Predictor(model)
    chosen = _chosen(predictor, outputs)
    samples = open_data(predictor.model, options or Data(), data)
    _create(folder)
    files: dict[str, str] = {}
    told.step("infer", samples.count)
    try:
        for index, (origin, sample) in enumerate(samples.named()):
            results = predictor.run(sample, index)
            for name in chosen:
                file = _file(origin, name if len(chosen) > 1 else None, images=images)
                if file in files:
                    raise OutputError(
                        "Two inputs would be saved under one name.",
                        where=folder / file,
                        observed=f"'{files[file]}' and '{origin}'",
                        expected="inputs whose names differ in more than their ending",
                        hint="Give the files names of their own, or run the folders apart.",
                    )
                _save(folder / file, results[name], name, images=images)
                files[file] = origin
            told.advance(index + 1)
    finally:
        told.close()
    return Inference(predictor.name, folder, chosen, tuple(files), time.perf_counter() - started)


def _chosen(predictor: Predictor, wanted: Sequence[str]) -> tuple[str, ...]:
    for name in wanted:
        if name not in predictor.outputs:
            raise RecipeError(
                f"The model has no output '{name}'.",
                where=predictor.name,
                observed=", ".join(predictor.outputs),
                hint=did_you_mean(name, predictor.outputs),
            )
    return tuple(dict.fromkeys(wanted)) or predictor.outputs


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            "The output folder cannot be created.", where=folder, observed=error.strerror or error
        ) from error


def _file(origin: str, output: str | None, *, images: bool) -> str:
    """The relative path for one result: 'a/cat.jpg' gives 'a/cat.npy', row 3 of an array file '3.npy'."""
    path = PurePosixPath(Path(origin).as_posix())
    if origin.endswith("]"):
        path = PurePosixPath(origin[origin.rindex("[") + 1 : -1])
    if path.suffix.lower() in IMAGE_SUFFIXES | ARRAY_SUFFIXES:
        path = path.with_suffix("")
    whole = path.with_name(path.name + (".png" if images else ".npy"))
    return str(whole if output is None else PurePosixPath(folder_name(output)) / whole)


def _save(path: Path, array: NDArray[Any], output: str, *, images: bool) -> None:
    _create(path.parent)
    with replacing(path) as temporary:
        if images:
            to_picture(array, f"output '{output}'").save(temporary, format="png")
            return
        with temporary.open("wb") as stream:
            np.save(stream, array)
