"""Columns and lanes of the layer chart."""

from __future__ import annotations

import random

from roundel.report.html.layers import lay_out


def test_a_chain_is_one_straight_line() -> None:
    layout = lay_out([[], [0], [1], [2]])
    assert layout.columns == (0, 1, 2, 3)
    assert layout.lanes == (0, 0, 0, 0)


def test_a_way_around_leaves_the_trunk_straight() -> None:
    layout = lay_out([[], [0], [1], [2, 0], [3]])
    assert layout.columns == (0, 1, 2, 3, 4)
    assert set(layout.lanes) == {0}


def test_the_longer_branch_keeps_the_lane_and_the_shorter_opens_one() -> None:
    #       0 - 1 - 2 - 3 - 5
    #        \_____4_______/
    layout = lay_out([[], [0], [1], [2], [0], [3, 4]])
    assert [layout.lanes[i] for i in (0, 1, 2, 3, 5)] == [0] * 5
    assert layout.lanes[4] == 1


def test_a_lane_is_free_again_where_its_branch_has_ended() -> None:
    block = [[], [0], [0], [1, 2]]
    again = [[3], [3], [4, 5]]
    assert max(lay_out([*block, *again]).lanes) == 1


def test_a_lane_is_not_taken_while_its_branch_is_on_its_way() -> None:
    # 2 waits for 6; meanwhile 3 forks again, into 4 and 5.
    layout = lay_out([[], [0], [0], [1], [3], [3], [4, 5, 2]])
    assert len({layout.lanes[i] for i in (2, 4, 5)}) == 3


def test_an_input_that_is_read_late_stands_beside_its_reader() -> None:
    layout = lay_out([[], [], [0], [2], [3, 1]])
    assert layout.columns[1] == layout.columns[4] - 1
    assert layout.lanes[1] != layout.lanes[3]


def test_no_two_layers_share_a_place() -> None:
    dice = random.Random(7)
    sources: list[list[int]] = [[]]
    for layer in range(1, 800):
        sources.append(sorted({max(0, layer - dice.choice((1, 1, 1, 2, 3, 9))) for _ in range(2)}))
    layout = lay_out(sources)
    places = list(zip(layout.columns, layout.lanes, strict=True))
    assert len(set(places)) == len(places)
    for layer, before in enumerate(sources):
        assert all(layout.columns[source] < layout.columns[layer] for source in before)


def test_an_empty_graph() -> None:
    assert lay_out([]).columns == ()
