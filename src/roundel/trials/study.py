"""Optuna at work: a study that lives in a file, goes on where it stopped, and repeats nothing."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from roundel.errors import DependencyError, OutputError, RecipeError
from roundel.model.files import check_writable
from roundel.recipe.load import preset_key, preset_names
from roundel.recipe.settings import Recipe, Section, inner_section
from roundel.trials.engine import TitledListener
from roundel.types import Listener

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
            if preset_key(value) not in preset_names():
                what = f"There is no preset '{value}'."
                raise RecipeError.unknown(what, value, preset_names(), where="--space preset=…")
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
    section: type[Section] | None = Recipe
    last = name
    for part in name.split("."):
        if section is None:
            what = f"The recipe's field '{last}' has no fields of its own."
            raise RecipeError(what, where=f"--space {name}")
        if part not in section.model_fields:
            names = [*section.model_fields, *([PRESET] if section is Recipe else [])]
            what, where = f"A recipe has no field '{name}'.", f"--space {name}=…"
            raise RecipeError.unknown(what, part, names, where=where, hint="See docs/recipes.md.")
        found, last, section = section.model_fields[part], part, inner_section(section, part)
    kind: Any = Annotated[found.annotation, found]
    return TypeAdapter(kind)


Sampler = Literal["tpe", "random"]
Evaluate = Callable[[Mapping[str, Any], Listener], tuple[float, ...]]

_NAME = "roundel"
_SAID, _WHY = "key", "refused"


@dataclass(frozen=True, slots=True)
class Trial:
    """One try.

    Attributes:
        number: in the study.
        parameters: by field.
        values: of the objectives; empty where it was refused.
        reason: why it was refused.
    """

    number: int
    parameters: Mapping[str, Any]
    values: tuple[float, ...]
    reason: str = ""


def _optuna() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise DependencyError(
            "Searching needs Optuna.", observed=error, hint="pip install 'roundel[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Study:
    """Trials in an SQLite file, or in memory.

    Args:
        path: the file; None for a study that ends with the process.
        space: what may be chosen.
        directions: 'maximize' or 'minimize' for each objective.
        sampler: tpe learns from the trials before, random does not.
        seed: of the sampler.

    Raises:
        DependencyError: Optuna is not installed.
        OutputError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path | None,
        space: Space,
        directions: Sequence[str],
        *,
        sampler: Sampler = "tpe",
        seed: int = 0,
    ) -> None:
        self._optuna = _optuna()
        self._states = self._optuna.trial.TrialState
        self._space, self._directions = space, list(directions)
        if path is not None:
            check_writable(path)
        self._study = self._open(path)
        # Another seed for each life of the study: the same one would draw the first trials again.
        samplers = self._optuna.samplers
        kind = samplers.TPESampler if sampler == "tpe" else samplers.RandomSampler
        self._study.sampler = kind(seed=seed + len(self._study.trials))

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Those that have ended, in order."""
        done = (self._states.COMPLETE, self._states.PRUNED)
        return tuple(self._told(t) for t in self._study.get_trials(deepcopy=False, states=done))

    @property
    def best(self) -> tuple[Trial, ...]:
        """The best first; with several objectives, those that none beats in all of them."""
        sign = -1 if self._directions[0] == "maximize" else 1
        if len(self._directions) > 1:
            found = [self._told(t) for t in self._study.best_trials]
        else:
            found = [trial for trial in self.trials if trial.values]
        unique = {json.dumps(dict(t.parameters), sort_keys=True): t for t in reversed(found)}
        return tuple(sorted(unique.values(), key=lambda t: (sign * t.values[0], t.number)))

    def claim(self, path: Path | None, key: Mapping[str, Any]) -> None:
        """Note what the figures depend on, or compare it with what was noted.

        Raises:
            RecipeError: the study is of something else.
        """
        space = {name: str(values) for name, values in self._space.items()}
        wanted = json.loads(json.dumps({**key, "space": space}, default=str))
        noted = self._study.user_attrs.get(_SAID)
        if noted is None:
            self._study.set_user_attr(_SAID, wanted)
            return
        other = [name for name in wanted if noted.get(name) != wanted[name]]
        if other:
            raise RecipeError(
                "The study is of another search: its figures cannot be compared.",
                where=path,
                observed="; ".join(f"{name}: {noted.get(name)}" for name in other)[:300],
                expected="; ".join(f"{name}: {wanted[name]}" for name in other)[:300],
                hint="Give the study another file, or repeat the search as it was.",
            )

    def run(self, trials: int, evaluate: Evaluate, told: Listener, heard: Callable[[Trial], None]) -> None:
        """Go on until so many trials have ended, those of earlier runs among them.

        A trial that was cut off is tried again. Where there are no more combinations than trials, each is
        tried once. A combination that was tried before is not computed again.

        Args:
            trials: how many.
            evaluate: the values of the objectives; a `RecipeError` refuses the combination.
            told: hears about progress.
            heard: called with each trial when it has ended.
        """
        self._revive()
        count = combinations(self._space)
        if count is not None and count <= trials:
            trials = count
            self._enqueue_all()
        while len(self.trials) < trials:
            self._one(evaluate, told, heard)

    def _one(self, evaluate: Evaluate, told: Listener, heard: Callable[[Trial], None]) -> None:
        trial = self._study.ask()
        parameters = self._suggested(trial)
        before = next((t for t in self.trials if t.parameters == parameters), None)
        try:
            if before is not None and before.reason:
                raise RecipeError(before.reason)
            titled = TitledListener(told, f"trial {trial.number}")
            values = before.values if before is not None else evaluate(parameters, titled)
        except RecipeError as error:
            trial.set_user_attr(_WHY, error.what + (f" ({error.expected})" if error.expected else ""))
            self._study.tell(trial, state=self._states.PRUNED)
        else:
            self._study.tell(trial, list(values))
        heard(self._told(self._study.trials[trial.number]))

    def _suggested(self, trial: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, values in self._space.items():
            if isinstance(values, Choice):
                found[name] = json.loads(trial.suggest_categorical(name, values.texts))
            elif values.whole:
                found[name] = trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
            else:
                found[name] = trial.suggest_float(name, values.low, values.high, log=values.log)
        return found

    def _told(self, trial: Any) -> Trial:
        parameters = {
            name: json.loads(value) if isinstance(self._space.get(name), Choice) else value
            for name, value in trial.params.items()
        }
        values = tuple(trial.values) if trial.values is not None else ()
        return Trial(trial.number, parameters, values, str(trial.user_attrs.get(_WHY, "")))

    def _revive(self) -> None:
        """Trials that a killed run left open end as failures; their combinations wait to be tried again."""
        for trial in self._study.get_trials(states=(self._states.RUNNING,)):
            self._study.tell(trial.number, state=self._states.FAIL)
            if set(trial.params) == set(self._space):
                self._study.enqueue_trial(trial.params)

    def _enqueue_all(self) -> None:
        ended = (self._states.COMPLETE, self._states.PRUNED, self._states.WAITING)
        trials = self._study.get_trials(states=ended)
        known = [dict(trial.params or trial.system_attrs.get("fixed_params", {})) for trial in trials]
        choices = {name: values.texts for name, values in self._space.items() if isinstance(values, Choice)}
        for texts in itertools.product(*choices.values()):
            combination = dict(zip(choices, texts, strict=True))
            if combination not in known:
                self._study.enqueue_trial(combination)

    def _open(self, path: Path | None) -> Any:
        storage = None if path is None else f"sqlite:///{path.resolve().as_posix()}"
        try:
            return self._optuna.create_study(
                study_name=_NAME, storage=storage, directions=self._directions, load_if_exists=True
            )
        except Exception as error:
            # Deliberately broad: Optuna, SQLAlchemy and SQLite each have errors of their own for a bad file.
            raise OutputError(
                "The study's file cannot be used.",
                where=path,
                observed=" ".join(str(error).split())[:200],
                expected="a file that an earlier search made, or a new one",
            ) from error
