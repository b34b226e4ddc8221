"""Recipes from presets, files, mappings and records, with errors that name the key and suggest another."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from roundel.errors import RecipeError, did_you_mean
from roundel.recipe.settings import Recipe, Section, inner_section, merge

RecipeSource = str | Path | Mapping[str, Any] | Recipe
RECORD_VERSION = 1
_MAX_BYTES = 1_000_000
# What `_adaround` and `_adaquant` behind a preset's name mean, in words for people.
_TUNING = {
    "adaround": "AdaRound on top, which learns the rounding of each layer (needs torch)",
    "adaquant": "AdaQuant on top, which learns the weights and biases of each layer (needs torch)",
}
_INTEGER_PRESETS = ("xint8", "a8w8", "a16w8", "s8s8_aaws", "u8s8_aaws", "s16s8_asws", "u16s8_aaws")
_MX_PRESETS = ("mx4", "mx6", "mx9", "mxint8", "mxfp4e2m1", "mxfp6e2m3", "mxfp6e3m2", "mxfp8e4m3", "mxfp8e5m2")
_FLOAT_PRESETS = ("bf16", "fp16", "bfp16", *_MX_PRESETS)


class _PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases: a short file must not unfold into gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed in a recipe")
        return super().compose_node(parent, index)


def load_recipe(source: RecipeSource, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe that a preset name, a file or a dictionary stands for, with changes on top.

    Args:
        source: a preset name in any case, a YAML or JSON file (a run's record, too), a mapping, or a recipe.
        changes: values that win over the source's, nested or with dots: `{"weights.type": "int8"}`.
    """
    told = unfolded(changes or {})
    if isinstance(source, Recipe):
        own = merge(source.own, told)
        return validate(own, "the changes", source.model_dump()) if told else source
    if isinstance(source, Mapping):
        tree, where = dict(source), "the recipe mapping"
    else:
        tree, where = _read_named(source)
    base, own = _extended(tree, where)
    return validate(merge(own, told), where, base)


