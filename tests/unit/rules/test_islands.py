"""Islands are connected, and none waits for itself."""

from __future__ import annotations

import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st

from roundel.rules.placement import number_islands


def _graph(edges: list[list[int]]) -> list[ir.Node]:
    nodes: list[ir.Node] = []
    for sources in edges:
        inputs = [nodes[i].outputs[0] for i in sources]
        nodes.append(ir.Node("", "Op", inputs, num_outputs=1))
    return nodes


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[list[int]], list[bool]]:
    size = draw(st.integers(1, 14))
    edges = [draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else [] for i in range(size)]
    return edges, draw(st.lists(st.booleans(), min_size=size, max_size=size))


@given(_cases())
def test_contracted_graph_has_no_cycle(case: tuple[list[list[int]], list[bool]]) -> None:
    edges, on_npu = case
    nodes = _graph(edges)
    islands = number_islands(nodes, {n for n, npu in zip(nodes, on_npu, strict=True) if npu})
    label = {i: f"island {islands[n]}" if n in islands else f"node {i}" for i, n in enumerate(nodes)}
    before: dict[str, set[str]] = {name: set() for name in label.values()}
    for i, sources in enumerate(edges):
        before[label[i]] |= {label[j] for j in sources} - {label[i]}
    done: set[str] = set()
    while len(done) < len(before):
        ready = {name for name, needs in before.items() if name not in done and needs <= done}
        assert ready, "an island waits for itself"
        done |= ready


@given(_cases())
def test_all_npu_nodes_have_an_island_and_no_other(case: tuple[list[list[int]], list[bool]]) -> None:
    edges, on_npu = case
    nodes = _graph(edges)
    chosen = {n for n, npu in zip(nodes, on_npu, strict=True) if npu}
    assert set(number_islands(nodes, chosen)) == chosen


def test_side_branch_through_the_cpu_splits() -> None:
    nodes = _graph([[], [0], [0], [1, 2]])  # 0 -> 1 -> 3 and 0 -> 2 -> 3
    islands = number_islands(nodes, {nodes[0], nodes[1], nodes[3]})
    assert islands[nodes[0]] == islands[nodes[1]] != islands[nodes[3]]


def test_cpu_before_the_first_npu_node_splits_nothing() -> None:
    nodes = _graph([[], [], [0, 1]])
    islands = number_islands(nodes, {nodes[0], nodes[2]})
    assert len(set(islands.values())) == 1
