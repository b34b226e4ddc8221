import numpy as np
import pytest

from roundel.passes.cleanup import unshare_weights


def layers(n, *ops):
    """Layers that read one weight, each an output."""
    n.input("x", (1, 3, 5, 5))
    n.weight("w", 3, 3, 3, 3)
    for index, op in enumerate(ops):
        n.output(n.node(op, ["x", "w"], f"y{index}", name=f"layer{index}"))


def names(done):
    return [node.inputs[1].name for node in done.model.graph if node.op_type != "Relu"]


def test_each_layer_gets_its_own(net, apply):
    n = net()
    layers(n, "Conv", "Conv", "ConvTranspose")
    done = apply(n, unshare_weights, 0)
    assert len(set(names(done))) == 3
    for name in names(done):
        np.testing.assert_array_equal(done.array(name), done.array(names(done)[0]))
    assert unshare_weights(done.model) == 0


def test_gemm(net, apply):
    n = net()
    n.input("x", (2, 4))
    n.weight("w", 4, 4)
    n.node("Gemm", ["x", "w"], "a")
    n.output(n.node("Gemm", ["a", "w"], "y"))
    assert len(set(names(apply(n, unshare_weights, 0)))) == 2


def test_weight_that_is_a_graph_output(net, apply):
    n = net()
    layers(n, "Conv")
    n.output("w")
    done = apply(n, unshare_weights, 0)
    assert done.rewrites == 1
    assert names(done) != ["w"]


def test_weight_that_another_operator_reads(net, apply):
    n = net()
    layers(n, "Conv")
    n.output(n.node("Relu", ["w"], "r"))
    done = apply(n, unshare_weights, 0)
    assert names(done) != ["w"]
    assert done.node("Relu").inputs[0].name == "w"


def test_weight_that_a_body_reads(net, apply):
    n = net()
    layers(n, "Conv")
    n.output(n.if_reads("w", "i"))
    assert apply(n, unshare_weights, 0).rewrites == 1


@pytest.mark.parametrize("kind", ["own", "fed", "computed"])
def test_left_alone(net, apply, kind):
    """A weight of one layer, one that the caller feeds, one that the graph computes."""
    n = net()
    n.input("x", (1, 3, 5, 5))
    if kind == "own":
        n.weight("w", 2, 3, 3, 3)
    elif kind == "fed":
        n.input("w", (2, 3, 3, 3))
    else:
        n.input("v", (2, 3, 3, 3))
        n.node("Neg", ["v"], "w")
    n.output(n.node("Conv", ["x", "w"], "y"))
    if kind != "own":
        n.output(n.node("Conv", ["x", "w"], "z"))
    assert apply(n, unshare_weights, 0).rewrites == 0


def test_shared_bias_and_operand_stay(net, apply):
    """Only the second input of a layer is its weight."""
    n = net()
    n.input("x", (1, 2))
    n.weight("w", 2, 2)
    n.weight("b", 2)
    n.node("Gemm", ["x", "w", "b"], "a")
    n.node("Add", ["a", "b"], "c")
    n.output(n.node("Mul", ["c", "b"], "y"))
    assert apply(n, unshare_weights, 0).rewrites == 0
