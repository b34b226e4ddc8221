import numpy as np
import pytest

from roundel.passes.norms import fuse_l2_norm


def start(n, opset=17):
    n.input("x", ("N", 6, 5), (2, 6, 5))
    n.feeds["x"][0] = 0  # a zero vector must stay zero


def torch_form(n, axis, clamp=1e-12, expand="Shape"):
    n.node("ReduceL2", ["x"], "norm", axes=[axis])
    n.node("Clip", ["norm", n.const("tiny", np.array(clamp, np.float32))], "safe")
    if expand is None:
        return n.node("Div", ["x", "safe"], "y", name="last")
    n.node("Shape", ["x"], "shape")
    n.node("Expand", ["safe", "shape"], "wide")
    return n.node("Div", ["x", "wide"], "y", name="last")


def tensorflow_form(n, axis, clamp=1e-12, square="Mul"):
    if square == "Mul":
        n.node("Mul", ["x", "x"], "sq")
    else:
        n.node("Pow", ["x", n.const("two", np.array(2, np.float32))], "sq")
    n.node("ReduceSum", ["sq", n.const("axes", np.array([axis]))], "sum")
    n.node("Max", ["sum", n.const("tiny", np.array(clamp, np.float32))], "safe")
    n.node("Sqrt", ["safe"], "root")
    n.node("Reciprocal", ["root"], "inverse")
    return n.node("Mul", ["x", "inverse"], "y")


@pytest.mark.parametrize("axis", [1, -1, 2])
@pytest.mark.parametrize("expand", [None, "Shape"])
def test_torch_form(net, apply, axis, expand):
    n = net()
    start(n)
    n.output(torch_form(n, axis, expand=expand))
    done = apply(n, fuse_l2_norm)
    assert done.ops.pop("Shape", 0) == (1 if expand else 0)  # for dead code removal
    assert done.ops == {"LpNormalization": 1}
    assert done.node("LpNormalization").attributes["axis"].value == axis % 3


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("square", ["Mul", "Pow"])
def test_tensorflow_form(net, apply, axis, square):
    n = net()
    start(n)
    n.output(tensorflow_form(n, axis, square=square))
    assert apply(n, fuse_l2_norm).ops == {"LpNormalization": 1}


@pytest.mark.parametrize(("form", "clamp"), [(torch_form, 1e-3), (torch_form, 0.0), (tensorflow_form, 1e-6)])
def test_clamps_that_matter_stay(net, form, clamp):
    n = net()
    start(n)
    n.output(form(n, -1, clamp))
    assert fuse_l2_norm(n.model()) == 0


def test_two_axes_stay(net, apply):
    n = net()
    start(n)
    n.node("ReduceL2", ["x"], "norm", axes=[1, 2])
    n.node("Max", ["norm", n.const("tiny", np.array(1e-12, np.float32))], "safe")
    n.node("Div", ["x", "safe"], "y")
    n.output("y")
    assert apply(n, fuse_l2_norm, 0).rewrites == 0


@pytest.mark.parametrize("seen", ["norm", "safe"])
def test_values_inside_that_others_see(net, apply, seen):
    n = net()
    start(n)
    n.output(torch_form(n, 1), seen)
    assert apply(n, fuse_l2_norm, 0).rewrites == 0


def test_body_captures_a_value_inside(net, apply):
    n = net()
    start(n)
    torch_form(n, 1)
    n.if_reads("safe", "i")
    n.output("y", "i")
    assert apply(n, fuse_l2_norm, 0).rewrites == 0


def test_upper_bound_stays(net, apply):
    n = net()
    start(n)
    n.node("ReduceL2", ["x"], "norm", axes=[1])
    limits = [n.const("low", np.array(1e-12, np.float32)), n.const("high", np.array(1, np.float32))]
    n.node("Clip", ["norm", *limits], "safe")
    n.node("Div", ["x", "safe"], "y")
    n.output("y")
    assert apply(n, fuse_l2_norm, 0).rewrites == 0
