"""The run that wrote a model, as plain values: steps, times, recipe and the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from roundel.recipe import Recipe
from roundel.recipe_file import dump_yaml
from roundel.report.html.content import Tree
from roundel.report.html.numbers import short

_PHASES = {  # what the clock's names mean to a reader
    "prepare": "load and prepare",
    "outliers": "spread outliers",
    "plan": "plan",
    "collect": "calibrate",
    "equalize": "try equalization",
    "write": "improve and write",
    "verify": "verify",
}


_WORTH_SHOWING = 0.005  # seconds


def preset_values(record: Tree) -> dict[str, Any]:
    """Name and effort of the recipe."""
    recipe = record["recipe"]
    return {
        "name": recipe["name"],
        "title": recipe.get("title", ""),
        "mode": recipe["mode"],
        "effort": recipe["effort"],
    }


def step_values(record: Tree) -> list[dict[str, Any]]:
    """Every improving step, kept or not."""
    return [
        {
            "name": step["step"],
            "before": _db(step["before_db"]),
            "after": _db(step["after_db"]),
            "refused": _db(step.get("refused_db")),
            "kept": step["kept"],
            "foreseen": step.get("foreseen", False),
            "seconds": short(step["seconds"]),
            "layers": [
                [each["layer"], each["op"], _db(each["before_db"]), _db(each["after_db"]), each["kept"]]
                for each in step["layers"]
            ],
        }
        for step in record["improvements"]
    ]


def steps_by_layer(record: Tree | None) -> dict[str, list[list[Any]]]:
    """(step, before, after, kept) of every layer, by name of its node."""
    found: dict[str, list[list[Any]]] = {}
    for step in () if record is None else record["improvements"]:
        for each in step["layers"]:
            line = [
                step["step"],
                _db(each["before_db"]),
                _db(each["after_db"]),
                each["kept"] and step["kept"],
            ]
            for node in each["layer"].split("+"):  # a block of layers that were tuned together
                found.setdefault(node, []).append(line)
    return found


def count_values(record: Tree) -> dict[str, Any]:
    """How many nodes are quantized, and which are not."""
    counts = record["counts"]
    return {
        "quantized": sum(counts["quantized_nodes"].values()),
        "float": sum(counts["float_nodes"].values()),
        "left": [[name, reason] for name, reason in record["float_nodes"].items()],
        "prepared": [[name, count] for name, count in record["prepare"].items()],
    }


def time_values(record: Tree | None, compared: Mapping[str, float]) -> list[list[Any]]:
    """(what, seconds) of the run and of the comparison for this report."""
    phases = {} if record is None else record["seconds"]
    times = [[_PHASES.get(name, name), short(s)] for name, s in phases.items() if s >= _WORTH_SHOWING]
    return [*times, ["compare for this report", short(compared["total"])]]


def recipe_text(record: Tree) -> str:
    """The recipe as a file that `--recipe` reads."""
    try:
        return dump_yaml(Recipe.model_validate(record["recipe"]))
    except ValidationError:  # of another version: as it stands
        return yaml.safe_dump(dict(record["recipe"]), sort_keys=False)


def command(record: Tree) -> str:
    """The command line that repeats the run."""
    data = record["data"]
    words = ["roundel", "quantize", record["model"]["name"]]
    words += ["-o", record["file"]["name"] or "quantized.onnx", "--recipe", "recipe.yaml"]
    if data.get("random"):
        words += ["--random", str(data.get("count") or data.get("samples_seen") or 1)]
    elif "path" in data:
        words += ["--data", PurePath(data["path"]).name]
    elif data.get("kind") != "none needed":
        words += ["--data", "DATA"]
    return shlex.join(words)


def data_words(description: Tree) -> str:
    """What the samples were; of a path only the last part, since a report is made to be handed on."""
    kind = str(description.get("kind", "samples"))
    return f"{kind} {PurePath(description['path']).name}" if "path" in description else kind


def _db(value: float | str | None) -> float | int | str | None:
    return None if value is None else short(float(value))
