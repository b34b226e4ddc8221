import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from roundel.passes.cleanup import lift_constants


@pytest.mark.parametrize(
    "attributes",
    [
        {"value": numpy_helper.from_array(np.array([2.0], np.float32))},
        {"value_float": 2.0},
        {"value_floats": [2.0]},
    ],
)
def test_constant_becomes_an_initializer_of_its_name(net, apply, attributes):
    n = net()
    n.input("x", (3,))
    n.node("Constant", [], "two", **attributes)
    n.node("Mul", ["x", "two"], "y")
    n.output("y")
    done = apply(n, lift_constants, 0)
    assert done.rewrites == 1
    assert done.ops == {"Mul": 1}
    assert set(done.model.graph.initializers) == {"two"}


def test_constant_that_is_an_output_stays(net, apply):
    n = net()
    n.node("Constant", [], "two", value_float=2.0)
    n.output("two")
    assert apply(n, lift_constants, 0).rewrites == 0


def test_body_reads_the_initializer(net, apply):
    n = net()
    n.node("Constant", [], "two", value_floats=[2.0, -2.0])
    n.if_reads("two", "y")
    n.output("y")
    assert apply(n, lift_constants, 0).ops == {"If": 1}


def test_integers(net, apply):
    n = net()
    n.node("Constant", [], "a", value_ints=[1, 2])
    n.node("Constant", [], "b", value_int=3)
    n.node("Add", ["a", "b"], "y")
    n.output("y", kind=onnx.TensorProto.INT64)
    assert apply(n, lift_constants, 0).rewrites == 2
