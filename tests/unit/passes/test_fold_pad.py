import numpy as np
import pytest
from onnx import helper

from roundel.passes.fold_pad import FoldPad


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
    assert apply(n, FoldPad()).ops == {"Conv": 1}


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
    assert apply(n, FoldPad(), 0).rewrites == 0


@pytest.mark.parametrize("reader", ["output", "node", "body"])
def test_padded_value_that_others_see(net, apply, reader):
    n = net()
    build(n)
    seen = {"output": lambda: "p", "node": lambda: n.node("Relu", ["p"], "r")}
    n.output("y", seen.get(reader, lambda: n.if_reads("p", "i"))())
    assert apply(n, FoldPad(), 0).rewrites == 0


def test_axes_as_input(net, apply):
    n = net(18)
    n.input("x", (1, 4, 6, 7))
    n.weight("w", 2, 4, 3, 3)
    n.node("Pad", ["x", n.const("pads", np.array([1, 2])), "", n.const("axes", np.array([-1]))], "p")
    n.node("Conv", ["p", "w"], "y")
    n.output("y")
    conv = apply(n, FoldPad()).node("Conv")
    assert conv.attributes["pads"].value == (0, 1, 0, 2)
