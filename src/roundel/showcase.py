"""The embedded example through the presets: one table that shows what each format costs and keeps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roundel.errors import OutputError
from roundel.example import Example, load_example
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness
from roundel.pipeline import quantize
from roundel.recipe.load import load_recipe, preset_names
from roundel.types import Array, Listener, heard_by


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One line of the table."""

    preset: str
    accuracy: float
    agreement: float
    sqnr_db: float | None
    bytes: int
    seconds: float | None


def demo(
    preset: Sequence[str] | None = None, output: str | Path | None = None, *, listener: Listener | None = None
) -> list[DemoRow]:
    """Quantize the example with each preset; the first row is the float model.

    Args:
        preset: names, or None for all that do not fine-tune, which would take minutes and need torch.
        output: an existing folder to keep the models in; None keeps nothing.
        listener: told about progress.
    """
    every = [name for name in preset_names() if load_recipe(name).finetuning == "none"]
    names = [load_recipe(name).name for name in preset] if preset else every
    example = load_example()
    reference = _logits(example, example.model_path)
    rows = [_row("float", example, reference, reference, (example.model_path.stat().st_size, None))]
    with heard_by(listener) as told:
        told.step("presets", len(names))
        if output is not None and not Path(output).is_dir():
            raise OutputError("The output folder does not exist.", where=output, hint="Create it first.")
        kept = tempfile.TemporaryDirectory(prefix="roundel-") if output is None else nullcontext(output)
        with kept as folder:
            for done, name in enumerate(names):
                path = Path(folder, f"digits.{name}.onnx")
                start = time.perf_counter()
                quantize(example.model_path, path, recipe=name, data=example.calibration)
                took = time.perf_counter() - start
                logits = _logits(example, path)
                rows.append(_row(name, example, reference, logits, (path.stat().st_size, took)))
                told.advance(done + 1)
    return rows


def _logits(example: Example, path: Path) -> Array:
    session = open_session(path, simulate=True)
    return np.asarray(session.run(None, {session.get_inputs()[0].name: example.eval_x})[0])


def _row(
    name: str, example: Example, reference: Array, logits: Array, cost: tuple[int, float | None]
) -> DemoRow:
    top = logits.argmax(1)
    sqnr = None if logits is reference else Closeness.of(reference, logits).sqnr_db
    right, same = (top == example.eval_y).mean(), (top == reference.argmax(1)).mean()
    return DemoRow(name, float(right), float(same), sqnr, *cost)
