"""One case from its number: files in a folder, a call, and what became of it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import roundel
from fuzzing import files, seeds
from fuzzing.damage import damaged
from fuzzing.guard import Guard
from fuzzing.protos import bent
from roundel.inspection import inspect

PRESETS = (
    *(
        "a8w8",
        "a8w8",
        "xint8",
        "xint8_plain",
        "a16w8",
        "bf16",
        "bf16_cast",
        "bfp16",
        "mx9",
        "mxfp8e4m3",
        "fp16",
    ),
    *(
        "u8u8_aawa",
        "s16s8_asws",
        "s8s8_aaws",
        "uint8_dynamic_quant",
        "matmul_nbits",
        "int8_transformer_default",
    ),
    *("bf16_mixed_bfp16", "s16s16_mixed_s8s8", "int16_cnn_accurate", "vaiml_bf16", "matmul_nbits_gptq"),
)
_TORCH = "torchinductor_"  # a folder that PyTorch makes when it is imported


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that ended in another way than it may.

    Attributes:
        number: of the case; with the seed, it makes the case again.
        kind: what was bent.
        fault: one line by which equal faults are counted once.
        detail: traceback or list.
    """

    number: int
    kind: str
    fault: str
    detail: str


@dataclass(frozen=True, slots=True)
class Call:
    """What to run, and the kind of the case."""

    kind: str
    run: Callable[[], Any]


