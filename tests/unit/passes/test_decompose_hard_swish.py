import pytest

from roundel.passes.activations import decompose_hard_swish


def test_becomes_its_definition(net, apply):
    n = net()
    n.input("x", ("N", 9), (4, 9))
    n.node("HardSwish", ["x"], "a")
    n.node("HardSwish", ["a"], "y", name="second")
    n.if_reads("a", "i")
    n.output("y", "i")
    done = apply(n, decompose_hard_swish)
    assert done.rewrites == 2
    assert done.ops == {"HardSigmoid": 2, "Mul": 2, "If": 1}


def test_as_graph_output_and_with_other_readers(net, apply):
    n = net()
    n.input("x", (2, 3))
    n.node("HardSwish", ["x"], "y")
    n.node("Neg", ["y"], "z")
    n.output("y", "z")
    done = apply(n, decompose_hard_swish, 1e-6)
    gate = done.node("HardSigmoid")
    assert gate.attributes["alpha"].value == pytest.approx(1 / 6)
    assert gate.attributes["beta"].value == 0.5
    # The product keeps the name; the gate has the shape that planning reads.
    assert done.node("Mul").outputs[0].name == "y"
    assert tuple(gate.outputs[0].shape) == (2, 3)


def test_nothing_to_do_twice(net, apply):
    n = net()
    n.input("x", (2, 3))
    n.node("HardSigmoid", ["x"], "g", alpha=1 / 6, beta=0.5)
    n.output(n.node("Mul", ["x", "g"], "y"))
    assert apply(n, decompose_hard_swish, 0).rewrites == 0
