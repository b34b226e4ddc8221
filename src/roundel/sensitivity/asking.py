"""Questions about a model with some of its quantizers on: answered here, or shared among workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.algorithms.step_memory import run_key
from roundel.algorithms.toggles import Toggles
from roundel.calibrate.state import QuantState
from roundel.executors import Work, mapped
from roundel.model.portable import Portable
from roundel.recipe import Recipe
from roundel.types import Arrays, Sample


@dataclass(frozen=True, slots=True)
class Question:
    """What these quantizers alone do to the outputs.

    Attributes:
        number: its place.
        on: tensors whose quantizers are on.
        count: how many samples to look at.
    """

    number: int
    on: tuple[str, ...]
    count: int

    @property
    def digest(self) -> str:
        """Of the question."""
        return hashlib.blake2b(repr((self.on, self.count)).encode(), digest_size=16).hexdigest()


class Board:
    """A calibrated model that answers questions.

    Args:
        model: the prepared float model.
        state: says how each tensor is stored.
        tensors: those that can be switched.
        recipe: the domain of Q/DQ nodes.
        samples, outputs: inputs, and the float model's own outputs for them.
        work: where, and what is remembered.
    """

    def __init__(
        self,
        model: ir.Model,
        state: QuantState,
        tensors: Sequence[str],
        recipe: Recipe,
        samples: Sequence[Sample],
        outputs: Sequence[Sample],
        work: Work,
    ) -> None:
        self._parts = state, tuple(tensors), recipe, list(samples), list(outputs)
        self._model, self._work = model, work
        self._toggles: Toggles | None = None

    def answers(self, step: str, questions: Iterable[Question]) -> Iterator[float]:
        """The error of each question, in their order: power over that of the outputs.

        Args:
            step: the name under which the answers are remembered.
            questions: any number of them.
        """
        if self._work.alone:
            self._toggles = self._toggles or Toggles(self._model, *self._parts)
            for question in questions:
                yield self._toggles.error(question.on, question.count)
            return
        state, _, recipe, samples, _ = self._parts
        memory = None
        if self._work.store is not None:
            memory = self._work.memory(step, run_key(self._model, state, samples, recipe))
        task = _Task(Portable.of(self._model), *self._parts)
        for _, arrays in mapped(self._work, task, questions, memory):
            yield float(arrays["error"])


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    model: Portable
    state: QuantState
    tensors: tuple[str, ...]
    recipe: Recipe
    samples: list[Sample]
    outputs: list[Sample]

    def open(self, cores: int) -> _Opened:
        parts = self.state, self.tensors, self.recipe, self.samples, self.outputs
        return _Opened(Toggles(self.model.model(), *parts, threads=cores))


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    toggles: Toggles
    parallel: int = 1

    def __call__(self, part: Question) -> Arrays:
        return {"error": np.array(self.toggles.error(part.on, part.count))}
