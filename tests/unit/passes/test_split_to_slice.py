import numpy as np
import pytest

from roundel.passes.operators import split_to_slice


def build(n, sizes=None, outputs=3, form="input", **attributes):
    n.input("x", (2, 7, 4))
    names = [f"y{index}" for index in range(outputs)]
    inputs = ["x"]
    if sizes is not None and form == "input":
        inputs.append(n.const("sizes", np.array(sizes)))
    elif sizes is not None:
        attributes["split"] = sizes
    n.node("Split", inputs, names, **attributes)
    return names


@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize(
    ("opset", "form"), [(7, "attribute"), (11, "attribute"), (13, "input"), (18, "input")]
)
def test_given_sizes(net, apply, axis, opset, form):
    n = net(opset)
    n.output(*build(n, [1, 4, 2], form=form, axis=axis))
    done = apply(n, split_to_slice, 0)
    assert done.ops == {"Slice": 3}


def test_default_axis_and_equal_parts(net, apply):
    n = net(13)
    n.output(*build(n, outputs=2))
    assert apply(n, split_to_slice, 0).ops == {"Slice": 2}


def test_uneven_parts_by_number(net, apply):
    n = net(18)
    n.output(*build(n, axis=1, num_outputs=3))
    assert apply(n, split_to_slice, 0).ops == {"Slice": 3}


def test_empty_part(net, apply):
    n = net(17)
    n.output(*build(n, [0, 7, 0], axis=1))
    assert apply(n, split_to_slice, 0).ops == {"Slice": 3}


def test_unread_parts_get_no_slice(net, apply):
    n = net(17)
    names = build(n, [1, 4, 2], axis=1)
    n.if_reads(names[1], "i")
    n.output("i")
    assert apply(n, split_to_slice, 0).ops == {"Slice": 1, "If": 1}


def test_what_cannot_be_converted_does_not_stop_the_rest(net, apply):
    n = net(17)
    n.input("a", (2, "W"), (2, 6))
    n.input("b", (2, 6))
    n.node("Split", ["a"], ["a0", "a1"], axis=1)
    n.node("Split", ["b"], ["b0", "b1"], axis=1, name="second")
    n.output("a0", "a1", "b0", "b1")
    done = apply(n, split_to_slice, 0)
    assert done.rewrites == 1
    assert done.ops == {"Split": 1, "Slice": 2}


def test_given_sizes_of_an_open_dimension(net, apply):
    n = net(17)
    n.input("a", (2, "W"), (2, 6))
    n.const("sizes", np.array([4, 2]))
    n.node("Split", ["a", "sizes"], ["a0", "a1"], axis=1)
    n.output("a0", "a1")
    assert apply(n, split_to_slice, 0).ops == {"Slice": 2}
