import numpy as np
import pytest
from onnx import helper

from roundel.passes.batch_norms import fold_pad


def build(n, pads=(0, 0, 1, 2, 0, 0, 3, 0), filler=None, mode="constant", **conv):
    n.input("x", (1, 4, 6, 7))
    n.weight("w", 2, 4, 3, 3)
    inputs = ["x", n.const("pads", np.array(pads))]
    if filler is not None:
        inputs.append(n.const("filler", np.array(filler, np.float32)))
    n.node("Pad", inputs, "p", mode=mode)
    return n.node("Conv", ["p", "w"], "y", **conv)


@pytest.mark.parametrize("filler", [None, 0.0])
@pytest.mark.parametrize("own", [None, (1, 0, 0, 2)])
def test_joins_the_pads_of_the_conv(net, apply, filler, own):
    n = net()
    n.output(build(n, filler=filler))
    if own:
        n.nodes[-1].attribute.append(helper.make_attribute("pads", own))
    assert apply(n, fold_pad).ops == {"Conv": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"filler": 1.0},
        {"mode": "reflect"},
        {"pads": (0, 0, -1, 0, 0, 0, 0, 0)},
        {"pads": (1, 0, 0, 0, 0, 0, 0, 0)},
        {"auto_pad": "SAME_UPPER"},
    ],
)
def test_other_pads_stay(net, apply, options):
    n = net()
    n.output(build(n, **options))
    assert apply(n, fold_pad, 0).rewrites == 0


@pytest.mark.parametrize("reader", ["output", "node", "body"])
def test_padded_value_that_others_see(net, apply, reader):
    n = net()
    build(n)
    seen = {"output": lambda: "p", "node": lambda: n.node("Relu", ["p"], "r")}
    n.output("y", seen.get(reader, lambda: n.if_reads("p", "i"))())
    assert apply(n, fold_pad, 0).rewrites == 0


def test_axes_as_input(net, apply):
    n = net(18)
    n.input("x", (1, 4, 6, 7))
    n.weight("w", 2, 4, 3, 3)
    n.node("Pad", ["x", n.const("pads", np.array([1, 2])), "", n.const("axes", np.array([-1]))], "p")
    n.node("Conv", ["p", "w"], "y")
    n.output("y")
    conv = apply(n, fold_pad).node("Conv")
    assert conv.attributes["pads"].value == (0, 1, 0, 2)


@pytest.mark.parametrize(
    "pads", [(0, 1, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1, 0, 0), (0, 0, 0, 0, 0, 0, 0, -1)]
)
def test_channels_and_cropping_stay(net, apply, pads):
    n = net()
    n.input("x", (1, 4, 6, 7))
    n.weight("w", 2, 4 + pads[1] + pads[5], 3, 3)
    n.node("Pad", ["x", n.const("pads", np.array(pads))], "p")
    n.output(n.node("Conv", ["p", "w"], "y"))
    assert apply(n, fold_pad, 0).rewrites == 0


def test_axes_as_input_on_channels(net, apply):
    n = net(18)
    n.input("x", (1, 4, 6, 7))
    n.weight("w", 2, 5, 3, 3)
    n.node("Pad", ["x", n.const("pads", np.array([1, 1, 0, 1])), "", n.const("axes", np.array([1, 2]))], "p")
    n.output(n.node("Conv", ["p", "w"], "y"))
    assert apply(n, fold_pad, 0).rewrites == 0


@pytest.mark.parametrize("what", ["pads", "filler"])
def test_values_that_the_caller_feeds(net, apply, what):
    n = net()
    n.input("x", (1, 4, 6, 7))
    n.weight("w", 2, 4, 3, 3)
    n.input("filler", ())
    n.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    if what == "pads":
        n.node("Add", ["pads", n.const("zero", np.zeros(8, np.int64))], "computed")
    n.node("Pad", ["x", "computed" if what == "pads" else "pads", "filler"], "p")
    n.output(n.node("Conv", ["p", "w"], "y"))
    assert apply(n, fold_pad, 0).rewrites == 0


@pytest.mark.parametrize("reader", ["ConvTranspose", "MaxPool", "AveragePool"])
def test_other_readers_keep_their_pad(net, apply, reader):
    n = net()
    n.input("x", (1, 4, 6, 7))
    n.node("Pad", ["x", n.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1]))], "p")
    if reader == "ConvTranspose":
        n.node(reader, ["p", n.weight("w", 4, 2, 3, 3)], "y")
    else:
        n.node(reader, ["p"], "y", kernel_shape=[2, 2])
    n.output("y")
    assert apply(n, fold_pad, 0).rewrites == 0


def test_padded_weight_stays(net, apply):
    """The Pad feeds the convolution's second input: its padding is no padding of the image."""
    n = net()
    n.input("x", (1, 4, 6, 7))
    n.input("k", (2, 4, 3, 3))
    n.node("Pad", ["k", n.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1]))], "p")
    n.output(n.node("Conv", ["x", "p"], "y"))
    assert apply(n, fold_pad, 0).rewrites == 0


def test_pads_in_a_row_all_fold(net, apply):
    n = net()
    n.input("x", (1, 4, 6, 7))
    n.weight("w", 2, 4, 3, 3)
    n.node("Pad", ["x", n.const("one", np.array([0, 0, 1, 0, 0, 0, 0, 2]))], "p")
    n.node("Pad", ["p", n.const("two", np.array([0, 0, 0, 3, 0, 0, 1, 0]))], "q")
    n.output(n.node("Conv", ["q", "w"], "y", strides=[2, 1], dilations=[1, 2]))
    done = apply(n, fold_pad, 1e-6)
    assert done.rewrites + fold_pad(done.model) == 2
    assert done.node("Conv").attributes["pads"].value == (1, 3, 1, 2)
