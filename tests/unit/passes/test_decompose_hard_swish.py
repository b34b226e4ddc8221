from roundel.passes.decompose_hard_swish import DecomposeHardSwish


def test_becomes_its_definition(net, apply):
    n = net()
    n.input("x", ("N", 9), (4, 9))
    n.node("HardSwish", ["x"], "a")
    n.node("HardSwish", ["a"], "y", name="second")
    n.if_reads("a", "i")
    n.output("y", "i")
    done = apply(n, DecomposeHardSwish())
    assert done.rewrites == 2
    assert done.ops == {"HardSigmoid": 2, "Mul": 2, "If": 1}
