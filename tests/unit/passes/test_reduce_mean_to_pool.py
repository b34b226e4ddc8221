import numpy as np
import onnx
import pytest

from roundel.passes.operators import reduce_mean_to_pool


@pytest.mark.parametrize("axes", [[2, 3], [3, 2], [-1, -2], [2, -1]])
@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("keepdims", [None, 1, 0])
def test_mean_over_height_and_width(net, apply, axes, opset, keepdims):
    n = net(opset)
    n.input("x", ("N", 3, 5, 6), (2, 3, 5, 6))
    attributes = {} if keepdims is None else {"keepdims": keepdims}
    if opset < 18:
        n.node("ReduceMean", ["x"], "y", axes=axes, **attributes)
    else:
        n.const("axes", np.array(axes))
        n.node("ReduceMean", ["x", "axes"], "y", **attributes)
    n.output("y")
    done = apply(n, reduce_mean_to_pool)
    assert done.ops == {"GlobalAveragePool": 1, **({"Flatten": 1} if keepdims == 0 else {})}


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 3, 4, 5), [1, 2]), ((2, 3, 4, 5), [3]), ((2, 3, 4, 5, 6), [2, 3])]
)
def test_other_means_stay(net, apply, shape, axes):
    n = net()
    n.input("x", shape)
    n.node("ReduceMean", ["x"], "y", axes=axes)
    n.output("y")
    assert apply(n, reduce_mean_to_pool, 0).rewrites == 0


def test_all_axes_and_integers_stay(net, apply):
    n = net()
    n.input("x", (1, 2, 3, 4))
    n.node("ReduceMean", ["x"], "y")
    n.node("Cast", ["x"], "i", to=onnx.TensorProto.INT32)
    n.node("ReduceMean", ["i"], "m", axes=[2, 3])
    n.node("Cast", ["m"], "z", to=onnx.TensorProto.FLOAT)
    n.output("y", "z")
    assert apply(n, reduce_mean_to_pool, 0).rewrites == 0


def test_empty_tensors_stay(net, apply):
    n = net()
    n.input("x", (1, 0, 3, 4))
    n.node("ReduceMean", ["x"], "y", axes=[2, 3])
    n.output("y")
    assert apply(n, reduce_mean_to_pool, 0).rewrites == 0
