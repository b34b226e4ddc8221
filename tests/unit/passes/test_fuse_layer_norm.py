import numpy as np
import onnx
import pytest

from roundel.passes.norms import fuse_layer_norm


def scalar(n, name, value):
    return n.const(name, np.array(value, np.float32))


def mean(n, source, output, axes, opset):
    if opset < 18:
        return n.node("ReduceMean", [source], output, axes=axes)
    return n.node("ReduceMean", [source, n.const(f"{output}_axes", np.array(axes))], output)


def core(n, axes=(-1,), square="Pow", tail="Div", twice=False, opset=17):
    """The output of `(x - mean) / deviation`, in one of its spellings."""
    mean(n, "x", "mean", list(axes), opset)
    n.node("Sub", ["x", "mean"], "centered")
    base = n.node("Sub", ["x", "mean"], "again") if twice else "centered"
    n.node("Pow", [base, scalar(n, "two", 2)], "sq") if square == "Pow" else n.node("Mul", [base, base], "sq")
    mean(n, "sq", "var", list(axes), opset)
    n.node("Add", [scalar(n, "eps", 1e-5), "var"], "padded")
    if tail == "Pow":
        n.node("Pow", ["padded", scalar(n, "power", -0.5)], "inverse")
        return n.node("Mul", ["inverse", "centered"], "normal")
    n.node("Sqrt", ["padded"], "root")
    if tail == "Reciprocal":
        n.node("Reciprocal", ["root"], "inverse")
        return n.node("Mul", ["centered", "inverse"], "normal")
    return n.node("Div", ["centered", "root"], "normal")


def affine(n, shape=(8,)):
    n.node("Mul", ["normal", n.weight("gamma", *shape)], "scaled")
    return n.node("Add", [n.weight("beta", *shape), "scaled"], "y", name="last")


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("tail", ["Div", "Reciprocal", "Pow"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("opset", [17, 18])
def test_spellings(net, apply, square, tail, twice, opset):
    n = net(opset)
    n.input("x", ("N", 3, 8), (2, 3, 8))
    core(n, square=square, tail=tail, twice=twice, opset=opset)
    n.output(affine(n))
    done = apply(n, fuse_layer_norm)
    assert done.ops == {"LayerNormalization": 1}
    node = done.node("LayerNormalization")
    assert node.name == "last"
    assert [v.name for v in node.inputs] == ["x", "gamma", "beta"]
    assert node.attributes["epsilon"].value == pytest.approx(1e-5)


def test_several_axes(net, apply):
    n = net()
    n.input("x", (2, 3, 4, 8))
    core(n, axes=(2, -1))
    n.output(affine(n, (4, 8)))
    assert apply(n, fuse_layer_norm).ops == {"LayerNormalization": 1}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 8)])
def test_scales_of_other_shapes_are_spread(net, apply, shape):
    n = net()
    n.input("x", (2, 3, 8))
    core(n)
    n.output(affine(n, shape))
    assert apply(n, fuse_layer_norm).ops == {"LayerNormalization": 1}


def test_scale_that_varies_along_another_axis_stays_a_node(net, apply):
    n = net()
    n.input("x", (2, 3, 8))
    core(n)
    n.output(affine(n, (3, 1)))
    assert apply(n, fuse_layer_norm).ops == {"LayerNormalization": 1, "Mul": 1, "Add": 1}


def test_without_scale_and_shift(net, apply):
    n = net()
    n.input("x", (2, 3, 8))
    n.output(core(n))
    assert apply(n, fuse_layer_norm).ops == {"LayerNormalization": 1}


@pytest.mark.parametrize("seen", ["mean", "var", "root", "scaled"])
def test_values_inside_that_others_see(net, apply, seen):
    n = net()
    n.input("x", (2, 3, 8))
    core(n)
    affine(n)
    n.output("y", seen)
    done = apply(n, fuse_layer_norm)
    assert done.ops.get("LayerNormalization", 0) == (1 if seen == "scaled" else 0)


def test_body_captures_a_value_inside(net, apply):
    n = net()
    n.input("x", (2, 3, 8))
    core(n)
    affine(n)
    n.if_reads("centered", "i")
    n.output("y", "i")
    assert apply(n, fuse_layer_norm, 0).rewrites == 0


@pytest.mark.parametrize(("axes", "opset"), [((1,), 17), ((0, 2), 17), ((-1,), 16)])
def test_other_axes_and_older_operator_sets_stay(net, apply, axes, opset):
    n = net(opset)
    n.input("x", (2, 3, 8))
    n.output(core(n, axes=axes, opset=opset))
    assert apply(n, fuse_layer_norm, 0).rewrites == 0


def test_mixed_precision(net, apply):
    half = onnx.TensorProto.FLOAT16
    n = net()
    n.input("full", (2, 3, 8))
    n.node("Cast", ["full"], "x", to=half)
    n.node("ReduceMean", ["x"], "mean", axes=[-1])
    n.node("Sub", ["x", "mean"], "centered")
    n.node("Cast", ["centered"], "wide", to=onnx.TensorProto.FLOAT)
    n.node("Pow", ["wide", scalar(n, "two", 2)], "sq")
    n.node("ReduceMean", ["sq"], "var", axes=[-1])
    n.node("Add", ["var", scalar(n, "eps", 1e-5)], "padded")
    n.node("Sqrt", ["padded"], "root")
    n.node("Cast", ["root"], "narrow", to=half)
    n.node("Div", ["centered", "narrow"], "normal")
    n.node("Cast", ["normal"], "y", to=onnx.TensorProto.FLOAT)
    n.output("y")
    done = apply(n, fuse_layer_norm, 2e-3)
    assert done.ops == {"LayerNormalization": 1, "Cast": 2}


def test_cast_to_integers_inside_stays(net, apply):
    n = net()
    n.input("x", (2, 3, 8))
    n.node("ReduceMean", ["x"], "mean", axes=[-1])
    n.node("Sub", ["x", "mean"], "centered")
    n.node("Cast", ["centered"], "whole", to=onnx.TensorProto.INT32)
    n.node("Mul", ["whole", "whole"], "sq")
    n.node("ReduceMean", ["sq"], "var", axes=[-1])
    n.node("Add", ["var", n.const("eps", np.array(1, np.int32))], "padded")
    n.node("Cast", ["padded"], "wide", to=onnx.TensorProto.FLOAT)
    n.node("Sqrt", ["wide"], "root")
    n.node("Div", ["centered", "root"], "y")
    n.output("y")
    assert apply(n, fuse_layer_norm, 0).rewrites == 0
