"""The values that a search may choose between, field by field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from roundel.errors import RecipeError, did_you_mean
from roundel.recipe.load import preset_names
from roundel.recipe.settings import Recipe

PRESET = "preset"  # the one name in a space that is no field of a recipe

_FORM = "FIELD=a,b,c or FIELD=low..high, with :log behind it for a logarithmic scale"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values, each of any kind that JSON knows, kept as its text."""

    texts: tuple[str, ...]

    @staticmethod
    def of(values: Iterable[Any]) -> Choice:
        """Without repetitions."""
        return Choice(tuple(dict.fromkeys(json.dumps(value, sort_keys=True) for value in values)))

    @property
    def values(self) -> list[Any]:
        """The values themselves."""
        return [json.loads(text) for text in self.texts]

    def __str__(self) -> str:
        return ", ".join(self.texts)


@dataclass(frozen=True, slots=True)
class Span:
    """Any number between two; whole numbers only where both ends are."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" + (":log" if self.log else "")


Space = Mapping[str, Choice | Span]
SpaceSource = Mapping[str, Any] | Sequence[str] | str | Path


def read_space(source: SpaceSource) -> Space:
    """The space that a mapping, a YAML or JSON file, or words like 'weights.method=minmax,mse' describe.

    Raises:
        RecipeError: a field is not known, or a value does not fit it.
    """
    if isinstance(source, str | Path):
        source = [str(source)]
    if isinstance(source, Mapping):
        space = {str(name): _described(str(name), values) for name, values in source.items()}
    else:
        space = {}
        for word in source:
            space |= _worded(word) if "=" in word else _from_file(Path(word))
    if not space:
        raise RecipeError("The space is empty.", where="--space", expected=_FORM)
    for name, values in space.items():
        _check(name, values)
    return space


def combinations(space: Space) -> int | None:
    """How many there are; None for a space with ranges."""
    if any(isinstance(values, Span) for values in space.values()):
        return None
    return math.prod(len(values.texts) for values in space.values() if isinstance(values, Choice))


def nested(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as the tree of a recipe."""
    tree: dict[str, Any] = {}
    for name, value in parameters.items():
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


def _from_file(path: Path) -> dict[str, Choice | Span]:
    if not path.is_file():
        raise RecipeError("The space's file does not exist.", where=path, expected=f"a YAML file, or {_FORM}")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(
            "The space's file cannot be read.", where=path, observed=" ".join(str(error).split())[:200]
        ) from error
    if not isinstance(tree, dict):
        raise RecipeError("The space's file is not a mapping.", where=path, expected="field: [value, …]")
    return {str(name): _described(str(name), values) for name, values in tree.items()}


def _described(name: str, values: Any) -> Choice | Span:
    """A list of values, a mapping with low and high, or text as on the command line."""
    if isinstance(values, Choice | Span):
        return values
    if isinstance(values, Mapping):
        unknown = set(values) - {"low", "high", "log"}
        if unknown or not {"low", "high"} <= set(values):
            raise RecipeError(
                "A range has two ends.", where=name, observed=dict(values), expected="low, high and maybe log"
            )
        return _span(name, values["low"], values["high"], log=bool(values.get("log", False)))
    if isinstance(values, str) and (".." in values or "," in values):
        return _worded(f"{name}={values}")[name]
    return Choice.of(values if isinstance(values, list | tuple) else [values])


def _worded(word: str) -> dict[str, Choice | Span]:
    name, _, text = word.partition("=")
    name, text = name.strip(), text.strip()
    if not name or not text:
        raise RecipeError("A field of the space has no values.", where=word, expected=_FORM)
    if ".." in text:
        body, colon, kind = text.partition(":")
        low, _, high = body.partition("..")
        if colon and kind.strip() != "log":
            raise RecipeError("A range is plain or logarithmic.", where=word, expected=_FORM)
        return {name: _span(word, _number(low, word), _number(high, word), log=bool(colon))}
    try:
        return {name: Choice.of(yaml.safe_load(part) for part in text.split(","))}
    except yaml.YAMLError as error:
        raise RecipeError("A value of the space cannot be read.", where=word, expected=_FORM) from error


def _number(text: str, where: str) -> float:
    for kind in (int, float):
        try:
            return kind(text.strip())
        except ValueError:
            continue
    raise RecipeError("A range goes from one number to another.", where=where, observed=text, expected=_FORM)


def _span(where: str, low: Any, high: Any, *, log: bool) -> Span:
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
    if not numbers or not low < high or (log and low <= 0):
        raise RecipeError(
            "A range goes from a number to a larger one (from above zero with log).",
            where=where,
            observed=f"{low}..{high}",
            expected=_FORM,
        )
    return Span(low, high, log)


def _check(name: str, values: Choice | Span) -> None:
    """The field must exist and take the values; whether they go together, each trial finds out."""
    tried = [values.low, values.high] if isinstance(values, Span) else values.values
    if name == PRESET:
        for value in tried:
            if str(value).casefold().replace("-", "_") not in preset_names():
                raise RecipeError(
                    f"There is no preset '{value}'.",
                    where="--space preset=…",
                    expected=", ".join(preset_names()),
                    hint=did_you_mean(str(value), preset_names()),
                )
        return
    adapter = _adapter(name)
    for value in tried:
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            raise RecipeError(
                f"The recipe's field '{name}' does not take one of the values.",
                where="--space",
                observed=value,
                expected=error.errors()[0]["msg"],
            ) from error


def _adapter(name: str) -> TypeAdapter[Any]:
    """What checks the values of a dotted field."""
    section: type[BaseModel] = Recipe
    *path, last = name.split(".")
    for part in path:
        section = _section(section, part, name)
    if last not in section.model_fields:
        raise _unknown(name, [*path, last], section)
    found = section.model_fields[last]
    kind: Any = Annotated[found.annotation, found]
    return TypeAdapter(kind)


def _section(section: type[BaseModel], part: str, name: str) -> type[BaseModel]:
    if part not in section.model_fields:
        raise _unknown(name, [part], section)
    annotation = section.model_fields[part].annotation
    inner = [
        a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)
    ]
    if not inner:
        raise RecipeError(f"The recipe's field '{part}' has no fields of its own.", where=f"--space {name}")
    return inner[0]


def _unknown(name: str, path: Sequence[str], section: type[BaseModel]) -> RecipeError:
    names = list(section.model_fields) + ([PRESET] if section is Recipe else [])
    return RecipeError(
        f"A recipe has no field '{name}'.",
        where=f"--space {name}=…",
        expected=", ".join(names),
        hint=did_you_mean(path[-1], names) or "See docs/recipes.md.",
    )
