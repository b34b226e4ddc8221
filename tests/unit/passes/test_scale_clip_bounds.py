import numpy as np
import pytest
from onnx import TensorProto

from roundel.passes.activations import scale_clip_bounds


def start(n, low=0.0, high=6.0, first="Conv"):
    """x -> layer -> Clip -> c."""
    n.input("x", (1, 3, 7, 7))
    n.weight("w", *((4, 3, 3, 3) if first == "Conv" else (3, 4, 3, 3)))
    n.node(first, ["x", "w", n.weight("b", 4)], "l")
    n.const("low", np.float32(low))
    n.const("high", np.float32(high))
    return n.node("Clip", ["l", "low", "high"], "c", name="clip")


def finish(n, source="c", **attributes):
    n.weight("v", 2, 4, 3, 3)
    return n.node("Conv", [source, "v", n.weight("d", 2)], "y", **attributes)


def top(done):
    return float(done.node("Clip").inputs[2].const_value.numpy())


@pytest.mark.parametrize("first", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize(
    ("high", "expected"), [(6.0, 127 / 16), (1.0, 127 / 64), (8.0, 127 / 8), (1e-3, 127 * 2.0**-16)]
)
def test_bound_moves_to_the_top_of_a_range(net, apply, first, high, expected):
    n = net()
    start(n, high=high, first=first)
    n.output(finish(n))
    done = apply(n, scale_clip_bounds, 1e-6)
    assert done.rewrites == 1
    assert top(done) == expected
    factor = expected / high
    before = n.model().graph.initializers
    for name, scale in (("w", factor), ("b", factor), ("v", 1 / factor), ("d", 1.0)):
        np.testing.assert_allclose(done.array(name), before[name].const_value.numpy() * scale, rtol=1e-6)
    assert scale_clip_bounds(done.model) == 0


def test_bound_that_is_there_already(net, apply):
    n = net()
    start(n, high=127 / 16)
    n.output(finish(n))
    assert apply(n, scale_clip_bounds, 0).rewrites == 0


def test_layers_that_share_the_clip(net, apply):
    """All readers are rescaled, also behind operators that scale along; a shared bound stays for the rest."""
    n = net()
    start(n)
    n.node("Conv", ["c", n.weight("v", 2, 4, 3, 3)], "y")
    n.node("ConvTranspose", ["c", n.weight("u", 4, 2, 2, 2)], "z")
    n.node("Pad", ["c", n.const("pads", np.array([0, 0, 1, 1, 0, 0, 0, 0]))], "p")
    n.node("MaxPool", ["p"], "m", kernel_shape=[2, 2])
    n.node("AveragePool", ["m"], "a", kernel_shape=[3, 3])
    n.node("GlobalAveragePool", ["a"], "g")
    n.node("Flatten", ["g"], "f")
    n.node("Gemm", ["f", n.weight("t", 4, 5)], "o")
    n.node("Clip", ["x", "low", "high"], "other")
    n.output("y", "z", "o", "other")
    done = apply(n, scale_clip_bounds, 1e-6)
    assert done.rewrites == 1
    assert {float(k.inputs[2].const_value.numpy()) for k in done.model.graph if k.op_type == "Clip"} == {
        6.0,
        127 / 16,
    }


def test_chain_of_clips(net, apply):
    n = net()
    start(n)
    finish(n, pads=[1] * 4)
    n.node("Clip", ["y", "low", "high"], "k")
    n.output(n.node("Conv", ["k", n.weight("e", 3, 2, 1, 1)], "z"))
    assert apply(n, scale_clip_bounds, 1e-6).rewrites == 2


@pytest.mark.parametrize(("low", "high"), [(0.5, 6.0), (-1.0, 6.0), (0.0, 0.0), (0.0, -1.0)])
def test_other_bounds(net, apply, low, high):
    n = net()
    start(n, low, high)
    n.output(finish(n))
    assert apply(n, scale_clip_bounds, 0).rewrites == 0


@pytest.mark.parametrize("reader", ["output", "Add", "Relu", "Mul", "body", "weight"])
def test_readers_that_would_see_the_difference(net, apply, reader):
    n = net()
    start(n)
    n.output(finish(n))
    if reader == "output":
        n.output("c")
    elif reader == "body":
        n.output(n.if_reads("c", "i"))
    elif reader == "weight":
        n.output(n.node("Conv", [n.input("q", (1, 4, 5, 5)), "c"], "z"))
    else:
        others = [n.input("q", (1, 4, 5, 5))] if reader != "Relu" else []
        n.output(n.node(reader, ["c", *others], "z"))
    assert apply(n, scale_clip_bounds, 0).rewrites == 0


@pytest.mark.parametrize("between", ["Sigmoid", "filled Pad", "output of MaxPool"])
def test_what_does_not_scale_along(net, apply, between):
    n = net()
    start(n)
    if between == "filled Pad":
        n.node(
            "Pad",
            ["c", n.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1])), n.const("f", np.float32(1))],
            "p",
        )
    elif between == "Sigmoid":
        n.node("Sigmoid", ["c"], "p")
    else:
        n.node("MaxPool", ["c"], "p", kernel_shape=[2, 2])
        n.output("p")
    n.output(finish(n, "p"))
    assert apply(n, scale_clip_bounds, 0).rewrites == 0


