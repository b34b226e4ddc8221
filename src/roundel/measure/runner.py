"""Runs models over data, whoever works on it; and saves what a model says."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from roundel.calibrate.runner import run_session
from roundel.data.arrays import fixed_batch
from roundel.data.folders import ARRAY_SUFFIXES, IMAGE_SUFFIXES, folder_name
from roundel.errors import OutputError, RecipeError, did_you_mean
from roundel.heads import joined, load_whole, tail_file
from roundel.measure.folders import to_picture
from roundel.model import ModelSource
from roundel.model.files import Portable, external_values, replacing, same_file
from roundel.model.graph import fingerprint, input_specs
from roundel.model.session import open_session
from roundel.options import DataWords, takes_data_words
from roundel.plain import Card, counted
from roundel.qdq.functions import attach
from roundel.qdq.nodes import QUARK
from roundel.recipe.load import record_path
from roundel.recipe.settings import Data
from roundel.remembered import Remembered
from roundel.rules.formats import is_quantized
from roundel.stages import open_data
from roundel.twin import TwinSummary, twin_of
from roundel.types import Array, Listener, Sample, heard_by


class Travelling:
    """A model that is itself in this process, and plain bytes and arrays on its way to another."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (Portable.of(self.model),)


def _arrived(portable: Portable) -> Travelling:
    return Travelling(portable.model())


class Predictor:
    """A model, float or quantized, that takes samples of any number of rows.

    Its session computes Q/DQ nodes exactly as written, whatever the CPU. In another process, it arrives as a
    `PackedPredictor`.

    Args:
        source: an ONNX file, serialised bytes, a ModelProto, or an onnx-ir model.
        threads: that it computes with; None for every core.
        as_npu: a device whose integer arithmetic a quantized model is computed with; not a float one.

    Attributes:
        twin: how far the numbers are the device's; None where they are ONNX Runtime's.
    """

    def __init__(self, source: ModelSource, *, threads: int | None = None, as_npu: str | None = None) -> None:
        loaded, self._tail = load_whole(source, opaque=QUARK)
        self.model: ir.Model = loaded.model
        self.path = loaded.path
        self.name = loaded.name
        self.file_bytes = loaded.file_bytes
        self.inputs = input_specs(loaded.model)
        self._batch = fixed_batch(self.inputs)
        # A file runs as it is, not as loading has normalised it; only AMD's operators may lack their bodies.
        own = self._tail is None and not any(n.domain == QUARK for n in loaded.model.graph.all_nodes())
        runs: ir.Model | Path = loaded.path if loaded.path and own else attach(loaded.model)
        self.as_npu = as_npu if as_npu is not None and is_quantized(loaded.model) else None
        self.twin: TwinSummary | None = None
        if self.as_npu is not None:
            made = twin_of(source, self.as_npu)
            runs = made.model if self._tail is None else joined(made.model, self._tail)
            self.twin = made.summary
        self._session: ort.InferenceSession = open_session(runs, threads=threads, simulate=True)
        self.outputs = tuple(out.name for out in self._session.get_outputs())

    def run(self, sample: Sample, index: int) -> dict[str, Array]:
        """All outputs for one sample.

        Where the model has fixed its batch, rows are cut to it; the last part is filled up by repeating its
        last row, and the results for the repetitions are dropped.

        Args:
            sample: the inputs, with the same number of rows each.
            index: its position, for messages.

        Raises:
            DataError: the sample does not fit the model.
            ModelError: ONNX Runtime cannot run the model.
        """
        names = list(self.outputs)
        rows = {len(array) for array in sample.values() if array.ndim}
        if self._batch is None or rows == {self._batch} or len(rows) != 1:
            return run_session(self._session, names, sample, index)
        count, parts = rows.pop(), []
        for start in range(0, count, self._batch):
            part = {name: _filled(a[start : start + self._batch], self._batch) for name, a in sample.items()}
            results = run_session(self._session, names, part, index)
            kept = min(self._batch, count - start)
            rowed = (name for name, a in results.items() if a.ndim and len(a) == self._batch)
            parts.append(results | {name: results[name][:kept] for name in rowed})
        return {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in names}

    def open(self, threads: int) -> Predictor:
        """Itself: it is open."""
        return self

    def digest(self) -> str:
        """Of the model: of its files as they are, or of what is in memory."""
        digest = hashlib.blake2b((self.as_npu or "").encode(), digest_size=16)
        if self.path is None:
            own = fingerprint(self.model)
            return own if self.as_npu is None else f"{own} as {self.as_npu}"
        files = self._files(self.path)
        files.pop(record_path(self.path).name, None)  # it tells times, too, which change nothing
        for name, content in sorted(files.items()):
            digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return PackedPredictor, ("", {}, Portable.of(self.model), self.as_npu)
        return PackedPredictor, (self.path.name, self._files(self.path), None, self.as_npu)

    def _files(self, path: Path) -> dict[str, bytes]:
        beside = {Path(tensor.path).resolve() for _, tensor in external_values(self.model)}
        tail = tail_file(path)
        if tail is not None:  # found again by the record
            beside |= {tail.resolve(), record_path(path).resolve()}
        home = path.resolve().parent
        others = {str(file.relative_to(home)): file.read_bytes() for file in beside}
        return {path.name: path.read_bytes(), **others}


