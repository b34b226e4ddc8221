import math

import numpy as np
import pytest

from roundel.passes.activations import fuse_gelu


def scalar(n, name, value):
    return n.const(name, np.array(value, np.float32))


def gelu(n, order, inner="Div", flipped=False):
    def node(op, a, b, output):
        return n.node(op, [b, a] if flipped and op != "Div" else [a, b], output)

    root = math.sqrt(2) if inner == "Div" else math.sqrt(0.5)
    node(inner, "x", scalar(n, "root", root), "scaled")
    n.node("Erf", ["scaled"], "erf")
    node("Add", "erf", scalar(n, "one", 1), "one_plus")
    half = scalar(n, "half", 0.5)
    if order == "x first":
        node("Mul", "x", "one_plus", "product")
        return node("Mul", "product", half, "y")
    if order == "half first":
        node("Mul", "one_plus", half, "product")
        return node("Mul", "product", "x", "y")
    node("Mul", "x", half, "product")
    return node("Mul", "product", "one_plus", "y")


@pytest.mark.parametrize("order", ["x first", "half first", "half of x"])
@pytest.mark.parametrize("inner", ["Div", "Mul"])
@pytest.mark.parametrize("flipped", [False, True])
def test_orders(net, apply, order, inner, flipped):
    n = net(20)
    n.input("x", ("N", 9), (3, 9))
    n.output(gelu(n, order, inner, flipped))
    assert apply(n, fuse_gelu).ops == {"Gelu": 1}


def test_older_operator_sets_stay(net, apply):
    n = net(19)
    n.input("x", (3, 9))
    n.output(gelu(n, "x first"))
    assert apply(n, fuse_gelu, 0).rewrites == 0


@pytest.mark.parametrize("seen", ["erf", "one_plus", "product"])
def test_values_inside_that_others_see(net, apply, seen):
    n = net(20)
    n.input("x", (3, 9))
    n.output(gelu(n, "half of x"), seen)
    assert apply(n, fuse_gelu, 0).rewrites == 0


def test_body_captures_a_value_inside(net, apply):
    n = net(20)
    n.input("x", (3, 9))
    gelu(n, "x first")
    n.if_reads("product", "i")
    n.output("y", "i")
    assert apply(n, fuse_gelu, 0).rewrites == 0


def test_other_constants_stay(net, apply):
    n = net(20)
    n.input("x", (3, 9))
    n.node("Div", ["x", scalar(n, "root", 1.5)], "scaled")
    n.node("Erf", ["scaled"], "erf")
    n.node("Add", ["erf", scalar(n, "one", 1)], "one_plus")
    n.node("Mul", ["x", "one_plus"], "product")
    n.node("Mul", ["product", scalar(n, "half", 0.5)], "y")
    n.output("y")
    assert apply(n, fuse_gelu, 0).rewrites == 0


def test_constant_that_adds_a_dimension_stays(net, apply):
    n = net(20)
    n.input("x", (3, 9))
    n.node("Div", ["x", scalar(n, "root", math.sqrt(2))], "scaled")
    n.node("Erf", ["scaled"], "erf")
    n.node("Add", ["erf", scalar(n, "one", 1)], "one_plus")
    n.node("Mul", ["x", "one_plus"], "product")
    n.node("Mul", ["product", n.const("half", np.full((1, 1, 1), 0.5, np.float32))], "y")
    n.output("y")
    assert apply(n, fuse_gelu, 0).rewrites == 0