@pytest.mark.parametrize(
    "case", ["layer read twice", "layer is output", "computed weight", "no layer before"]
)
def test_what_stands_before(net, apply, case):
    n = net()
    if case == "no layer before":
        n.input("x", (1, 4, 5, 5))
        n.const("low", np.float32(0))
        n.const("high", np.float32(6))
        n.node("Clip", ["x", "low", "high"], "c")
    elif case == "computed weight":
        n.input("x", (1, 3, 7, 7))
        n.node("Neg", [n.input("raw", (4, 3, 3, 3))], "w")
        n.node("Conv", ["x", "w"], "l")
        n.node("Clip", ["l", n.const("low", np.float32(0)), n.const("high", np.float32(6))], "c")
    else:
        start(n)
        n.output("l" if case == "layer is output" else n.node("Abs", ["l"], "seen"))
    n.output(finish(n))
    assert apply(n, scale_clip_bounds, 0).rewrites == 0


@pytest.mark.parametrize("behind", ["computed weight", "dead end"])
def test_what_stands_behind(net, apply, behind):
    n = net()
    start(n)
    if behind == "computed weight":
        n.node("Neg", [n.input("raw", (2, 4, 3, 3))], "v")
        n.output(n.node("Conv", ["c", "v"], "y"))
    else:
        n.output("c")
    assert apply(n, scale_clip_bounds, 0).rewrites == 0


def test_index_output_of_max_pool(net, apply):
    """Places of the maxima do not scale: whoever reads them keeps the bound where it is."""
    n = net()
    start(n)
    n.node("MaxPool", ["c"], ["p", "where"], kernel_shape=[2, 2])
    n.output(finish(n, "p"))
    n.output("where", kind=TensorProto.INT64)
    assert apply(n, scale_clip_bounds, 0).rewrites == 0


def test_gemm_that_scales_its_bias(net, apply):
    n = net()
    n.input("x", (3, 4))
    n.node("Gemm", ["x", n.weight("w", 4, 5), n.weight("b", 5)], "l", alpha=0.5, beta=3.0)
    n.node("Clip", ["l", n.const("low", np.float32(0)), n.const("high", np.float32(6))], "c")
    n.output(n.node("Gemm", ["c", n.weight("v", 5, 2), n.weight("d", 2)], "y", alpha=2.0))
    assert apply(n, scale_clip_bounds, 1e-6).rewrites == 1


def test_reflecting_pad_scales_along(net, apply):
    n = net()
    start(n)
    n.node("Pad", ["c", n.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1]))], "p", mode="reflect")
    n.output(finish(n, "p"))
    assert apply(n, scale_clip_bounds, 1e-6).rewrites == 1