@dataclass(frozen=True, slots=True, eq=False)
class PackedPredictor:
    """A predictor in another process, before it has a session.

    Attributes:
        name: of the model's file; "" for a model in memory.
        files: of the model, as they are.
        portable: the model in memory.
        as_npu: as of `Predictor`.
    """

    name: str
    files: dict[str, bytes]
    portable: Portable | None
    as_npu: str | None = None

    def open(self, threads: int) -> Predictor:
        """With a session of so many threads."""
        if self.portable is not None:
            return Predictor(self.portable.model(), threads=threads, as_npu=self.as_npu)
        with tempfile.TemporaryDirectory(prefix="roundel-") as folder:
            for name, content in self.files.items():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            return Predictor(Path(folder, self.name), threads=threads, as_npu=self.as_npu)


def _filled(rows: Array, count: int) -> Array:
    missing = count - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


@dataclass(frozen=True, slots=True, repr=False)
class Inference(Card):
    """What was saved.

    Attributes:
        model: file name.
        folder: where the files are.
        outputs: the saved outputs; several have one sub-folder each.
        files: relative to the folder, in the order of the data.
        seconds: wall time of reading, running and saving.
        notes: how far the numbers are the NPU's, where it is imitated.
    """

    model: str
    folder: Path
    outputs: tuple[str, ...]
    files: tuple[str, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        return {
            "model": self.model,
            "outputs": ", ".join(self.outputs),
            "files": f"{counted(len(self.files), 'file')} in {self.folder}",
        }


@takes_data_words
def infer(
    model: ModelSource,
    data: object,
    out: str | Path,
    *,
    options: Data | None = None,
    outputs: Sequence[str] = (),
    images: bool = False,
    as_npu: str | None = None,
    listener: Listener | None = None,
    **words: Unpack[DataWords],
) -> Inference:
    """Run a model, float or quantized, and save each output, named after its input.

    `cat.jpg` becomes `cat.npy` (`cat.png` with `images`); samples without a file are numbered from 0. A model
    with several outputs gets a sub-folder for each.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `letterbox`, which are those
            of the record beside the model where nothing else is said.
        out: the folder to write to; it is created when it does not exist.
        options: the words of the data as one object, for example `result.record.recipe`'s.
        outputs: only these outputs.
        images: save pictures instead of arrays.
        as_npu: phx or hpt: compute a quantized model with this NPU's arithmetic, as `roundel.npu_session`.
        listener: told about progress.

    Raises:
        RoundelError: the model, the data or an output does not fit.
    """
    started, folder = time.perf_counter(), Path(out)
    settings = Remembered.beside([model]).settings(options, words)
    if isinstance(data, str | Path) and same_file(folder, Path(data)):
        raise OutputError(
            "The outputs would overwrite the data.", where=out, hint="Choose another output folder."
        )
    predictor = Predictor(model, as_npu=as_npu)
    if as_npu is not None and predictor.twin is None:
        twin_of(model, as_npu)  # a float model has no integers: says so
    chosen = _chosen(predictor, outputs)
    samples = open_data(predictor.model, settings, data)
    _create(folder)
    files: dict[str, str] = {}
    with heard_by(listener) as told:
        told.step("infer", samples.count)
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
    notes = () if predictor.twin is None else predictor.twin.lines()
    return Inference(predictor.name, folder, chosen, tuple(files), time.perf_counter() - started, notes)


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


def _save(path: Path, array: Array, output: str, *, images: bool) -> None:
    _create(path.parent)
    with replacing(path) as temporary:
        if images:
            to_picture(array, f"output '{output}'").save(temporary, format="png")
            return
        with temporary.open("wb") as stream:
            np.save(stream, array)