def unfolded(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes with dots in their names as nested sections; later ones win."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *path, last = str(key).split(".")
        part: Any = {last: value}
        for name in reversed(path):
            part = {name: part}
        tree = merge(tree, part)
    return tree


@cache
def preset_names() -> tuple[str, ...]:
    """The presets that ship, sorted: the files, and those of them with fine-tuning on top."""
    folder = resources.files("roundel") / "presets"
    files = [p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")]
    tuned = [f"{name}_{word}" for word in _TUNING for name in _tunable(word)]
    return tuple(sorted([*files, *tuned]))


def preset_key(text: object) -> str:
    """A preset's name as the files have it, whatever the case and the dashes."""
    return str(text).casefold().replace("-", "_")


def _tunable(algorithm: str) -> tuple[str, ...]:
    """The presets that have a form with this algorithm. AdaRound rounds integer codes."""
    return _INTEGER_PRESETS if algorithm == "adaround" else _INTEGER_PRESETS + _FLOAT_PRESETS


@cache
def load_preset(name: str) -> Recipe:
    """One of the presets that ship."""
    return load_recipe(name)


def validate(own: Mapping[str, Any], where: str, base: Mapping[str, Any] | None = None) -> Recipe:
    """Check a nested mapping, and the preset's values below it, against the recipe's fields."""
    try:
        return Recipe.composed(base or {}, own)
    except ValidationError as error:
        raise _explain(error, where) from error


def dump_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that `load_recipe` reads back to an equal value; defaults are left out."""
    changed = recipe.model_dump(mode="json", exclude_defaults=True)
    tree = {"version": recipe.version, "name": recipe.name, **changed}
    return yaml.safe_dump(tree, sort_keys=False)


def _read_named(source: str | Path) -> tuple[dict[str, Any], str]:
    text, key = str(source), preset_key(source)
    if isinstance(source, str) and key in preset_names():
        return {"extends": key}, f"preset {key}"
    path = Path(text)
    if _exists(path) and path.is_file():
        tree = _parse(_content(path), path)
        if "record_version" in tree and isinstance(tree.get("recipe"), dict):
            return _decided(recorded_recipe(tree["recipe"], str(path))), str(path)
        return {"name": path.stem, **tree}, str(path)
    if _exists(path):
        raise RecipeError("The recipe path is a folder.", where=path, expected="a YAML or JSON file")
    if isinstance(source, Path) or path.suffix.casefold() in (".yaml", ".yml", ".json"):
        hint = f"'{key}' is a preset: use --preset {key}." if key in preset_names() else "Check the path."
        raise RecipeError("The recipe file does not exist.", where=path, hint=hint)
    hint = "List them with `roundel presets`."
    raise RecipeError.unknown(f"There is no preset '{text[:80]}'.", key, preset_names(), hint=hint)


def _decided(recipe: Recipe) -> dict[str, Any]:
    """What a run had beyond its preset: a record holds every field, and most of them nobody decided."""
    key = preset_key(recipe.name)
    base, above = (load_preset(key), {"extends": key}) if key in preset_names() else (Recipe(), {})
    named = {"name": recipe.name, "title": recipe.title}
    return {**above, **_beyond(recipe.model_dump(), base.model_dump()), **named}


def _beyond(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The values that differ, section by section."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        other = base.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            inner = _beyond(value, other)
            found |= {name: inner} if inner else {}
        elif value != other:
            found[name] = value
    return found


def _preset_tree(name: str) -> dict[str, Any]:
    base, _, algorithm = name.rpartition("_")
    if algorithm in _TUNING:
        tuned = {"effort": "high", "improve": {"finetune": {"algorithm": algorithm}}}
        return {"name": name, "title": f"{base.upper()} with {_TUNING[algorithm]}", "extends": base, **tuned}
    file = resources.files("roundel") / "presets" / f"{name}.yaml"
    return {"name": name, **_parse(file.read_bytes(), f"preset {name}")}


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a text too long for a file name
        return False


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError("The recipe file cannot be read.", where=path, observed=error.strerror) from error
    if len(data) > _MAX_BYTES:
        raise RecipeError(
            "The recipe file is too large.",
            where=path,
            observed=f"{path.stat().st_size} bytes",
            expected=f"at most {_MAX_BYTES} bytes",
            hint="A recipe is a short YAML or JSON file; is this another file?",
        )
    return data


def _parse(data: bytes, where: object) -> dict[str, Any]:
    try:
        tree = json.loads(data) if data.lstrip()[:1] == b"{" else yaml.load(data, _PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RecipeError(
            "The recipe file cannot be parsed.",
            where=where,
            observed=reason,
            expected="plain YAML or JSON, as `roundel presets a8w8` prints it",
        ) from error
    if not isinstance(tree, dict):
        seen = type(tree).__name__
        raise RecipeError(
            "The recipe file is not a mapping.", where=where, observed=seen, expected="key: value"
        )
    return tree


def _extended(tree: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the preset that `extends: PRESET` names, and the tree's own."""
    if "extends" not in tree:
        return {}, tree
    base = preset_key(tree["extends"])
    if base not in preset_names():
        what = f"The recipe extends '{tree['extends']}', which is not a preset."
        raise RecipeError.unknown(what, base, preset_names(), where=where)
    rest = {key: value for key, value in tree.items() if key != "extends"}
    return merge(*_extended(_preset_tree(base), where)), rest


def _explain(error: ValidationError, where: str) -> RecipeError:
    # An unknown key first: a misspelt one is why another is missing.
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    location = [str(part) for part in first["loc"]]
    dotted = ".".join(location)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        fields = list(_fields_at(location[:-1]))
        return RecipeError.unknown(
            f"Unknown recipe key '{dotted}'{more}.",
            location[-1],
            fields,
            where=where,
            hint="Remove it, or see docs/recipes.md.",
        )
    choices = re.findall("'([^']+)'", str(first.get("ctx", {}).get("expected", "")))
    return RecipeError(
        f"The recipe's value for '{dotted or 'recipe'}' is wrong{more}.",
        where=where,
        observed=repr(first.get("input"))[:120],
        expected=first["msg"],
        hint=did_you_mean(str(first.get("input")), choices),
    )


def _fields_at(location: list[str]) -> Iterator[str]:
    section: type[Section] = Recipe
    for part in location:
        if not part.isdigit():
            section = inner_section(section, part) or section
    yield from section.model_fields
    if section is Recipe:
        yield "extends"


def record_path(model_path: Path) -> Path:
    """Where the record of a written model goes."""
    return model_path.with_suffix(".json")


def tail_path(model_path: Path) -> Path:
    """Where the float tail of a written model goes, if one was cut off."""
    return model_path.with_suffix(".tail.onnx")


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
