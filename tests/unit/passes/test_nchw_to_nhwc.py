import numpy as np
import onnx_ir as ir
import pytest

from roundel.passes import refresh_shapes
from roundel.passes.operators import nchw_to_nhwc


@pytest.fixture
def turned(apply):
    """Run the pass and compare outputs after turning what goes in and what comes out."""

    def _turned(n):
        runner = apply.__globals__["run"]
        before = n.proto()
        model = ir.from_proto(before)
        refresh_shapes(model)
        rewrites = nchw_to_nhwc(model)
        after = ir.to_proto(model)
        feeds = {k: v.transpose(0, 2, 3, 1) if v.ndim == 4 else v for k, v in n.feeds.items()}
        expected, found = runner(before, n.feeds), runner(after, feeds)
        assert list(expected) == list(found)
        for name, array in expected.items():
            wanted = array.transpose(0, 2, 3, 1) if array.ndim == 4 else array
            np.testing.assert_array_equal(found[name], wanted)
        return model, rewrites

    return _turned


def test_inputs_and_outputs_turn(net, turned):
    n = net()
    n.input("x", ("N", 3, 4, 5), (2, 3, 4, 5))
    n.input("flat", (3,))
    n.weight("w", 6, 3, 1, 1)
    n.node("Conv", ["x", "w"], "y")
    n.node("Relu", ["y"], "r")
    n.node("Relu", ["flat"], "f")
    n.output("y", "r", "f")
    model, rewrites = turned(n)
    assert rewrites == 3
    assert [v.name for v in model.graph.inputs] == ["x", "flat"]
    assert [str(d) for d in model.graph.inputs[0].shape] == ["N", "4", "5", "3"]
    assert [str(d) for d in model.graph.outputs[0].shape] == ["N", "4", "5", "6"]


def test_body_reads_an_image(net, turned):
    n = net()
    n.input("x", (2, 3, 4, 5))
    n.node("GlobalAveragePool", ["x"], "g")
    n.node("Flatten", ["g"], "y")
    n.if_reads("x", "i")
    n.node("ReduceMax", ["i"], "m", axes=[2, 3], keepdims=0)
    n.output("y", "m")
    assert turned(n)[1] == 1


def test_nothing_with_four_dimensions(net, turned):
    n = net()
    n.input("x", (2, 3))
    n.node("Relu", ["x"], "y")
    n.output("y")
    assert turned(n)[1] == 0
