"""Optuna at work: a study that lives in a file, goes on where it stopped, and repeats nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roundel.errors import DependencyError, OutputError, RecipeError
from roundel.model.files import check_writable
from roundel.plain import to_plain
from roundel.trials.engine import TitledListener
from roundel.trials.space import Choice, Space, combinations
from roundel.types import Listener

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(to_plain(self))


def require_optuna() -> Any:
    """The package, or an error that says how to get it.

    Raises:
        DependencyError: it is not installed.
    """
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
        self._optuna = require_optuna()
        self._space, self._directions = space, list(directions)
        if path is not None:
            check_writable(path)
        self._study = self._open(path)
        # Another seed for each life of the study: the same one would draw the first trials again.
        fresh = seed + len(self._study.trials)
        samplers = self._optuna.samplers
        self._study.sampler = (
            samplers.TPESampler(seed=fresh) if sampler == "tpe" else samplers.RandomSampler(seed=fresh)
        )

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Those that have ended, in order."""
        states = self._optuna.trial.TrialState
        done = (states.COMPLETE, states.PRUNED)
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
        states = self._optuna.trial.TrialState
        try:
            if before is not None and before.reason:
                raise RecipeError(before.reason)
            titled = TitledListener(told, f"trial {trial.number}")
            values = before.values if before is not None else evaluate(parameters, titled)
        except RecipeError as error:
            trial.set_user_attr(_WHY, error.what + (f" ({error.expected})" if error.expected else ""))
            self._study.tell(trial, state=states.PRUNED)
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
        states = self._optuna.trial.TrialState
        for trial in self._study.get_trials(states=(states.RUNNING,)):
            self._study.tell(trial.number, state=states.FAIL)
            if set(trial.params) == set(self._space):
                self._study.enqueue_trial(trial.params)

    def _enqueue_all(self) -> None:
        states = self._optuna.trial.TrialState
        ended = (states.COMPLETE, states.PRUNED, states.WAITING)
        known = [_choices(trial) for trial in self._study.get_trials(states=ended)]
        for combination in _all(self._space):
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


def _all(space: Space) -> Iterator[dict[str, str]]:
    choices = {name: values.texts for name, values in space.items() if isinstance(values, Choice)}
    for texts in itertools.product(*choices.values()):
        yield dict(zip(choices, texts, strict=True))


def _choices(trial: Any) -> dict[str, Any]:
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))
