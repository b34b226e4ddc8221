"""What a run was told stands in the record beside its model: commands that come later do not ask again.

A word that the user says wins over what is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundel.data import RandomSpec
from roundel.errors import DataError, ModelError
from roundel.options import DataWords, data_settings
from roundel.recipe.load import known_recipe, read_record
from roundel.recipe.settings import Data, Recipe

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Remembered:
    """The record beside a model; empty where there is none.

    Attributes:
        folder: where the model lies: paths of the record may be meant from there.
        record: as in the file.
    """

    folder: Path = Path()
    record: Tree = field(default_factory=dict)

    @staticmethod
    def beside(models: Iterable[object]) -> Remembered:
        """Of the first of these models that has a record."""
        for model in models:
            record = read_record(Path(model)) if isinstance(model, str | Path) else None
            if record is not None:
                return Remembered(Path(str(model)).parent, record)
        return Remembered()

    @property
    def recipe(self) -> Recipe | None:
        """The run's, where this version understands it."""
        return known_recipe(self.record)

    @property
    def device(self) -> str | None:
        """The NPU that it was for."""
        device = self._asked.get("device")
        return str(device) if device is not None else None

    def settings(self, options: Data | None, words: DataWords) -> Data:
        """How files become samples: as in the run, where the user does not say something else.

        The number of samples is that of the run's own data only.
        """
        recipe = self.recipe if options is None else None
        known = options if recipe is None else recipe.data.model_copy(update={"samples": None})
        return data_settings(known, words)

    def data(self) -> object:
        """The data that the run calibrated on; None where no record says.

        Raises:
            DataError: they are no longer where they were.
        """
        told = self.record.get("data")
        return recorded_data(told, self.folder) if isinstance(told, Mapping) else None

    def judging(self) -> tuple[Path | None, str | None, str]:
        """The data that it was judged on, if any, their labels and the task."""
        data, labels = self._asked.get("eval_data"), self._asked.get("labels")
        found = _existing(data, self.folder) if data else None
        return found, labels if found is not None else None, str(self._asked.get("task", "classification"))

    def judged(self, data: object, labels: object, task: str) -> tuple[object, object, str]:
        """Data to judge by, their labels and the task: what the user says, else as the run was judged.

        Without such data, those of the calibration, which have no labels.
        """
        known, known_labels, known_task = self.judging()
        if data is None:
            data = known if known is not None else self.data()
        same = known is not None and isinstance(data, str | Path) and Path(data).resolve() == known.resolve()
        return (data, known_labels, known_task) if same and labels is None else (data, labels, task)

    def float_model(self) -> Path:
        """The model that the run quantized.

        Raises:
            ModelError: it is no longer where it was.
        """
        return recorded_model(self.record.get("model", {}), self.folder)

    @property
    def _asked(self) -> Tree:
        asked = self.record.get("asked")
        return asked if isinstance(asked, Mapping) else {}


def recorded_model(told: Tree, folder: Path) -> Path:
    """The float model of a record.

    Raises:
        ModelError: it is not there.
    """
    known = told.get("path")
    found = _existing(known, folder) if known else None
    if found is not None and found.is_file():
        return found
    raise ModelError(
        "The model that the record is about was not found.",
        where=known or "the run had its model in memory",
        hint="Say where it is: model=… (command line: --model FILE).",
    )


def recorded_data(told: Tree, folder: Path) -> object:
    """The data of a record: a path, random samples, or None where it needed none.

    Raises:
        DataError: they are not there.
    """
    if told.get("random"):
        shapes = {name: tuple(shape) for name, shape in told.get("shapes", {}).items()}
        ranges = {name: (low, high) for name, (low, high) in told.get("ranges", {}).items()}
        return RandomSpec(int(told.get("count") or 1), int(told["seed"]), ranges, shapes)
    if told.get("kind") == "none needed" or str(told.get("kind")).startswith("nothing"):
        return None
    known = told.get("path")
    found = _existing(known, folder) if known else None
    if found is not None:
        return found
    raise DataError(
        "The data that the record is about were not found.",
        where=known or f"the run had its data in memory ({told.get('kind')})",
        hint="Give them: data=… (command line: --data PATH).",
    )


def _existing(known: object, folder: Path) -> Path | None:
    paths = (Path(str(known)), folder / str(known))
    return next((path for path in paths if path.exists()), None)
