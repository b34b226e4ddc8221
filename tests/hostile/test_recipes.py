"""Recipes that are wrong, and recipes that mean harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundel.errors import RecipeError, SelectionError
from roundel.recipe.load import load_recipe


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def put(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return put


def test_a_recipe_s_text_in_place_of_its_path(refused: Any, model: Path) -> None:
    assert (
        "There is no preset 'extends: a8w8"
        in refused(model, RecipeError, recipe="extends: a8w8\n" * 300).what
    )


def test_an_unknown_preset(refused: Any, model: Path) -> None:
    error = refused(model, RecipeError, recipe="a8w9")
    assert "'a8w9'" in error.what
    assert "a16w8" in error.expected
    assert "'a8w8'" in error.hint


@pytest.mark.parametrize(
    ("changes", "key", "suggested"),
    [
        ({"weight": {}}, "weight", "'weights'"),
        ({"weights": {"typ": "int8"}}, "weights.typ", "'type'"),
        ({"prepare": {"fold_batchnorm": True}}, "prepare.fold_batchnorm", "'fold_batch_norm'"),
        ({"overrides": [{"tensor": ["x"], "type": "int8"}]}, "overrides.0.tensor", "'tensors'"),
        (
            {"selection": {"exclude_subgraphs": [{"inputs": ["a"], "output": ["b"]}]}},
            "selection.exclude_subgraphs.0.output",
            "'outputs'",
        ),
    ],
)
def test_an_unknown_key(refused: Any, model: Path, changes: Any, key: str, suggested: str) -> None:
    error = refused(model, RecipeError, changes=changes)
    assert f"'{key}'" in error.what
    assert suggested in error.hint


def test_a_wrong_value(refused: Any, model: Path) -> None:
    error = refused(model, RecipeError, changes={"calibration": {"method": "minmx"}})
    assert "'calibration.method'" in error.what
    assert error.observed == "'minmx'"
    assert "entropy" in error.expected
    assert "'minmax'" in error.hint


@pytest.mark.parametrize("bound", [float("nan"), float("inf")])
def test_a_range_that_is_not_finite(refused: Any, model: Path, bound: float) -> None:
    changes = {"overrides": [{"tensors": ["x"], "range": [-1.0, bound]}]}
    assert "finite" in refused(model, RecipeError, changes=changes).expected


def test_an_unknown_node(refused: Any, model: Path) -> None:
    error = refused(model, SelectionError, exclude=["covn"])
    assert "'covn'" in error.what
    assert error.where == "selection.exclude"
    assert "'conv'" in error.hint


def test_an_unknown_operator_in_a_selector(refused: Any, model: Path) -> None:
    error = refused(model, SelectionError, exclude=["op:Rlu"])
    assert "'Rlu'" in error.what
    assert "Relu" in error.expected
    assert "'Relu'" in error.hint


def test_an_unknown_operator_type(refused: Any, model: Path) -> None:
    error = refused(model, SelectionError, changes={"selection": {"op_types": ["Convv"]}})
    assert "'Convv'" in error.what
    assert "'Conv'" in error.hint


def test_an_unknown_tensor_in_an_override(refused: Any, model: Path) -> None:
    changes = {"overrides": [{"tensors": ["yy"], "type": "int16"}]}
    error = refused(model, SelectionError, changes=changes)
    assert error.where == "overrides[0].tensors"
    assert "'y'" in error.hint


def test_an_invalid_regular_expression(refused: Any, model: Path) -> None:
    assert "regular expression" in refused(model, SelectionError, exclude=["re:("]).what


def test_a_subgraph_without_a_path(refused: Any, model: Path) -> None:
    changes = {"selection": {"exclude_subgraphs": [{"inputs": ["fc"], "outputs": ["conv"]}]}}
    error = refused(model, SelectionError, changes=changes)
    assert "No path" in error.what
    assert "fc -> conv" in error.observed


def test_a_missing_recipe_file(refused: Any, model: Path, tmp_path: Path) -> None:
    error = refused(model, RecipeError, recipe=tmp_path / "none.yaml")
    assert "does not exist" in error.what
    assert "none.yaml" in error.where


def test_a_preset_given_as_a_file(refused: Any, model: Path) -> None:
    assert "--preset a8w8" in refused(model, RecipeError, recipe=Path("a8w8")).hint


def test_a_folder_as_recipe(refused: Any, model: Path, tmp_path: Path) -> None:
    assert "is a folder" in refused(model, RecipeError, recipe=tmp_path).what


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (BOMB, "aliases are not allowed"),
        ("name: !!python/object/apply:os.system ['touch owned']", "could not determine a constructor"),
        ("name: !!python/name:os.system", "could not determine a constructor"),
        ("[" * 5000, "recursion"),
        ("{" + '"a":{' * 100_000, "recursion"),
        ("a: [}", "expected"),
        ("\x00\x01\x02", "special characters"),
    ],
    ids=["bomb", "object", "name", "nesting", "json nesting", "syntax", "binary"],
)
def test_a_file_that_cannot_be_parsed(write: Any, text: str, seen: str) -> None:
    path = write(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.what == "The recipe file cannot be parsed."
    assert caught.value.where == str(path)
    assert seen in caught.value.observed
    assert len(caught.value.observed) <= 300


def test_nesting_that_the_parser_survives(write: Any) -> None:
    for depth in (20, 100, 150):
        path = write("a: " + "[" * depth + "]" * depth)
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        assert caught.value.what == "Unknown recipe key 'a'."


def test_a_file_of_two_megabytes(write: Any) -> None:
    path = write("# " + "x" * 2_000_000)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "too large" in caught.value.what
    assert "2000002 bytes" in caught.value.observed
    assert "1000000" in caught.value.expected


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "42", "just words"])
def test_a_file_that_is_no_mapping(write: Any, text: str) -> None:
    with pytest.raises(RecipeError, match="not a mapping"):
        load_recipe(write(text))


def test_keys_that_are_no_text(write: Any) -> None:
    with pytest.raises(RecipeError):
        load_recipe(write("1: 2\n"))


def test_extending_what_is_no_preset(write: Any) -> None:
    path = write("extends: a8w9\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "'a8w9', which is not a preset" in caught.value.what
    assert caught.value.where == str(path)
    assert "'a8w8'" in (caught.value.hint or "")
