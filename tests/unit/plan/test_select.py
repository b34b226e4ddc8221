"""Words that select nodes and tensors, and the errors for words that select nothing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest

from helpers import build, node, normal, plan_of
from roundel.errors import SelectionError


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """stem -> Relu -> head1, head2 -> Add, all named as exporters do."""
    nodes = [
        node("Conv", ["x", "w0"], ["stem_out"], name="/stem/conv"),
        node("Relu", ["stem_out"], ["relu_out"], name="/stem/relu"),
        node("Conv", ["relu_out", "w1"], ["a"], name="/head1/conv"),
        node("Conv", ["relu_out", "w2"], ["b"], name="/head2/conv"),
        node("Add", ["a", "b"], ["y"], name="/join"),
    ]
    weights = {f"w{i}": normal(4, 4, 1, 1, seed=i) for i in range(3)}
    return build(nodes, {"x": [1, 4, 5, 5]}, ["y"], weights)


def _excluded(model: onnx.ModelProto, *words: str, **selection: object) -> set[str]:
    plan = plan_of(model, selection={"exclude": list(words), **selection})
    return {name for name, verdict in plan.nodes.items() if not verdict.quantized}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/stem/conv", {"/stem/conv"}),
        ("/head*", {"/head1/conv", "/head2/conv"}),
        ("/head?/conv", {"/head1/conv", "/head2/conv"}),
        ("re:^/(stem|head1)/conv$", {"/stem/conv", "/head1/conv"}),
        ("re:head", {"/head1/conv", "/head2/conv"}),
        ("op:Conv", {"/stem/conv", "/head1/conv", "/head2/conv"}),
        ("op:Add", {"/join"}),
        ("a", {"/head1/conv"}),  # the tensor that the node makes
        ("[ab]", {"/head1/conv", "/head2/conv"}),
    ],
)
def test_exclude(model: onnx.ModelProto, word: str, expected: set[str]) -> None:
    left = _excluded(model, word)
    # A Relu behind a float Conv is not reached by anything quantized, except through its readers.
    assert left - {"/stem/relu"} == expected


def test_the_reason_names_the_word(model: onnx.ModelProto) -> None:
    plan = plan_of(model, selection={"exclude": ["/head*"]})
    assert plan.nodes["/head2/conv"].reason == "excluded by '/head*'"
    assert plan.nodes["/stem/conv"].reason == "quantized"


def test_include_leaves_the_rest(model: onnx.ModelProto) -> None:
    plan = plan_of(model, selection={"include": ["op:Add"]})
    assert [name for name, v in plan.nodes.items() if v.quantized] == ["/join"]
    assert plan.nodes["/stem/conv"].reason == "not among the included nodes"
    assert set(plan.tensors) == {"a", "b", "y"}


def test_exclusion_wins_over_inclusion(model: onnx.ModelProto) -> None:
    plan = plan_of(model, selection={"include": ["op:Conv"], "exclude": ["/stem/conv"]})
    assert [name for name, v in plan.nodes.items() if v.quantized] == ["/head1/conv", "/head2/conv"]


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("/stem/cov", "/stem/conv"),
        ("stem_oud", "stem_out"),
        ("op:conv", "Conv"),
        ("/nothing/*", "--nodes"),
        ("re:^nothing$", "--nodes"),
    ],
)
def test_words_that_match_nothing(model: onnx.ModelProto, word: str, suggestion: str) -> None:
    with pytest.raises(SelectionError) as caught:
        _excluded(model, word)
    assert suggestion in str(caught.value.hint)
    assert caught.value.where == "selection.exclude"


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "^(a|aa)+$", "a*" * 30 + "$"])
def test_no_expression_takes_for_ever(pattern: str) -> None:
    code = f"""
from roundel.errors import SelectionError
from roundel.plan.select import matching_tensors
try:
    print(matching_tensors(["a" * 40 + "!"], [{"re:" + pattern!r}], "overrides[0].tensors"))
except SelectionError as error:
    print(error)
