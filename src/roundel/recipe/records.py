"""The record beside a model, read back: where it is, and which recipe it tells of."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roundel.errors import RecipeError
from roundel.recipe.load import validate
from roundel.recipe.settings import Recipe

RECORD_VERSION = 1


def record_path(model_path: Path) -> Path:
    """Where the record of a written model goes."""
    return model_path.with_suffix(".json")


def record_paths(models: Iterable[object]) -> list[Path]:
    """Where the records of those models are that are files."""
    return [record_path(Path(model)) for model in models if isinstance(model, str | Path)]


def read_record(model: Path | None) -> dict[str, Any] | None:
    """The record that Roundel wrote beside a model, if there is one that this version understands."""
    file = None if model is None else record_path(model)
    if file is None or not file.is_file():
        return None
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # another file of that name
        return None
    ours = isinstance(tree, dict) and tree.get("record_version") == RECORD_VERSION
    return tree if ours else None


def known_recipe(record: Mapping[str, Any] | None) -> Recipe | None:
    """A record's recipe, where this version understands it; else the model itself shows its format."""
    told = None if record is None else record.get("recipe")
    try:
        return recorded_recipe(told, "the record") if isinstance(told, Mapping) else None
    except RecipeError:
        return None


# Fields that recipes of earlier versions had, with the values that mean what this version does.
_GONE: Mapping[str, object] = {
    "improve.biases": True,
    "improve.equalize.absorb_bias": True,
    "improve.rotate.seed": 0,
    "improve.finetune.num_batches": 1,
    "improve.finetune.lr_adjust": None,
    "improve.finetune.selective_update": False,
    "improve.finetune.output_qdq": False,
    "improve.finetune.drop_ratio": 1.0,
    "improve.finetune.mem_opt_level": 1,
    "improve.finetune.parallel": False,
    "improve.finetune.block_wise": False,
}


def recorded_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """The recipe in a record, of this version or an earlier one.

    Raises:
        RecipeError: it is none, or a field that recipes no longer have did something.
    """
    told = copy.deepcopy(dict(tree))
    for name, usual in _GONE.items():
        *sections, last = name.split(".")
        part: Any = told
        for section in sections:
            part = part.get(section) if isinstance(part, dict) else None
        value = part.pop(last, usual) if isinstance(part, dict) else usual
        if value != usual:
            raise RecipeError(
                f"The run used '{name}', which recipes no longer have.",
                where=where,
                observed=f"{name}: {value}",
                expected=f"{usual}, which is what this version does",
                hint=f"Repeat the run with the version that the record names, or quantize without {name}.",
            )
    return validate(told, where)
