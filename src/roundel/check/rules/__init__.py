"""The rules, in the order of their numbers."""

from roundel.check.rules import (
    activations,
    bias,
    files,
    finished,
    graphs,
    heads,
    operators,
    positions,
    targets,
)
from roundel.check.types import Rule

_FAMILIES = (files, graphs, operators, activations, heads, targets, bias, finished, positions)

RULES: tuple[Rule, ...] = tuple(
    sorted((rule for family in _FAMILIES for rule in family.RULES), key=lambda rule: rule.id)
)

__all__ = ["RULES"]
