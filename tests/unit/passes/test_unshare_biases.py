from roundel.passes.cleanup import unshare_biases


def test_each_layer_gets_its_own(net, apply):
    n = net()
    n.input("x", (1, 4, 5, 5))
    n.weight("b", 4)
    for index in range(3):
        n.weight(f"w{index}", 4, 4, 1, 1)
        n.node("Conv", ["x", f"w{index}", "b"], f"y{index}")
    n.output("y0", "y1", "y2")
    done = apply(n, unshare_biases, 0)
    assert done.rewrites == 2
    names = [node.inputs[2].name for node in done.model.graph]
    assert len(set(names)) == 3
    assert "b" in names
    assert "b" in done.model.graph.initializers


def test_bias_that_is_data_elsewhere(net, apply):
    n = net()
    n.input("x", (2, 4))
    n.weight("b", 4)
    n.weight("w", 4, 4)
    n.node("Gemm", ["x", "w", "b"], "g")
    n.node("Add", ["g", "b"], "y")
    n.output("y")
    done = apply(n, unshare_biases, 0)
    assert done.rewrites == 1
    assert done.node("Add").inputs[1].name == "b"


def test_missing_and_private_biases_stay(net, apply):
    n = net()
    n.input("x", (1, 4, 5, 5))
    n.weight("w", 4, 4, 1, 1)
    n.weight("b", 4)
    n.node("Conv", ["x", "w"], "a")
    n.node("Conv", ["a", "w", ""], "c")
    n.node("Conv", ["c", "w", "b"], "y")
    n.output("y")
    assert apply(n, unshare_biases, 0).rewrites == 0


def test_body_that_reads_the_bias(net, apply):
    n = net()
    n.input("x", (1, 4, 5, 5))
    n.weight("w", 4, 4, 1, 1)
    n.weight("b", 4)
    n.node("Conv", ["x", "w", "b"], "y")
    n.if_reads("b", "i")
    n.output("y", "i")
    assert apply(n, unshare_biases, 0).rewrites == 1
