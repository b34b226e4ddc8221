"""Every field of the recipe changes something that can be seen; a field without a case fails here."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import roundel
from helpers import feeds
from roundel.recipe.load import load_recipe
from roundel.recipe.settings import Recipe

sys.path.insert(0, str(Path(__file__).parent))
from field_cases import CASES, Case

# Words about the recipe itself; the tests below say where they show.
ABOUT = {"version", "name", "title"}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone or in a tuple."""
    for found in (annotation, *get_args(annotation)):
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None


def leaves(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields; a tuple of sections counts itself and its sections' fields."""
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or field.annotation is not inner:
            yield prefix + name
        if inner is not None:
            yield from leaves(inner, f"{prefix}{name}.")


TUNED = "improve.finetune."  # needs torch: tests/unit/improve/test_finetune_options.py has these


def test_every_tuning_field_has_a_test() -> None:
    source = (Path(__file__).parents[1] / "improve" / "test_finetune_options.py").read_text()
    names = [name.removeprefix(TUNED) for name in leaves() if name.startswith(TUNED)]
    assert names
    assert [name for name in names if name not in source] == []


def test_every_field_has_a_case() -> None:
    fields = {name for name in set(leaves()) - ABOUT if not name.startswith(TUNED)}
    assert fields - set(CASES) == set(), "these fields have no case: nothing proves that they do anything"
    assert set(CASES) - fields == set(), "these cases are of no field"


def settings(case: Case, name: str, value: Any) -> dict[str, Any]:
    """The case's base with the field set; a field of a listed section is set with its whole list."""
    parts = name.split(".")
    holder = Recipe.model_fields[parts[0]]
    if holder.annotation is not section_of(holder.annotation):
        parts = parts[:1]
    elif parts[:2] == ["selection", "exclude_subgraphs"]:
        parts = parts[:2]
    tree = copy.deepcopy(case.base)
    if value is None:
        return tree
    inner = tree
    for part in parts[:-1]:
        inner = inner.setdefault(part, {})
    inner[parts[-1]] = value
    return tree


def observed(case: Case, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a user can see of a run: files, plan and record, but for the recipe and the clock."""
    folder.mkdir()
    model = case.model()
    if case.data is not None:
        data = case.data()
    else:
        data = feeds({v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input})
    result = roundel.quantize(model, folder / "y.onnx", recipe=case.recipe, data=data, changes=changes)
    record = result.record.to_dict()
    facts = {
        k: v for k, v in record["data"].items() if k not in ("forward_seconds", "limit", "preprocessing")
    }
    return {
        "files": {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".json"},
        "plan": str(result.plan),
        "data": facts,
        "rest": [record[key] for key in ("quantized", "counts", "prepare", "outputs")],
    }


@pytest.mark.parametrize("name", CASES)
def test_the_field_changes_something(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    before = observed(case, settings(case, name, case.before), tmp_path / "before")
    again = observed(case, settings(case, name, case.before), tmp_path / "again")
    assert before == again, "the run does not repeat: a difference would prove nothing"
    after = observed(case, settings(case, name, case.after), tmp_path / "after")
    assert after != before


def test_the_name_is_recorded(tmp_path: Path) -> None:
    case = CASES["activations.type"]
    result = roundel.quantize(case.model(), recipe={"name": "mine"}, data=feeds({"x": [1, 3, 8, 8]}))
    assert result.record.to_dict()["recipe"]["name"] == "mine"


def test_the_title_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from roundel.cli.look import presets_command

    presets_command(None, as_json=True)
    assert load_recipe("a8w8").title in capsys.readouterr().out


def test_another_version_is_refused() -> None:
    with pytest.raises(roundel.RecipeError) as caught:
        load_recipe({"version": 2})
    assert "'version'" in caught.value.what
    assert caught.value.observed == "2"
