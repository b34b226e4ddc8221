import pytest

from roundel.passes.batch_norms import batch_norm_to_conv


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 5, 4, 4), (1, 5, 2, 3, 4)])
def test_becomes_a_depthwise_conv(net, apply, shape):
    n = net()
    n.input("x", shape)
    n.output(n.norm("x", "y", 5, epsilon=1e-3))
    done = apply(n, batch_norm_to_conv)
    assert done.ops == {"Conv": 1}
    conv = done.node("Conv")
    assert conv.attributes["group"].value == 5
    assert done.array(conv.inputs[1].name).shape == (5, 1, *(1,) * (len(shape) - 2))


def test_open_batch_and_size(net, apply):
    n = net()
    n.input("x", ("N", 5, "H", "W"), (2, 5, 3, 3))
    n.output(n.norm("x", "y", 5))
    assert apply(n, batch_norm_to_conv).rewrites == 1


def test_flat_input_stays(net, apply):
    n = net()
    n.input("x", (2, 5))
    n.output(n.norm("x", "y", 5))
    assert apply(n, batch_norm_to_conv, 0).rewrites == 0


def test_training_stays(net):
    n = net()
    n.input("x", (2, 5, 4, 4))
    n.output(n.norm("x", "y", 5, training_mode=1))
    assert batch_norm_to_conv(n.model()) == 0


def test_shared_parameters(net, apply):
    n = net()
    n.input("x", (2, 5, 4, 4))
    n.norm("x", "a", 5)
    parameters = [f"a_{part}" for part in ("gamma", "beta", "mean", "var")]
    n.node("BatchNormalization", ["a", *parameters], "y")
    n.output("a", "y")
    assert apply(n, batch_norm_to_conv).ops == {"Conv": 2}


def test_no_channels(net, apply):
    """A convolution of no groups would end the process inside ONNX Runtime."""
    n = net()
    n.input("x", (2, 0, 4, 4))
    n.output(n.norm("x", "y", 0))
    assert apply(n, batch_norm_to_conv, 0).rewrites == 0
