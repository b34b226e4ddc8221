"""Options that are themselves tables of options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundel.quark.errors import QuarkConfigError, expected_names
from roundel.quark.request import Request
from roundel.quark.rows import Effect, Option


def nested_effects(
    key: str, rows: Mapping[str, Option], given: Mapping[str, Any], request: Request
) -> Effect:
    """What the keys of a nested table do together, in the order of the rows.

    Raises:
        QuarkConfigError: a key is unknown, or its value wrong.
    """
    for word in given:
        if word not in rows:
            raise QuarkConfigError(
                f"There is no option '{word}' in '{key}'.",
                where=f"extra_options['{key}']",
                **expected_names(str(word), rows),
            )
    effects = [row.effect(given[word], request) for word, row in rows.items() if word in given]
    recipe = {path: value for effect in effects for path, value in effect.recipe.items()}
    notes = [effect.note for effect in effects if effect.note]
    return Effect(recipe=recipe, note="; ".join(notes) or None)
