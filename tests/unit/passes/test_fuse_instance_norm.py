import numpy as np
import pytest

from roundel.passes.norms import fuse_instance_norm, fuse_layer_norm


def pooled(n, source, output, pool):
    if pool:
        return n.node("GlobalAveragePool", [source], output)
    return n.node("ReduceMean", [source], output, axes=[2, 3])


def moments(n, pool):
    pooled(n, "x", "mean", pool)
    n.node("Sub", ["x", "mean"], "centered")
    n.node("Mul", ["centered", "centered"], "sq")
    pooled(n, "sq", "var", pool)
    n.node("Add", ["var", n.const("eps", np.array(1e-3, np.float32))], "padded")
    n.node("Sqrt", ["padded"], "root")


def tensorflow(n, pool, scaled):
    moments(n, pool)
    factor = n.node("Reciprocal", ["root"], "inverse")
    if scaled:
        factor = n.node("Mul", [factor, n.weight("gamma", 5, 1, 1)], "factor")
    n.node("Mul", ["x", factor], "times")
    n.node("Mul", ["mean", factor], "moved")
    n.node("Sub", [n.weight("beta", 1, 5, 1, 1), "moved"], "shift")
    return n.node("Add", ["times", "shift"], "y", name="last")


def plain(n, pool, shape=(1, 5, 1, 1)):
    moments(n, pool)
    n.node("Div", ["centered", "root"], "normal")
    n.node("Mul", ["normal", n.weight("gamma", *shape)], "scaled")
    return n.node("Add", ["scaled", n.weight("beta", *shape)], "y")


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_tensorflow_form(net, apply, pool, scaled):
    n = net()
    n.input("x", ("N", 5, 6, 7), (2, 5, 6, 7))
    n.output(tensorflow(n, pool, scaled))
    done = apply(n, fuse_instance_norm)
    assert done.ops == {"InstanceNormalization": 1}
    assert done.node("InstanceNormalization").attributes["epsilon"].value == pytest.approx(1e-3)


@pytest.mark.parametrize("pool", [False, True])
def test_plain_form(net, apply, pool):
    n = net()
    n.input("x", (2, 5, 6, 7))
    n.output(plain(n, pool))
    assert apply(n, fuse_instance_norm).ops == {"InstanceNormalization": 1}


def test_without_scale(net, apply):
    n = net()
    n.input("x", (2, 5, 6, 7))
    moments(n, True)
    n.node("Div", ["centered", "root"], "y")
    n.output("y")
    assert apply(n, fuse_instance_norm).ops == {"InstanceNormalization": 1}


@pytest.mark.parametrize("seen", ["mean", "factor", "shift"])
def test_values_inside_that_others_see(net, apply, seen):
    n = net()
    n.input("x", (2, 5, 6, 7))
    n.output(tensorflow(n, True, True), seen)
    assert apply(n, fuse_instance_norm, 0).rewrites == 0


def test_body_captures_a_value_inside(net, apply):
    n = net()
    n.input("x", (2, 5, 6, 7))
    tensorflow(n, True, True)
    n.if_reads("root", "i")
    n.output("y", "i")
    assert apply(n, fuse_instance_norm, 0).rewrites == 0


def test_scale_over_the_image_is_a_layer_norm(net, apply):
    n = net()
    n.input("x", (2, 5, 6, 7))
    n.output(plain(n, False, (6, 7)))
    assert apply(n, fuse_instance_norm, 0).rewrites == 0
    assert apply(n, fuse_layer_norm).ops == {"LayerNormalization": 1}


def test_sequences_are_layer_norms(net, apply):
    n = net()
    n.input("x", (2, 5, 8))
    n.node("ReduceMean", ["x"], "mean", axes=[-1])
    n.node("Sub", ["x", "mean"], "centered")
    n.node("Mul", ["centered", "centered"], "sq")
    n.node("ReduceMean", ["sq"], "var", axes=[-1])
    n.node("Add", ["var", n.const("eps", np.array(1e-3, np.float32))], "padded")
    n.node("Sqrt", ["padded"], "root")
    n.node("Div", ["centered", "root"], "y")
    n.output("y")
    assert apply(n, fuse_instance_norm, 0).rewrites == 0
