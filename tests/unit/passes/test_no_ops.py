import numpy as np
import onnx
import pytest

from roundel.passes.cleanup import remove_no_ops

FLOAT = onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    ("op", "extra", "attributes"),
    [
        ("Identity", [], {}),
        ("Dropout", [], {}),
        ("Dropout", [np.array(0.5, np.float32), np.array(False)], {}),
        ("Cast", [], {"to": FLOAT}),
        ("Transpose", [], {"perm": [0, 1, 2]}),
        ("Pad", [np.zeros(6, np.int64)], {"mode": "reflect"}),
        ("Reshape", [np.array([2, -1, 4])], {}),
        ("Expand", [np.array([3, 1])], {}),
        ("Concat", [], {"axis": 1}),
    ],
)
def test_removed(net, apply, op, extra, attributes):
    n = net()
    n.input("x", (2, 3, 4))
    n.node("Relu", ["x"], "a")
    names = [n.const(f"e{index}", array) for index, array in enumerate(extra)]
    n.node(op, ["a", *names], "b", **attributes)
    n.node("Neg", ["b"], "y")
    n.output("y")
    done = apply(n, remove_no_ops, 0)
    assert done.rewrites == 1
    assert done.ops == {"Relu": 1, "Neg": 1}


@pytest.mark.parametrize(
    ("op", "extra", "attributes"),
    [
        ("Cast", [], {"to": onnx.TensorProto.DOUBLE}),
        ("Transpose", [], {}),
        ("Pad", [np.array([0, 0, 0, 0, 0, 1])], {}),
        ("Reshape", [np.array([2, 12])], {}),
        ("Expand", [np.array([5, 1, 1, 1])], {}),
    ],
)
def test_kept(net, apply, op, extra, attributes):
    n = net()
    n.input("x", (2, 3, 4))
    names = [n.const(f"e{index}", array) for index, array in enumerate(extra)]
    n.node(op, ["x", *names], "b", **attributes)
    n.node("Neg", ["b"], "y")
    n.output("y", kind=onnx.TensorProto.DOUBLE if op == "Cast" else FLOAT)
    assert apply(n, remove_no_ops, 0).rewrites == 0


def test_training_dropout_stays(net):
    n = net()
    n.input("x", (4,))
    n.const("ratio", np.array(0.5, np.float32))
    n.const("training", np.array(True))
    n.node("Dropout", ["x", "ratio", "training"], "y")
    n.output("y")
    assert remove_no_ops(n.model()) == 0


def test_dropout_mask_that_is_read_stays(net, apply):
    n = net()
    n.input("x", (4,))
    n.node("Dropout", ["x"], ["d", "mask"])
    n.node("Cast", ["mask"], "m", to=FLOAT)
    n.node("Add", ["d", "m"], "y")
    n.output("y")
    assert apply(n, remove_no_ops, 0).rewrites == 0


def test_identity_before_an_output_gives_its_name_to_the_producer(net, apply):
    n = net()
    n.input("x", (4,))
    n.node("Relu", ["x"], "r", name="relu")
    n.node("Identity", ["r"], "y")
    n.if_reads("r", "i")
    n.output("y", "i")
    done = apply(n, remove_no_ops, 0)
    assert done.rewrites == 1
    assert done.node("Relu").outputs[0].name == "y"


def test_identity_between_two_named_ends_stays(net, apply):
    n = net()
    n.input("x", (4,))
    n.node("Identity", ["x"], "y")
    n.node("Relu", ["x"], "r")
    n.node("Identity", ["r"], "s")
    n.output("y", "r", "s")
    assert apply(n, remove_no_ops, 0).rewrites == 0


def test_chain(net, apply):
    n = net()
    n.input("x", (4,))
    n.node("Identity", ["x"], "a")
    n.node("Identity", ["a"], "b")
    n.node("Relu", ["b"], "c")
    n.node("Identity", ["c"], "d")
    n.node("Identity", ["d"], "y")
    n.output("y")
    done = apply(n, remove_no_ops, 0)
    assert done.rewrites == 4
    assert done.ops == {"Relu": 1}


def test_open_dimensions_keep_a_reshape(net, apply):
    n = net()
    n.input("x", ("N", 4), (3, 4))
    n.const("shape", np.array([-1, 4]))
    n.node("Reshape", ["x", "shape"], "r")
    n.node("Relu", ["r"], "y")
    n.output("y")
    assert apply(n, remove_no_ops, 0).rewrites == 0