class Sandbox:
    """A folder with room for inputs, outputs and temporary files, the last two of which may be written."""

    def __init__(self, root: Path, guard: Guard) -> None:
        self.root, self.inside, self.out, self.temporary = root, root / "in", root / "out", root / "tmp"
        self.trace = str(root / "pickle-was-loaded")
        self._guard = guard

    def run(self, seed: int, number: int) -> tuple[str, Finding | None]:
        """The outcome in a word (`quantized`, the error's name, or `finding`), and the finding."""
        self._fresh()
        chance = Random(f"{seed}:{number}")
        call = make(self, chance)
        before = _snapshot(self.inside)
        tempfile.tempdir = str(self.temporary)
        outcome, fault, detail = "done", "", ""
        with self._guard.allowing(self.out, self.temporary) as offences:
            try:
                call.run()
            except roundel.RoundelError as error:
                outcome = type(error).__name__
                if "defect" in (error.hint or ""):
                    fault, detail = f"blames itself: {error.what}", str(error)
            except Exception as error:  # noqa: BLE001  this is what the fuzzer looks for
                place = traceback.extract_tb(error.__traceback__)
                ours = [f for f in place if f"{os.sep}roundel{os.sep}" in f.filename] or list(place)
                fault = f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].name}"
                detail = traceback.format_exc()
        if offences:
            fault, detail = f"forbidden: {offences[0]}", "\n".join(offences)
        elif _snapshot(self.inside) != before:
            fault = "an input was changed"
        elif left := sorted(p.name for p in self.temporary.iterdir() if not p.name.startswith(_TORCH)):
            fault = f"temporary files left: {left[:3]}"
        elif Path(self.trace).exists():
            fault = "a pickle was loaded"
        elif outcome != "done" and any(self.out.iterdir()):
            fault = f"files of a failed run left: {sorted(p.name for p in self.out.iterdir())[:3]}"
        if fault:
            return "finding", Finding(number, call.kind, fault, detail)
        return outcome, None

    def _fresh(self) -> None:
        for folder in (self.inside, self.out, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        Path(self.trace).unlink(missing_ok=True)
        (self.root / "secret").write_bytes(bytes(100_000))
        (self.inside / "weights.bin").write_bytes(bytes(100_000))
        (self.inside / "link.bin").symlink_to("../secret")


def make(box: Sandbox, chance: Random) -> Call:
    """The case that a random generator stands for."""
    share = chance.random()
    if share < 0.62:
        return _model_case(box, chance, structured=share > 0.22)
    return _recipe_case(box, chance) if share < 0.77 else _data_case(box, chance)


def _model_case(box: Sandbox, chance: Random, *, structured: bool) -> Call:
    source = chance.choice(seeds.models() if chance.random() < 0.5 else seeds.backend_models())
    path = box.inside / "model.onnx"
    if structured:
        data = bent(source, chance).SerializeToString()
        if chance.random() < 0.05:
            data = damaged(data, chance)
    else:
        data = damaged(source.SerializeToString(), chance)
    path.write_bytes(data)
    preset, effort = chance.choice(PRESETS), chance.choice(("none", "none", "none", "fast"))
    external = chance.random() < 0.1
    if chance.random() < 0.07:
        return Call("inspect", lambda: inspect(path))
    changes: dict[str, Any] = {"verify": {"samples": 1}, "output": {"external_data": external}}

    def run() -> None:
        count = 6 if effort == "fast" else 2
        data = roundel.RandomData(count=count)
        written = box.out / "out.onnx"
        roundel.quantize(path, written, recipe=preset, data=data, effort=effort, changes=changes)
        _load(written)

    return Call(f"model, {preset}", run)


def _load(path: Path) -> None:
    """What was written is a model for anybody's ONNX Runtime; an exception is a finding."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _recipe_case(box: Sandbox, chance: Random) -> Call:
    path = box.inside / f"recipe.{chance.choice(('yaml', 'json'))}"
    path.write_bytes(files.recipe_text(chance))
    model = seeds.models()[chance.choice((0, 0, 1, 4))]
    source = _saved(box, model)
    cap = {"effort": "none"} if chance.random() < 0.8 else {}

    def run() -> None:
        recipe = roundel.load_recipe(path, cap)
        if recipe.improve.finetune.algorithm != "none" or recipe.effort == "high":
            return  # as many steps as the recipe says: no fault, but no case to wait for
        roundel.quantize(source, box.out / "out.onnx", recipe=recipe, data=roundel.RandomData(count=2))

    return Call("recipe", run)


def _saved(box: Sandbox, model: onnx.ModelProto) -> Path:
    path = box.inside / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _data_case(box: Sandbox, chance: Random) -> Call:
    model, shape = seeds.models()[0], (1, 3, 8, 8)
    source = _saved(box, model)
    folder = box.inside / "data"
    folder.mkdir()
    kind = chance.randrange(4)
    if kind == 3:
        return _statistics_case(box, chance, source)
    for index in range(chance.choice((1, 2, 3))):
        suffix = chance.choice((".npy", ".npz", ".npy", ".NPZ", ".png", ".jpg"))
        if chance.random() < 0.05:
            data = files.object_array(box.trace)
        elif suffix.lower() == ".npz":
            data = files.archive_bytes(
                shape, chance.choice((("x",), ("a",), ("x", "y"), ())), chance, box.trace
            )
        else:
            data = files.array_bytes(shape, chance)
        if chance.random() < 0.5:
            data = damaged(data, chance)
        (folder / f"{index}{suffix}").write_bytes(data)
    given = folder if kind else sorted(folder.iterdir())[0]
    recipe = "a8w8_minmax"

    def run() -> None:
        roundel.quantize(source, box.out / "out.onnx", recipe=recipe, data=given, effort="none")

    return Call("data", run)


def _statistics_case(box: Sandbox, chance: Random, source: Path) -> Call:
    """A statistics file that somebody bent; it lies among the outputs, since a run may write it anew."""
    made = box.out / "stats.npz"
    data = [{"x": np.full((1, 3, 8, 8), value, np.float32)} for value in (0.5, 1.0)]
    recipe = chance.choice(("a8w8_minmax", "a8w8", "xint8_plain"))
    roundel.quantize(source, recipe=recipe, data=data, stats=made, effort="none")
    content = damaged(made.read_bytes(), chance)
    made.unlink()
    stats = box.inside / "stats.npz"
    stats.write_bytes(content)

    def run() -> None:
        # A copy: the original proves that no input changes.
        copy = box.temporary / "stats.npz"
        copy.write_bytes(content)
        try:
            roundel.quantize(
                source, box.out / "out.onnx", recipe=recipe, data=data, stats=copy, effort="none"
            )
        finally:
            copy.unlink()

    return Call("statistics", run)


def _snapshot(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
