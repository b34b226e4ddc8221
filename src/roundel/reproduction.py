"""A run again, from its record: does it give the same bytes, and if not, what is different?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundel.errors import RecipeError
from roundel.model.files import model_sha256
from roundel.outputs import model_targets, refuse_overwriting
from roundel.pipeline import quantize
from roundel.plain import Card, to_plain
from roundel.recipe.load import RECORD_VERSION, recorded_recipe
from roundel.remembered import recorded_data, recorded_model
from roundel.report.record import versions
from roundel.result import QuantizeResult
from roundel.types import Listener

_MAX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class RunDifference:
    """One thing that is not as it was."""

    what: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"{self.what}: {self.recorded} then, {self.now} now"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reproduction(Card):
    """What came of repeating a run.

    Attributes:
        matches: the written model has the same bytes.
        differences: of the model, the data, the versions and the result, in this order.
        result: the new run.
    """

    matches: bool
    differences: tuple[RunDifference, ...]
    result: QuantizeResult

    def card(self) -> Mapping[str, object]:
        """Whether it is the same, and the first things that are not."""
        verdict = "the same, byte for byte" if self.matches else "not the same"
        first = {d.what: f"{d.recorded} -> {d.now}" for d in self.differences[:3]}
        return {"quantized model": verdict, **first}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"matches": self.matches, "differences": to_plain(self.differences)}


def reproduce(
    record: str | Path,
    *,
    model: str | Path | None = None,
    data: object = None,
    output: str | Path | None = None,
    listener: Listener | None = None,
) -> Reproduction:
    """Repeat the run that wrote a record.

    Args:
        record: the JSON file that `quantize` wrote beside its model.
        model: the float model, where it is not at the path that the record names.
        data: the calibration data, where it is not at the path that the record names, or was in memory.
        output: keep the new model here; None throws it away when it has been compared.
        listener: told about progress.

    Raises:
        RecipeError: the file is no record of a run that wrote a model.
        RoundelError: the run fails.
    """
    path = Path(record)
    told = _read(path)
    recipe = recorded_recipe(told["recipe"], str(path))
    source = Path(model) if model is not None else recorded_model(told["model"], path.parent)
    samples = data if data is not None else recorded_data(told["data"], path.parent)
    sources = {"record": path, "input model": source, "calibration data": samples}
    refuse_overwriting(model_targets(output), sources)
    with tempfile.TemporaryDirectory(prefix="roundel-") as folder:
        target = Path(output) if output is not None else Path(folder) / str(told["file"]["name"])
        result = quantize(source, target, recipe=recipe, data=samples, listener=listener)
        now = result.record.to_dict()
        same = told["file"]["sha256"] == now["file"]["sha256"] == model_sha256(target)
    return Reproduction(same, tuple(_differences(told, now)), result)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        told = json.loads(path.read_text(encoding="utf-8"))
        version, parts = told["record_version"], [told[k] for k in ("recipe", "model", "data", "file")]
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError("a section is no mapping")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(
            "The record cannot be read.",
            where=path,
            observed=f"{type(error).__name__}: {error}",
            expected="the JSON file that `roundel quantize` writes beside a model",
        ) from error
    if version != RECORD_VERSION:
        raise RecipeError(
            "The record is of another version.", where=path, observed=version, expected=RECORD_VERSION
        )
    if not told["file"].get("name") or "sha256" not in told["file"]:
        raise RecipeError(
            "The record does not say what the written model was.",
            where=path,
            observed=f"file: {told['file']}",
            hint="It is of a run that wrote no file, or of an older Roundel: quantize again.",
        )
    if Path(str(told["file"]["name"])).name != told["file"]["name"]:
        raise RecipeError(
            "The record's file name leads elsewhere.", where=path, observed=told["file"]["name"]
        )
    return dict(told)


def _differences(told: Mapping[str, Any], now: Mapping[str, Any]) -> list[RunDifference]:
    before, after = told.get("versions", {}), versions()
    pairs: list[tuple[str, object, object]] = [
        ("model file", told["model"].get("sha256"), now["model"].get("sha256")),
        ("prepared graph", told["model"].get("fingerprint"), now["model"].get("fingerprint")),
        ("data", told["data"].get("digest"), now["data"].get("digest")),
        *((f"version of {name}", before.get(name), version) for name, version in after.items()),
        ("float nodes", len(told.get("float_nodes", {})), len(now["float_nodes"])),
        ("quantized model", told["file"]["sha256"], now["file"]["sha256"]),
    ]
    return [RunDifference(what, _short(old), _short(new)) for what, old, new in pairs if old != new]


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) > 40 else text
