"""A folder that holds what a run has done: one file for each shard or step that is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roundel.checkpoints import files
from roundel.errors import DataError, OutputError, RecipeError
from roundel.types import Arrays
from roundel.version import VERSION

SUFFIX = ".ckpt"


@dataclass(frozen=True, slots=True)
class Store:
    """Where a run writes down what is done.

    Attributes:
        folder: for its files.
        resume: whether to go on from what an earlier run left there.
    """

    folder: Path
    resume: bool = False

    def path(self, name: str) -> Path:
        """The file of one step."""
        return self.folder / f"{name}{SUFFIX}"

    def memory(self, step: str, key: Mapping[str, str]) -> Memory:
        """What is known about one step.

        Args:
            step: its name, which begins the names of its files.
            key: digests of everything that decides its results, each under its name for people.
        """
        return Memory(self, step, {**versions(), **key})


@dataclass(frozen=True, slots=True)
class Memory:
    """The finished parts of one step.

    Attributes:
        store: where they are.
        step: its name.
        key: what decides the results.
    """

    store: Store
    step: str
    key: Mapping[str, str]

    def load(self, part: int | str, digest: str = "") -> Arrays | None:
        """What was saved about a part; None where nothing was, or where the run does not resume.

        Args:
            part: its number or name.
            digest: of what the part worked on.

        Raises:
            DataError: the file is damaged, or of another run.
        """
        path = self._path(part)
        if not self.store.resume or not path.exists():
            return None
        header, arrays = files.read(path)
        check_key(path, header.get("key"), {**self.key, "set of samples": digest})
        return arrays

    def save(self, part: int | str, arrays: Arrays, digest: str = "") -> None:
        """Write a part down.

        Raises:
            OutputError: it cannot be written.
        """
        files.write(self._path(part), {"key": {**self.key, "set of samples": digest}}, arrays)

    def _path(self, part: int | str) -> Path:
        return self.store.path(f"{self.step}-{part:06d}" if isinstance(part, int) else f"{self.step}-{part}")


def open_store(place: str | Path | None, *, resume: bool) -> Store | None:
    """The folder for a run's checkpoints, made where there is none; None where nobody asked.

    Without `resume`, checkpoints of earlier runs there are removed; nothing else is.

    Raises:
        RecipeError: there is nothing to resume from.
        OutputError: the folder cannot be used.
    """
    if place is None:
        if resume:
            raise RecipeError(
                "There is nothing to resume from.",
                expected="a checkpoint: the folder that the earlier run was given",
                hint="Pass checkpoint=… (command line: --checkpoint DIR).",
            )
        return None
    folder = Path(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in () if resume else sorted(folder.glob(f"*{SUFFIX}")):
            _remove(path)
        for path in folder.glob(f".*{SUFFIX}.partial"):
            path.unlink()
    except OSError as error:
        raise OutputError(
            "The checkpoint's folder cannot be used.",
            where=folder,
            observed=error.strerror or error,
            expected="a folder that can be written to",
        ) from error
    return Store(folder, resume)


def check_key(path: Path, found: object, wanted: Mapping[str, str]) -> None:
    """Refuse what another run has written.

    Raises:
        DataError: a part of the key differs.
    """
    known: Mapping[str, Any] = found if isinstance(found, dict) else {}
    other = [part for part, digest in wanted.items() if known.get(part) != digest]
    if other:
        raise DataError(
            "The checkpoint belongs to another run.",
            where=path,
            observed=f"another {other[0]}",
            expected="the same model, recipe, samples and versions",
            hint="Give the options of that run, delete the checkpoint, or run without resuming.",
        )


def versions() -> dict[str, str]:
    """What a result depends on beside its inputs."""
    import onnxruntime

    return {
        "version of Roundel": VERSION,
        "version of ONNX Runtime": str(onnxruntime.__version__),
        "version of numpy": np.__version__,
    }


def _remove(path: Path) -> None:
    """A checkpoint may be removed; nothing else may."""
    if not files.is_checkpoint(path):
        raise OutputError(
            "The checkpoint would overwrite a file that is not a checkpoint.",
            where=path,
            hint="Choose another folder, or delete the file.",
        )
    path.unlink()
