"""Functions and commands: the same names, the same options, and results that show themselves in short."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer

import roundel
from roundel.cli.app import app
from roundel.example import load_example
from roundel.plain import Card

COMMANDS = {c.name: c for c in typer.main.get_command(app).commands.values()}  # type: ignore[attr-defined]

# What only a terminal has: how results are shown, and words for what Python says with a value of its own.
TERMINAL_ONLY = {
    "help": "",
    "about": "",
    "as_json": "the result's to_dict()",
    "quiet": "no listener, no print",
    "verbose": "the record",
    "everything": "the result has all",
    "weights": "the result has them",
    "nodes": "the result has them",
    "random": "data=roundel.RandomData(count)",
    "shape": "data=roundel.RandomData(count, shapes=…), or example_inputs=",
    "workers": "executor=roundel.executor(name, workers=…)",
    "address": "executor=roundel.executor(name, address=…)",
    "shared_files": "executor=roundel.executor(name, shared_files=…)",
}
OTHER_NAME = {"settings": "changes", ("infer", "output"): "outputs"}
# What only Python has, beside what a function hears while it works.
PYTHON_ONLY = {
    "listener",
    "on_forecast",
    "on_step",
    "on_trial",
    "options",
    "against_options",
    "example_inputs",
    "dynamic_shapes",
}
RECIPE_TOO = {"check", "inspect"}  # take a recipe where the command has presets only


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "tools"])
def test_a_function_has_the_options_of_its_command(name: str) -> None:
    parameters = inspect.signature(getattr(roundel, name.replace("-", "_"))).parameters
    told = {p.name for p in COMMANDS[name].params if p.name is not None} - set(TERMINAL_ONLY)
    told = {OTHER_NAME.get((name, word), OTHER_NAME.get(word, word)) for word in told}
    assert told <= set(parameters), "an option that Python lacks"
    more = set(parameters) - told - PYTHON_ONLY - ({"recipe"} if name in RECIPE_TOO else set())
    assert not more, "a parameter that the command lacks"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "tools"])
def test_defaults_are_those_of_the_command(name: str) -> None:
    parameters = inspect.signature(getattr(roundel, name.replace("-", "_"))).parameters
    for option in COMMANDS[name].params:
        word = OTHER_NAME.get((name, option.name), OTHER_NAME.get(option.name, option.name))
        default = parameters[word].default if word in parameters else inspect.Parameter.empty
        if default is not inspect.Parameter.empty:  # what Python needs, the command asks for, too
            assert default == option.default or (not default and not option.default), word


@pytest.mark.parametrize("name", sorted(roundel.__all__))
def test_an_editor_can_show_it(name: str) -> None:
    thing = getattr(roundel, name)
    assert not isinstance(thing, types.ModuleType)
    if inspect.isfunction(thing):
        kinds = {p.kind for p in inspect.signature(thing).parameters.values()}
        assert kinds.isdisjoint({inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL})
        assert all(p.annotation is not p.empty for p in inspect.signature(thing).parameters.values())
    assert inspect.getdoc(thing)


def test_words_of_the_data_are_parameters_and_others_are_refused() -> None:
    calls: tuple[Callable[..., Any], ...] = (roundel.quantize, roundel.forecast, roundel.sensitivity)
    for call in calls:
        assert inspect.signature(call).parameters["bgr"].default is False
        assert inspect.signature(call).parameters["mean"].kind is inspect.Parameter.KEYWORD_ONLY
        with pytest.raises(TypeError, match="'means'"):
            call("m.onnx", means=0.5)


def test_the_type_checker_sees_every_public_name() -> None:
    source = Path(roundel.__file__).read_text(encoding="utf-8")
    block = source.partition("if TYPE_CHECKING:")[2].partition("__version__")[0]
    words = set(block.replace(",", " ").replace("(", " ").replace(")", " ").split())
    assert set(roundel.__all__) <= words


# The same words mean the same everywhere.


@pytest.fixture(scope="module")
def digits() -> Path:
    return load_example().model_path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import PIL.Image

    folder = tmp_path_factory.mktemp("pictures")
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 24), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def result(digits: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("out") / "q.onnx"
    words: dict[str, Any] = {"mean": 0.5, "std": (0.5,), "resize": (16, 16), "samples": 2}
    return roundel.quantize(digits, out, preset="a8w8_minmax", data=pictures, effort="none", **words)


def test_words_of_the_data_are_recorded(result: Any) -> None:
    recorded = result.record.to_dict()["recipe"]["data"]
    assert (recorded["mean"], recorded["std"], recorded["resize"]) == ([0.5], [0.5], [16, 16])
    assert (recorded["samples"], recorded["bgr"]) == (2, False)


def test_words_and_a_recipe_make_the_same_run(digits: Path, pictures: Path, result: Any) -> None:
    section = {"mean": [0.5], "std": [0.5], "resize": [16, 16], "samples": 2}
    recipe = {"extends": "a8w8_minmax", "effort": "none", "data": section}
    again = roundel.quantize(digits, recipe=recipe, data=pictures)
    assert again.model.SerializeToString() == result.model.SerializeToString()


WORDS: dict[str, Any] = {"mean": 0.5, "std": 0.5, "resize": 16, "crop": 16}
LOOKS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("compare", lambda m, q, d, **w: roundel.compare(m, q, d, **w).data),
    ("infer", lambda m, q, d, **w: roundel.infer(m, d, w.pop("out"), **w).files),
    ("evaluate", lambda m, q, d, **w: [score.rows for score in roundel.evaluate([m, q], d, **w)]),
    ("lint_data", lambda m, q, d, **w: roundel.lint_data(m, d, **w).to_dict()["samples"]),
    ("sensitivity", lambda m, q, d, **w: roundel.sensitivity(m, data=d, look=1, **w).to_dict()["samples"]),
)


@pytest.mark.parametrize(("name", "look"), LOOKS, ids=[name for name, _ in LOOKS])
def test_words_of_the_data_reach_every_function(
    name: str, look: Callable[..., Any], digits: Path, pictures: Path, result: Any, tmp_path: Path
) -> None:
    more = {"out": tmp_path / "out"} if name == "infer" else {}
    found = look(digits, result.path, pictures, **WORDS, **more, samples=2)
    if name == "compare":
        assert "centre crop 16x16" in str(found["preprocessing"])
    elif name in ("infer", "evaluate"):
        assert len(found) == 2
    with pytest.raises(roundel.RecipeError, match="scale"):
        look(digits, result.path, pictures, scale="loud", **more)


def test_two_recipes_are_one_too_many(digits: Path) -> None:
    calls: tuple[Callable[..., Any], ...] = (
        roundel.quantize,
        roundel.forecast,
        roundel.check,
        roundel.explain,
        roundel.inspect,
        roundel.sensitivity,
    )
    for call in calls:
        with pytest.raises(roundel.RecipeError, match="Both"):
            call(digits, preset="a8w8", recipe="a16w8")


def test_what_stays_float_has_the_same_words(digits: Path) -> None:
    data = load_example().calibration[:2]
    options: dict[str, Any] = {"include": ["stem*"], "changes": {"weights.type": "uint8"}, "effort": "none"}
    made = roundel.quantize(digits, data=data, **options).record.counts["quantized_nodes"]
    assert made == {"Conv": 1, "Clip": 1}
    plan = roundel.explain(digits, include=["stem*"])
    assert sum(node.quantized for node in plan.nodes.values()) == 2
    cut = ("block0_expand_conv->block0_project_conv",)
    left = roundel.quantize(digits, data=data, exclude_subgraph=cut, effort="none").record.float_nodes
    assert "excluded subgraph" in left["block0_depthwise_conv"]
    with pytest.raises(roundel.RecipeError, match="group"):
        roundel.quantize(digits, data=data, include=["stem*"], changes={"selection": 1})


def test_presets_are_recipes() -> None:
    assert tuple(roundel.presets()) == roundel.preset_names()
    assert roundel.presets("A16W8")["a16w8"].activations.type == "int16"


def test_one_tensor_is_explained(digits: Path) -> None:
    plan = roundel.explain(digits, preset="a16w8", tensor="logits")
    assert list(plan.tensors) == ["logits"]
    with pytest.raises(roundel.SelectionError):
        roundel.explain(digits, tensor="logit")


def test_a_run_and_its_page(digits: Path, tmp_path: Path) -> None:
    data = load_example().calibration[:2]
    roundel.quantize(digits, tmp_path / "q.onnx", data=data, effort="none", report=tmp_path / "r.html")
    assert "q.onnx" in (tmp_path / "r.html").read_text(encoding="utf-8")
    with pytest.raises(roundel.DataError, match="report"):
        roundel.quantize(digits, tmp_path / "p.onnx", preset="bf16", report=tmp_path / "s.html")
    assert not (tmp_path / "p.onnx").exists()


# Results at a prompt and in a notebook.


def shown(digits: Path, result: Any, folder: Path) -> dict[str, Card]:
    log = folder / "session.log"
    log.write_text("[Vitis AI EP] No. of Operators : CPU 3 NPU 40 VITIS_EP_CPU 2\n")
    return {
        "quantize": result,
        "check": roundel.check(digits, preset="xint8"),
        "inspect": roundel.inspect(digits),
        "convert": roundel.convert(digits, folder / "b.onnx", data=load_example().calibration[:2]),
        "deploy": roundel.deploy(digits, folder / "kit"),
        "npu_report": roundel.npu_report(log, model=result.path),
        "reproduce": roundel.reproduce(result.path.with_suffix(".json")),
    }


class Balanced(HTMLParser):
    """Fails where tags do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def displayed(value: Any) -> dict[str, str]:
    """What a notebook shows of the last value of a cell: its text, and its HTML where it has some."""
    rich = getattr(value, "_repr_html_", None)
    return {"text/plain": repr(value), **({"text/html": rich()} if rich is not None else {})}


def test_results_are_small_cards(digits: Path, result: Any, tmp_path: Path) -> None:
    for name, value in shown(digits, result, tmp_path).items():
        bundle = displayed(value)
        text, page = bundle["text/plain"], bundle["text/html"]
        assert 2 <= len(text.splitlines()) <= 6, f"{name}: {text}"
        assert len(text) < 700, name
        assert text.splitlines()[0] == type(value).__name__
        assert len(page) < 3000, name
        reader = Balanced()
        reader.feed(page)
        assert not reader.open
        assert reader.seen.count("tr") == len(text.splitlines()) - 1
        json.dumps(bundle)


def test_what_a_card_says(result: Any) -> None:
    text = repr(result)
    assert "digits.onnx -> q.onnx" in text
    assert "a8w8_minmax, " in text
    assert " dB at output logits" in text
    assert "note" in text


def test_names_in_a_card_are_no_markup(tmp_path: Path) -> None:
    proto = onnx.load(load_example().model_path)
    proto.graph.input[0].name = "<script>alert(1)</script>"
    proto.graph.node[0].input[0] = "<script>alert(1)</script>"
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    page = roundel.inspect(path)._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
