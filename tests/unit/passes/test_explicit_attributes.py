import pytest

from roundel.passes.operators import explicit_attributes


def values(node):
    return {name: attribute.value for name, attribute in node.attributes.items()}


def test_defaults_of_conv(net, apply):
    n = net()
    n.input("x", (1, 3, 8, 8))
    n.weight("w", 4, 3, 3, 5)
    n.node("Conv", ["x", "w"], "y")
    n.output("y")
    done = apply(n, explicit_attributes, 0)
    assert done.rewrites == 1
    assert values(done.node("Conv")) == {
        "kernel_shape": (3, 5),
        "strides": (1, 1),
        "dilations": (1, 1),
        "pads": (0, 0, 0, 0),
        "group": 1,
    }


def test_what_is_written_stays(net, apply):
    n = net()
    n.input("x", (1, 4, 8, 8))
    n.weight("w", 4, 2, 3, 3)
    written = {
        "kernel_shape": [3, 3],
        "strides": [2, 1],
        "dilations": [1, 2],
        "pads": [0, 1, 2, 3],
        "group": 2,
    }
    n.node("Conv", ["x", "w"], "y", **written)
    n.output("y")
    assert apply(n, explicit_attributes, 0).rewrites == 0


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("size", [7, 8, 9])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (4, 1), (2, 3), (1, 2)])
def test_automatic_padding_of_conv(net, apply, auto_pad, size, kernel, stride):
    n = net()
    n.input("x", (1, 2, size, size + 1))
    n.weight("w", 2, 2, kernel, kernel)
    n.node("Conv", ["x", "w"], "y", auto_pad=auto_pad, strides=[stride] * 2)
    n.output("y")
    conv = apply(n, explicit_attributes).node("Conv")
    assert "auto_pad" not in conv.attributes
    assert "pads" in conv.attributes


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (2, 2), (2, 3), (4, 1)])
def test_automatic_padding_of_pools(net, apply, auto_pad, op, kernel, stride):
    n = net()
    n.input("x", (1, 2, 7, 8))
    n.node(op, ["x"], "y", auto_pad=auto_pad, kernel_shape=[kernel] * 2, strides=[stride] * 2)
    n.output("y")
    pool = apply(n, explicit_attributes).node(op)
    assert "auto_pad" not in pool.attributes


def test_same_padding_with_dilation_becomes_runnable(net):
    """ONNX Runtime refuses the automatic form; the standard defines it."""
    n = net()
    n.input("x", (1, 2, 7, 8))
    n.weight("w", 2, 2, 3, 3)
    n.node("Conv", ["x", "w"], "y", auto_pad="SAME_UPPER", strides=[2, 2], dilations=[2, 2])
    n.output("y")
    model = n.model()
    assert explicit_attributes(model) == 1
    assert values(next(iter(model.graph)))["pads"] == (2, 1, 2, 2)


def test_defaults_of_pools(net, apply):
    n = net()
    n.input("x", (1, 2, 7, 8))
    n.node("MaxPool", ["x"], "m", kernel_shape=[2, 2])
    n.node("AveragePool", ["m"], "y", kernel_shape=[2, 2], ceil_mode=1)
    n.output("y")
    done = apply(n, explicit_attributes, 0)
    assert values(done.node("MaxPool"))["strides"] == (1, 1)
    assert values(done.node("AveragePool"))["pads"] == (0, 0, 0, 0)


def test_same_padding_of_an_open_size(net, apply):
    n = net()
    n.input("x", (1, 2, "H", "W"), (1, 2, 7, 8))
    n.weight("w", 2, 2, 3, 3)
    n.node("Conv", ["x", "w"], "a", auto_pad="SAME_UPPER")
    n.node("Conv", ["a", "w"], "y", auto_pad="SAME_UPPER", strides=[2, 2])
    n.output("y")
    first, second = apply(n, explicit_attributes).model.graph
    assert values(first)["pads"] == (1, 1, 1, 1)
    assert values(second)["auto_pad"] == "SAME_UPPER"
    assert values(second)["kernel_shape"] == (3, 3)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (4, 2), (3, 2), (2, 3)])
def test_transposed_conv(net, apply, auto_pad, kernel, stride):
    n = net()
    n.input("x", (1, 2, 5, 6))
    n.weight("w", 2, 3, kernel, kernel)
    n.node("ConvTranspose", ["x", "w"], "y", auto_pad=auto_pad, strides=[stride] * 2)
    n.output("y")
    done = apply(n, explicit_attributes)
    resolved = "auto_pad" not in done.node("ConvTranspose").attributes
    odd = (kernel - stride) % 2 or kernel < stride
    assert resolved == (not (auto_pad.startswith("SAME") and odd))


def test_transposed_conv_with_an_output_shape(net, apply):
    n = net()
    n.input("x", (1, 2, 5, 5))
    n.weight("w", 2, 3, 3, 3)
    n.node("ConvTranspose", ["x", "w"], "y", output_shape=[10, 10], strides=[2, 2])
    n.output("y")
    assert "pads" not in apply(n, explicit_attributes).node("ConvTranspose").attributes


def test_conv_over_one_dimension_with_unknown_input(net, apply):
    n = net()
    n.input("x", (1, 2, 9))
    n.weight("w", 4, 1, 3)
    n.node("Conv", ["x", "w"], "y", group=2)
    n.output("y")
    assert values(apply(n, explicit_attributes, 0).node("Conv"))["pads"] == (0, 0)
