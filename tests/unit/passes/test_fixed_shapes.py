from functools import partial

import numpy as np
import pytest

from roundel.errors import RecipeError
from roundel.passes import refresh_shapes
from roundel.passes.shapes import fix_input_shapes


def two_inputs(n):
    n.input("image", ("batch", 3, "H", "W"), (1, 3, 4, 5))
    n.input("mask", ("batch", 1, "H", "W"), (1, 1, 4, 5))
    n.node("Mul", ["image", "mask"], "y")
    n.output("y")
    return n


def sizes(model, name):
    values = {v.name: v for v in (*model.graph.inputs, *model.graph.outputs)}
    return tuple(values[name].shape.numpy())


def test_by_input_name_binds_the_dimensions_everywhere(net, apply):
    done = apply(two_inputs(net()), partial(fix_input_shapes, shapes={"image": (1, 3, 4, 5)}), 0)
    refresh_shapes(done.model)
    assert sizes(done.model, "image") == (1, 3, 4, 5)
    assert sizes(done.model, "mask") == (1, 1, 4, 5)
    assert sizes(done.model, "y") == (1, 3, 4, 5)


def test_by_dimension_name(net, apply):
    done = apply(
        two_inputs(net()), partial(fix_input_shapes, shapes={"batch": (1,), "H": (4,), "W": (5,)}), 0
    )
    assert sizes(done.model, "mask") == (1, 1, 4, 5)


@pytest.mark.parametrize(
    ("shapes", "parts"),
    [
        ({"imag": (1, 3, 4, 5)}, ["'imag'", "Did you mean 'image'?"]),
        ({"image": (1, 4, 4, 5)}, ["[1, 4, 4, 5]", "[batch, 3, H, W]"]),
        ({"image": (1, 3, 4)}, ["[1, 3, 4]", "[batch, 3, H, W]"]),
        ({"image": (1, 3, 4, 5), "mask": (2, 1, 4, 5)}, ["'batch'", "1 and 2"]),
        ({"batch": (1, 2)}, ["one size", "[1, 2]"]),
        ({"batch": (0,)}, ["at least 1"]),
    ],
)
def test_contradictions_are_errors(net, shapes, parts):
    with pytest.raises(RecipeError) as caught:
        fix_input_shapes(two_inputs(net()).model(), shapes)
    for part in parts:
        assert part in str(caught.value)


def test_anonymous_dimensions_are_not_one_dimension(net, apply):
    n = net()
    n.input("x", ("?", "?"), (2, 3))
    n.node("Relu", ["x"], "y")
    n.output("y")
    assert sizes(apply(n, partial(fix_input_shapes, shapes={"x": (2, 3)}), 0).model, "x") == (2, 3)


def test_negative_sizes_are_open(net):
    n = net()
    n.input("x", (-1, 3), (2, 3))
    n.node("Relu", ["x"], "y")
    n.output("y")
    model = n.model()
    assert fix_input_shapes(model, {"x": (2, 3)}) == 1
    assert sizes(model, "x") == (2, 3)


def test_weights_are_not_inputs(net):
    n = net()
    n.input("x", ("N", 4), (2, 4))
    n.const("w", np.ones((4,), np.float32))
    n.node("Mul", ["x", "w"], "y")
    n.output("y")
    with pytest.raises(RecipeError):
        fix_input_shapes(n.model(), {"w": (4,)})