"""
    # In a process of its own: nothing else could end a search that goes on for years.
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert pattern in done.stdout


@pytest.mark.parametrize("word", ["re:(?!stem)conv", r"re:(.)\1"])
def test_what_an_expression_cannot_say(model: onnx.ModelProto, word: str) -> None:
    with pytest.raises(SelectionError) as caught:
        _excluded(model, word)
    assert caught.value.where == word
    assert "without look-around" in str(caught.value.expected)
    assert "glob" in str(caught.value.hint)


def test_a_broken_expression(model: onnx.ModelProto) -> None:
    with pytest.raises(SelectionError, match="regular expression"):
        _excluded(model, "re:(")


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (["/stem/conv"], ["/stem/relu"], {"/stem/conv", "/stem/relu"}),
        (["x"], ["relu_out"], {"/stem/conv", "/stem/relu"}),
        (["relu_out"], ["a"], {"/head1/conv"}),
        (["relu_out"], ["y"], {"/head1/conv", "/head2/conv", "/join"}),
    ],
)
def test_subgraphs(model: onnx.ModelProto, inputs: list[str], outputs: list[str], expected: set[str]) -> None:
    border = {"inputs": inputs, "outputs": outputs}
    plan = plan_of(model, selection={"exclude_subgraphs": [border]})
    left = {name for name, v in plan.nodes.items() if "excluded subgraph" in v.reason}
    assert left == expected


def test_a_subgraph_against_the_flow(model: onnx.ModelProto) -> None:
    border = {"inputs": ["/join"], "outputs": ["/stem/conv"]}
    with pytest.raises(SelectionError, match="No path"):
        plan_of(model, selection={"exclude_subgraphs": [border]})


def test_a_subgraph_border_with_a_typo(model: onnx.ModelProto) -> None:
    border = {"inputs": ["relu_ouT"], "outputs": ["y"]}
    with pytest.raises(SelectionError) as caught:
        plan_of(model, selection={"exclude_subgraphs": [border]})
    assert "relu_out" in str(caught.value.hint)


def test_operator_types(model: onnx.ModelProto) -> None:
    plan = plan_of(model, selection={"op_types": ["Add"]})
    assert [name for name, v in plan.nodes.items() if v.quantized] == ["/join"]
    assert plan.nodes["/stem/conv"].reason == "Conv is not in the operator table"
    with pytest.raises(SelectionError) as caught:
        plan_of(model, selection={"op_types": ["Cnov"]})
    assert "Conv" in str(caught.value.hint)


def test_more_operator_types() -> None:
    nodes = [node("Neg", ["x"], ["n"], name="neg"), node("Floor", ["n"], ["y"], name="floor")]
    model = build(nodes, {"x": [2, 4]}, ["y"])
    assert not plan_of(model).tensors
    plan = plan_of(model, selection={"extra_op_types": ["Neg"]})
    assert set(plan.tensors) == {"x", "n"}
    assert set(plan_of(model, selection={"all_op_types": True}).tensors) == {"x", "n", "y"}


def test_nodes_without_names_get_distinct_ones() -> None:
    nodes = [node("Tanh", ["x"], ["a"]), node("Tanh", ["a"], ["b"]), node("Tanh", ["b"], ["y"])]
    plan = plan_of(build(nodes, {"x": [2]}, ["y"]), selection={"exclude": ["Tanh_1"]})
    assert [v.quantized for v in plan.nodes.values()] == [True, False, True]


def test_integer_arithmetic_is_no_quantized_node() -> None:
    nodes = [
        node("Shape", ["x"], ["s"], name="shape"),
        node("Gather", ["s", "i"], ["d"], name="dim"),
        node("Concat", ["d", "one"], ["target"], axis=0, name="target"),
        node("Reshape", ["x", "target"], ["y"], name="reshape"),
    ]
    constants = {"i": np.int64([0]), "one": np.int64([-1])}
    plan = plan_of(build(nodes, {"x": ["n", 2, 2]}, {"y": ["n", 4]}, constants))
    assert plan.nodes["dim"].reason == "no float32 tensor around it"
    assert plan.nodes["target"].reason == "no float32 tensor around it"
    assert plan.nodes["reshape"].quantized
