"""Example inputs: one call of a module, as the user gives it, and its tensors in the order of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundel.errors import DataError
from roundel.types import Sample


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def call(self, module: Any) -> Any:
        """What the module answers."""
        return module(*self.args, **(self.kwargs or {}))

    def tensors(self) -> list[Any]:
        """All tensors, in the order of the call."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if torch.is_tensor(leaf)]

    def fed(self, names: Sequence[str]) -> Sample:
        """The tensors by the names of a graph's inputs."""
        named = dict(self.kwargs or {})
        if named and set(names) == set(named):
            return {name: array(named[name]) for name in names}
        given = self.tensors()
        if len(given) != len(names):
            raise DataError(
                "The example does not have the exported model's inputs.",
                where="example_inputs",
                observed=f"{len(given)} tensors",
                expected=", ".join(names),
            )
        return {name: array(tensor) for name, tensor in zip(names, given, strict=True)}

    def mapped(self, change: Any) -> Example:
        """Every tensor changed, all else as it is."""

        def leaf(value: Any) -> Any:
            return change(value) if torch.is_tensor(value) else value

        kwargs = None if self.kwargs is None else pytree.tree_map(leaf, dict(self.kwargs))
        return Example(pytree.tree_map(leaf, self.args), kwargs)


def examples_of(given: object) -> tuple[Example, ...]:
    """A tensor, a tuple (positional arguments), a dict (by parameter name), or a list of these.

    Raises:
        DataError: there is no example, or it is of another kind.
    """
    several = given if isinstance(given, list) else [given]
    found = tuple(_example(one) for one in several)
    if not found:
        raise DataError("There are no example inputs.", where="example_inputs", expected="at least one")
    return found


def _example(given: object) -> Example:
    if torch.is_tensor(given):
        return Example((given,))
    if isinstance(given, tuple):
        return Example(given)
    if isinstance(given, Mapping):
        return Example((), dict(given))
    raise DataError(
        "A module can be exported only with example inputs: they show its shapes and types.",
        where="example_inputs",
        observed="nothing" if given is None else f"an object of type {type(given).__name__}",
        expected="a tensor, a tuple of arguments, a dict by parameter name, or a list of such examples",
        hint="For example roundel.quantize(module, example_inputs=torch.zeros(1, 3, 224, 224), …).",
    )


def array(tensor: Any) -> Any:
    """A tensor of any device as a numpy array of its own type."""
    return tensor.detach().cpu().numpy()
