"""Recipes from presets, files and mappings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundel.errors import RecipeError
from roundel.recipe.load import RECORD_VERSION, dump_yaml, load_preset, load_recipe, preset_names, validate
from roundel.recipe.settings import Recipe, merge

FOLDER = Path(__file__).parents[3] / "src" / "roundel" / "presets"


def test_every_file_is_a_preset() -> None:
    tuned = {name for name in preset_names() if name.endswith(("_adaround", "_adaquant"))}
    assert len(tuned) == 26
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(preset_names()) - tuned


def test_a_tuned_preset_is_its_base_and_an_algorithm() -> None:
    base, tuned = load_recipe("xint8"), load_recipe("xint8_adaround")
    assert tuned.title.startswith("XINT8 with AdaRound")
    changes = {"name": tuned.name, "title": tuned.title, "effort": "high"}
    assert tuned == base.merged({**changes, "improve": {"finetune": {"algorithm": "adaround"}}})
    with pytest.raises(RecipeError, match="no preset 'mx4_adaround'"):
        load_recipe("mx4_adaround")
    assert {"a8w8", "a16w8", "uint8_dynamic_quant"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_with_name_and_title(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert len(recipe.title) > 10
    assert load_preset(name) == recipe


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_survives_yaml_and_json(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    (tmp_path / "copy.yaml").write_text(dump_yaml(recipe))
    assert load_recipe(tmp_path / "copy.yaml") == recipe
    (tmp_path / "copy.json").write_text(json.dumps(recipe.model_dump(mode="json")))
    assert load_recipe(tmp_path / "copy.json") == recipe
    assert load_recipe(recipe.model_dump()) == recipe


def test_presets_differ() -> None:
    seen = [load_recipe(name).model_dump(exclude={"name", "title"}) for name in preset_names()]
    assert all(one not in seen[:index] for index, one in enumerate(seen))


def test_a_recipe_with_every_kind_of_value_survives_yaml(tmp_path: Path) -> None:
    recipe = load_recipe(
        {
            "name": "all: kinds, 'quoted'",
            "overrides": [{"tensors": ["a*", "re:^b"], "range": [-1.5, 2]}],
            "selection": {
                "exclude": ["op:Softmax"],
                "exclude_subgraphs": [{"inputs": ["a"], "outputs": ["b"]}],
            },
            "prepare": {"fixed_shapes": {"x": [1, 3], "n": [4]}},
            "data": {"resize": [8, 9], "crop": 7, "mean": [0.1, 0.2, 0.3]},
            "calibration": {"moving_average": 0.01, "candidates": [99, 99.5]},
        }
    )
    path = tmp_path / "all.yaml"
    path.write_text(dump_yaml(recipe))
    assert load_recipe(path) == recipe
    assert "&" not in path.read_text(), "aliases are refused when the file is read"


@pytest.mark.parametrize("spelling", ["A8W8", "a8w8", "Int8-CNN-Default", "INT8_CNN_DEFAULT"])
def test_names_in_any_case_and_with_dashes(spelling: str) -> None:
    assert load_recipe(spelling).name == spelling.lower().replace("-", "_")


def test_extending_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: A16-W8\nweights: {per_channel: true}\n".replace("A16-W8", "A16W8"))
    mine, base = load_recipe(path), load_recipe("a16w8")
    assert mine.weights == base.weights.model_copy(update={"per_channel": True})
    assert mine.activations == base.activations
    assert mine.placement == base.placement
    assert mine.name == "mine", "a changed preset must not pass for the preset itself"


@pytest.mark.parametrize("algorithm", ["adaround", "adaquant"])
@pytest.mark.parametrize(
    "base", ["xint8", "a8w8", "a16w8", "s8s8_aaws", "u8s8_aaws", "s16s8_asws", "u16s8_aaws"]
)
def test_fine_tuning_by_the_documents_names(base: str, algorithm: str) -> None:
    tuned = load_recipe(f"{base}_{algorithm}".upper())
    assert tuned.finetuning == algorithm
    settings = tuned.improve.finetune
    found = (settings.iterations, settings.batch_size, settings.data_size, settings.seed, settings.early_stop)
    assert found == (1000, 2, 1000, 1705472343, True)
    plain = {"effort": "fast", "improve": {"finetune": {"algorithm": "none"}}}
    base_recipe = load_recipe(base).merged({"effort": "fast"})
    about = {"name", "title"}
    assert tuned.merged(plain).model_dump(exclude=about) == base_recipe.model_dump(exclude=about)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("family", ["cnn", "transformer"])
def test_the_accurate_presets_learn_their_rounding(bits: int, family: str) -> None:
    accurate = load_recipe(f"int{bits}_{family}_accurate")
    base = load_recipe(f"int{bits}_{family}_default")
    assert accurate.finetuning == "adaround"
    assert accurate.calibration == base.calibration.model_copy(
        update={"method": "percentile", "percentile": 99.9999, "moving_average": None}
    )
    assert (accurate.activations, accurate.weights) == (base.activations, base.weights)


def test_a_preset_that_extends_a_preset() -> None:
    child, base = load_recipe("int8_cnn_accurate"), load_recipe("u8s8_aaws")
    assert child.calibration.percentile == 99.9999
    assert child.calibration.method == base.calibration.method
    assert child.placement == base.placement


def test_changes_win_over_the_source() -> None:
    recipe = load_recipe("a8w8", {"activations": {"type": "uint8"}})
    assert recipe.activations.type == "uint8"
    assert recipe.activations.symmetric is load_recipe("a8w8").activations.symmetric
    assert recipe.placement.align_concat is True


def test_changes_to_a_recipe_leave_it_as_it_was() -> None:
    recipe = load_recipe("a8w8")
    other = load_recipe(recipe, {"weights": {"per_channel": True}})
    assert other.weights.per_channel
    assert not recipe.weights.per_channel
    assert load_recipe(recipe) is recipe
    assert recipe.merged({"weights": {"per_channel": True}}) == other


def test_sources_are_not_changed() -> None:
    source = {"extends": "a8w8", "prepare": {"fixed_shapes": {"x": [1]}}}
    changes = {"prepare": {"fixed_shapes": {"y": [2]}}}
    recipe = load_recipe(source, changes)
    assert recipe.prepare.fixed_shapes == {"x": (1,), "y": (2,)}
    assert source == {"extends": "a8w8", "prepare": {"fixed_shapes": {"x": [1]}}}
    assert changes == {"prepare": {"fixed_shapes": {"y": [2]}}}


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("a8w8").mode = "dynamic"  # type: ignore[misc]


def test_merge_replaces_lists_and_merges_mappings() -> None:
    assert merge({"a": {"b": [1], "c": 2}}, {"a": {"b": [3]}, "d": {}}) == {"a": {"b": [3], "c": 2}, "d": {}}
    assert merge({"a": {"b": 1}}, {"a": 5}) == {"a": 5}


def test_the_default_recipe_is_written_in_full_enough_to_read() -> None:
    assert yaml.safe_load(dump_yaml(Recipe())) == {"version": 1, "name": "custom"}


@pytest.mark.parametrize(
    ("tree", "key", "suggested"),
    [
        ({"extend": "a8w8"}, "extend", "extends"),
        ({"calibrations": {}}, "calibrations", "calibration"),
        ({"calibration": {"metod": 1}}, "calibration.metod", "method"),
        ({"prepare": {"fuse_gellu": True}}, "prepare.fuse_gellu", "fuse_gelu"),
        ({"overrides": [{"tensors": ["a"], "typ": "int8"}]}, "overrides.0.typ", "type"),
        (
            {"selection": {"exclude_subgraphs": [{"input": ["a"], "outputs": ["b"]}]}},
            "selection.exclude_subgraphs.0.input",
            "inputs",
        ),
    ],
)
def test_unknown_keys_at_every_depth(tree: dict[str, Any], key: str, suggested: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(tree)
    assert f"Unknown recipe key '{key}'" in caught.value.what
    assert f"'{suggested}'" in (caught.value.hint or "")
    assert suggested in (caught.value.expected or "")
    assert caught.value.where == "the recipe mapping"


def test_several_faults_are_counted() -> None:
    with pytest.raises(RecipeError, match="and 2 more"):
        load_recipe({"a": 1, "b": 2, "c": 3})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"overrides": [{"tensors": ["a"]}]}, "needs 'type'"),
        ({"overrides": [{"type": "int8"}]}, "needs 'tensors' or 'nodes'"),
        ({"overrides": [{"tensors": ["a"], "range": [1, 1]}]}, "low < high"),
        ({"data": {"samples": 0}}, "greater than or equal to 1"),
        ({"calibration": {"percentile": 40}}, "greater than 50"),
        ({"weights": "int8"}, "Weights"),
    ],
)
def test_values_that_make_no_sense(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(tree)
    assert words in (caught.value.expected or "")


def test_where_a_fault_is(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("weights: {tpye: int8}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.where == str(path)
    with pytest.raises(RecipeError) as caught:
        validate({"x": 1}, "over there")
    assert caught.value.where == "over there"


def test_changes_with_dots_are_nested_ones() -> None:
    dotted = load_recipe("a8w8", {"weights.type": "int16", "data.samples": 7, "effort": "none"})
    nested = load_recipe("a8w8", {"weights": {"type": "int16"}, "data": {"samples": 7}, "effort": "none"})
    assert dotted == nested
    assert load_recipe(dotted, {"data.samples": 9}).data.samples == 9


@pytest.mark.parametrize("name", ["xint8", "a8w8", "mine"])
def test_a_record_decides_only_what_was_decided(tmp_path: Path, name: str) -> None:
    """It holds every field; the next run's --device and effort may still set those that a preset left."""
    ran = load_recipe("xint8" if name == "mine" else name, {"name": name, "npu.clip_to_relu": True})
    file = tmp_path / "m.json"
    file.write_text(json.dumps({"record_version": RECORD_VERSION, "recipe": ran.model_dump(mode="json")}))
    again = load_recipe(file)
    assert again.model_dump() == ran.model_dump()
    assert again.own["npu"]["clip_to_relu"]
    assert "sigmoid_to_hard_sigmoid" not in again.own["npu"] or name == "mine"
