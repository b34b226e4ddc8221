"""What the page carries: figures in words and numbers, and nothing that a browser could take for markup."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import roundel
from comparison_models import images, ort_quantized, residual_net
from report_pages import level_of, made_up
from roundel.errors import DataError, OutputError, RecipeError
from roundel.measure.types import Comparison
from roundel.recipe.load import load_recipe
from roundel.report.html import ReportContent, render
from roundel.report.html.layers import thinned
from roundel.report.html.values import causes, origin


def carried(page: str) -> dict[str, Any]:
    """The values inside a page."""
    found = re.search(r'<script type="application/json" id="values">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    tree = json.loads(found[1])
    assert isinstance(tree, dict)
    return tree


@pytest.fixture(scope="module")
def result() -> roundel.QuantizeResult:
    return roundel.quantize(residual_net(), recipe="xint8", data=images())


def test_a_run_brings_everything(result: roundel.QuantizeResult, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    found = roundel.write_report(file, residual_net(), result, images())
    tree = carried(file.read_text(encoding="utf-8"))
    assert tree["quantized"]["name"] == "in memory"
    assert [layer["tensor"] for layer in tree["layers"]] == [tensor.name for tensor in found.tensors]
    assert tree["preset"]["name"] == "xint8"
    assert [step["name"] for step in tree["steps"]] == [s.step for s in result.record.improvements]
    assert tree["npu"]["device"] == "stx"
    assert load_recipe(_yaml(tree["recipe"])).model_dump(mode="json") == result.record.recipe
    assert any(weight.get("before") for weight in tree["weights"])
    assert "--recipe recipe.yaml" in tree["command"]


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    tree = yaml.safe_load(text)
    assert isinstance(tree, dict)
    return tree


def test_a_model_of_another_tool_has_neither_recipe_nor_steps(tmp_path: Path) -> None:
    quantized = ort_quantized(residual_net(), tmp_path, images())
    file = tmp_path / "report.html"
    roundel.write_report(file, residual_net(), quantized, images(), device="krk")
    tree = carried(file.read_text(encoding="utf-8"))
    assert tree["recipe"] is tree["steps"] is tree["preset"] is None
    assert tree["npu"]["device"] == "krk"
    assert tree["layers"]


def test_scores_on_labels(result: roundel.QuantizeResult, tmp_path: Path) -> None:
    float_file, file = tmp_path / "float.onnx", tmp_path / "q.onnx"
    float_file.write_bytes(residual_net().SerializeToString())
    result.save(file)
    labels = {"x": images()[0]["x"]}, [2]
    scores = roundel.evaluate_models([float_file, file], [labels[0]], labels=labels[1])
    roundel.write_report(tmp_path / "r.html", float_file, file, images(), scores=scores)
    tree = carried((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert [score["model"] for score in tree["scores"]] == ["float.onnx", "q.onnx"]
    assert tree["preset"]["name"] == "xint8"  # from the record beside the file


def test_a_format_that_no_npu_takes_says_so(tmp_path: Path) -> None:
    result = roundel.quantize(residual_net(), recipe="mxfp8e4m3", data=images(), effort="none")
    file = tmp_path / "r.html"
    roundel.write_report(file, residual_net(), result, images())
    tree = carried(file.read_text(encoding="utf-8"))
    assert tree["npu"] is None
    assert tree["unchecked"].startswith("The NPU's compilers take no mxfp8e4m3 activations.")


def test_names_cannot_leave_their_strings() -> None:
    evil = "</script><img src=x onerror=alert(1)>&amp;<!--{0}"
    page = render(ReportContent(replace(made_up(4, name=evil), float_model=evil)))
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert carried(page)["layers"][1]["name"] == evil.format(1)


def test_only_the_scripts_of_the_page_may_run() -> None:
    page = render(ReportContent(made_up(3)))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    for kind, tag in (("script", "<script>"), ("style", "<style>")):
        text = page.split(tag)[1].split(f"</{kind}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_a_page_names_no_folder() -> None:
    page = render(ReportContent(made_up(3)))
    assert "/home/someone" not in page
    assert carried(page)["samples"]["words"] == "folder images"


def test_the_same_run_gives_the_same_page() -> None:
    assert render(ReportContent(made_up(20))) == render(ReportContent(made_up(20)))


def test_figures_that_are_not_finite_travel_as_words() -> None:
    comparison = made_up(3)
    odd = replace(
        comparison.tensors[1], introduced=level_of(math.inf), inherited=None, total=level_of(-math.inf)
    )
    odd = replace(odd, rounding=replace(level_of(1), sqnr_db=math.nan))
    tensors = (comparison.tensors[0], odd, comparison.tensors[2])
    layer = carried(render(ReportContent(replace(comparison, tensors=tensors))))["layers"][1]
    figures = [layer[key] for key in ("introduced", "inherited", "total", "rounding")]
    assert figures == ["inf", None, "-inf", "nan"]


def test_many_channels_are_thinned_to_the_union_of_neighbours() -> None:
    assert thinned([(-1, 1), (-3, 2), (-2, 5)], 2) == [(-3, 2), (-2, 5)]
    assert thinned([(-1, 1)], 8) == [(-1, 1)]


def test_a_large_model_has_a_small_page() -> None:
    assert len(render(ReportContent(made_up(60, channels=4096)))) < 2_500_000


class TestWords:
    """What the figures mean."""

    @staticmethod
    def tensor(**changes: Any) -> Any:
        plain = {"saturated": 0.0, "range_use": 0.9, "worst_channels": ()}
        return replace(made_up(4).tensors[2], **(plain | changes))

    def test_where_an_error_comes_from(self) -> None:
        made = self.tensor(introduced=level_of(20), inherited=level_of(30))
        passed = self.tensor(introduced=level_of(30), inherited=level_of(20))
        assert origin(made) == "91 % of its error power is made here."
        assert origin(passed) == "91 % of its error power comes from its inputs."

    def test_what_makes_it(self) -> None:
        weights = made_up(2).weights
        by_weights = self.tensor(introduced=level_of(20), rounding=level_of(40))
        by_storing = self.tensor(introduced=level_of(20), rounding=level_of(20.1))
        assert causes(by_weights, weights) == (
            "99 % of what it adds comes from its weights, not from storing the result.",
        )
        assert causes(by_weights, ())[0].split("from ")[1] == "its arithmetic, not "
        assert causes(by_storing, weights) == ("98 % of what it adds comes from storing the result as int8.",)

    def test_what_the_range_does(self) -> None:
        found = causes(self.tensor(saturated=0.02, range_use=0.3), ())
        assert found[1:] == (
            "The range cuts off 2 % of the values.",
            "The values span only 30 % of the stored range.",
        )

    def test_what_cannot_be_told(self) -> None:
        assert "cannot be told apart" in origin(self.tensor(introduced=None, inherited=None))

    def test_an_exact_layer(self) -> None:
        silent = replace(level_of(math.inf), mse=0.0)
        assert origin(self.tensor(introduced=silent, inherited=silent)).startswith("Exact")
        assert causes(self.tensor(introduced=silent, inherited=silent), ()) == ()


class TestRefusals:
    """Before anything runs."""

    def test_no_data(self, result: roundel.QuantizeResult, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no data"):
            roundel.write_report(tmp_path / "r.html", residual_net(), result, None)

    def test_an_unknown_device(self, result: roundel.QuantizeResult, tmp_path: Path) -> None:
        with pytest.raises(RecipeError):
            roundel.write_report(tmp_path / "r.html", residual_net(), result, images(), device="nope")
        assert not (tmp_path / "r.html").exists()

    @pytest.mark.parametrize("name", ["q.onnx", "q.json"])
    def test_over_the_model(self, result: roundel.QuantizeResult, tmp_path: Path, name: str) -> None:
        file = result.save(tmp_path / "q.onnx")
        before = (tmp_path / name).read_bytes()
        with pytest.raises(OutputError, match="overwrite"):
            roundel.write_report(tmp_path / name, residual_net(), file, images())
        assert (tmp_path / name).read_bytes() == before


def test_a_comparison_that_was_saved_makes_the_same_page() -> None:
    comparison = made_up(5)
    again = Comparison.from_dict(json.loads(json.dumps(comparison.to_dict())))
    assert render(ReportContent(again)) == render(ReportContent(comparison))
