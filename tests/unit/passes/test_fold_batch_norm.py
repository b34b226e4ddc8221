import numpy as np
import pytest

from roundel.passes.batch_norms import fold_batch_norm


def conv_norm(n, **attributes):
    n.input("x", (2, 4, 7, 7))
    n.weight("w", 6, 4, 3, 3)
    n.node("Conv", ["x", "w"], "c", name="conv")
    return n.norm("c", "y", 6, **attributes)


def test_conv_without_bias_takes_over_the_name(net, apply):
    n = net()
    conv_norm(n)
    n.node("Relu", ["y"], "z")
    n.output("z")
    done = apply(n, fold_batch_norm)
    assert done.rewrites == 1
    assert done.ops == {"Conv": 1, "Relu": 1}
    conv = done.node("Conv")
    assert conv.name == "conv"
    assert conv.outputs[0].name == "y"
    assert conv.inputs[1].name == "w"
    assert conv.inputs[2].name == "conv_bias"


def test_norm_output_is_graph_output(net, apply):
    n = net()
    n.output(conv_norm(n))
    assert apply(n, fold_batch_norm).ops == {"Conv": 1}


def test_default_epsilon_is_that_of_onnx(net, apply):
    n = net()
    n.input("x", (1, 2, 3, 3))
    n.const("w", np.ones((2, 2, 1, 1), np.float32))
    n.node("Conv", ["x", "w"], "c")
    for name, value in (("g", 1.0), ("b", 0.0), ("m", 0.0), ("v", 1e-6)):
        n.const(name, np.full(2, value, np.float32))
    n.node("BatchNormalization", ["c", "g", "b", "m", "v"], "y")
    n.output("y")
    done = apply(n, fold_batch_norm)
    np.testing.assert_allclose(done.array("w"), 1 / np.sqrt(1.1e-5), rtol=1e-5)


def test_value_before_the_norm_is_graph_output(net, apply):
    n = net()
    n.output(conv_norm(n), "c")
    assert apply(n, fold_batch_norm, 0).rewrites == 0


def test_value_before_the_norm_has_a_second_reader(net, apply):
    n = net()
    conv_norm(n)
    n.node("Relu", ["c"], "r")
    n.output("y", "r")
    assert apply(n, fold_batch_norm, 0).rewrites == 0


def test_value_before_the_norm_is_captured_by_a_body(net, apply):
    n = net()
    conv_norm(n)
    n.if_reads("c", "i")
    n.output("y", "i")
    assert apply(n, fold_batch_norm, 0).rewrites == 0


def test_value_after_the_norm_is_captured_by_a_body(net, apply):
    n = net()
    conv_norm(n)
    n.if_reads("y", "i")
    n.output("i")
    assert apply(n, fold_batch_norm).rewrites == 1


def test_shared_weight_and_bias_are_not_edited(net, apply):
    n = net()
    n.input("x", (1, 4, 5, 5))
    n.weight("w", 4, 4, 1, 1)
    n.weight("b", 4)
    n.node("Conv", ["x", "w", "b"], "c")
    n.norm("c", "y", 4)
    n.node("Conv", ["x", "w", "b"], "other")
    n.output("y", "other")
    before = n.model().graph.initializers["w"].const_value.numpy().copy()
    done = apply(n, fold_batch_norm)
    assert done.rewrites == 1
    np.testing.assert_array_equal(done.array("w"), before)
    assert {"w_1", "b_1"} <= set(done.model.graph.initializers)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_grouped_layers_with_bias(net, apply, op, groups):
    n = net()
    n.input("x", (1, 4, 6, 6))
    outputs = 8
    shape = (outputs, 4 // groups) if op == "Conv" else (4, outputs // groups)
    n.weight("w", *shape, 3, 3)
    n.weight("b", outputs)
    n.node(op, ["x", "w", "b"], "c", group=groups, strides=[2, 2])
    n.output(n.norm("c", "y", outputs, epsilon=1e-3))
    assert apply(n, fold_batch_norm).ops == {op: 1}


@pytest.mark.parametrize("bias", [None, (), (1,), (6,), (1, 6), (3, 1), (3, 6)])
@pytest.mark.parametrize("transposed", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_gemm_of_any_kind(net, apply, bias, transposed):
    n = net()
    n.input("x", (5, 3) if transposed[0] else (3, 5))
    n.weight("w", *((6, 5) if transposed[1] else (5, 6)))
    inputs = ["x", "w"]
    if bias is not None:
        inputs.append(n.weight("b", *bias))
    n.node("Gemm", inputs, "g", alpha=0.7, beta=0.3, transA=transposed[0], transB=transposed[1])
    n.output(n.norm("g", "y", 6))
    assert apply(n, fold_batch_norm).ops == {"Gemm": 1}


def test_gemm_with_a_computed_bias_stays(net, apply):
    n = net()
    n.input("x", (3, 5))
    n.input("b", (6,))
    n.weight("w", 5, 6)
    n.node("Gemm", ["x", "w", "b"], "g")
    n.output(n.norm("g", "y", 6))
    assert apply(n, fold_batch_norm, 0).rewrites == 0


def test_flat_matmul_becomes_gemm(net, apply):
    n = net()
    n.input("x", (3, 5))
    n.weight("w", 5, 6)
    n.node("MatMul", ["x", "w"], "m", name="dense")
    n.output(n.norm("m", "y", 6))
    done = apply(n, fold_batch_norm)
    assert done.ops == {"Gemm": 1}
    assert done.node("Gemm").name == "dense"


def test_batched_matmul_stays(net, apply):
    n = net()
    n.input("x", (2, 6, 5))
    n.weight("w", 5, 6)
    n.node("MatMul", ["x", "w"], "m")
    n.output(n.norm("m", "y", 6))
    assert apply(n, fold_batch_norm, 0).rewrites == 0


@pytest.mark.parametrize(("opset", "attributes"), [(17, {"training_mode": 1}), (15, {"training_mode": 1})])
def test_training_mode_stays(net, opset, attributes):
    n = net(opset)
    n.output(conv_norm(n, **attributes))
    assert fold_batch_norm(n.model()) == 0


@pytest.mark.parametrize("opset", [7, 9, 13])
def test_older_operator_sets(net, apply, opset):
    n = net(opset)
    n.output(conv_norm(n))
    assert apply(n, fold_batch_norm).rewrites == 1


def test_computed_parameters_stay(net, apply):
    n = net()
    n.input("x", (1, 4, 5, 5))
    n.input("gamma", (4,))
    n.weight("w", 4, 4, 1, 1)
    n.node("Conv", ["x", "w"], "c")
    for name in ("b", "m"):
        n.weight(name, 4)
    n.const("v", np.ones(4, np.float32))
    n.node("BatchNormalization", ["c", "gamma", "b", "m", "v"], "y")
    n.output("y")
    assert apply(n, fold_batch_norm, 0).rewrites == 0


def branches(n, axis=1):
    n.input("x", (1, 4, 6, 6))
    n.weight("w1", 2, 4, 1, 1)
    n.weight("b1", 2)
    n.node("Conv", ["x", "w1", "b1"], "c1")
    n.weight("w2", 4, 6, 1, 1)
    n.node("ConvTranspose", ["x", "w2"], "c2")
    n.node("Concat", ["c1", "c2"], "cat", axis=axis)
    n.norm("cat", "y", 8)


@pytest.mark.parametrize("axis", [1, -3])
def test_norm_after_concat_of_different_layers(net, apply, axis):
    n = net()
    branches(n, axis)
    n.output("y")
    done = apply(n, fold_batch_norm)
    assert done.ops == {"Conv": 1, "ConvTranspose": 1, "Concat": 1}
    assert done.node("Concat").outputs[0].name == "y"
    assert "c1" not in {v.name for v in done.node("Concat").inputs}


@pytest.mark.parametrize("seen", ["c1", "cat"])
def test_norm_after_concat_with_another_reader(net, apply, seen):
    n = net()
    branches(n)
    n.output("y", seen)
    assert apply(n, fold_batch_norm, 0).rewrites == 0


def test_norm_after_concat_along_another_axis(net, apply):
    n = net()
    n.input("x", (1, 4, 6, 6))
    for name in ("1", "2"):
        n.weight(f"w{name}", 4, 4, 1, 1)
        n.node("Conv", ["x", f"w{name}"], f"c{name}")
    n.node("Concat", ["c1", "c2"], "cat", axis=2)
    n.output(n.norm("cat", "y", 4))
    assert apply(n, fold_batch_norm, 0).rewrites == 0


def test_one_layer_twice_in_a_concat_stays(net, apply):
    n = net()
    n.input("x", (1, 4, 6, 6))
    n.weight("w", 4, 4, 1, 1)
    n.node("Conv", ["x", "w"], "c")
    n.node("Concat", ["c", "c"], "cat", axis=1)
    n.output(n.norm("cat", "y", 8))
    assert apply(n, fold_batch_norm, 0).rewrites == 0


@pytest.mark.parametrize("shape", [(), (1,), (6, 1, 1), (1, 6, 1, 1), (1, 1, 1, 1)])
def test_constant_bias_and_factor_behind_a_conv(net, apply, shape):
    n = net()
    n.input("x", (2, 4, 7, 7))
    n.weight("w", 6, 4, 3, 3)
    n.node("Conv", ["x", "w"], "c")
    n.node("Add", [n.weight("shift", *shape), "c"], "a")
    n.node("Mul", ["a", n.weight("factor", *shape)], "m")
    n.output(n.norm("m", "y", 6))
    done = apply(n, fold_batch_norm)
    assert done.rewrites == 3
    assert done.ops == {"Conv": 1}


@pytest.mark.parametrize("shape", [(6,), (2, 1, 1, 1), (1, 1, 6, 6), (1, 1, 6, 1, 1)])
def test_constants_that_are_not_per_channel_stay(net, apply, shape):
    n = net()
    n.input("x", (2, 4, 6, 6))
    n.weight("w", 6, 4, 1, 1)
    n.node("Conv", ["x", "w"], "c")
    n.node("Add", ["c", n.weight("shift", *shape)], "y")
    n.output("y")
    assert apply(n, fold_batch_norm, 0).rewrites == 0


def test_residual_addition_stays(net, apply):
    n = net()
    n.input("x", (2, 4, 6, 6))
    n.weight("w", 4, 4, 1, 1)
    n.node("Conv", ["x", "w"], "c")
    n.node("Add", ["c", "x"], "y")
    n.output("y")
    assert apply(n, fold_batch_norm, 0).rewrites == 0


@pytest.mark.parametrize(("gamma", "folded"), [(2.0, True), (3e4, False)])
def test_half_precision_folds_only_what_it_can_hold(net, gamma, folded):
    n = net()
    half = np.float16
    n.input("x", (1, 2, 3, 3))
    n.node("Cast", ["x"], "h", to=10)
    n.const("w", np.full((2, 2, 1, 1), 8, half))
    n.node("Conv", ["h", "w"], "c")
    for name, value in (("g", gamma), ("b", 0), ("m", 0), ("v", 1)):
        n.const(name, np.full(2, value, half))
    n.node("BatchNormalization", ["c", "g", "b", "m", "v"], "y")
    n.node("Cast", ["y"], "z", to=1)
    n.output("z")
    assert fold_batch_norm(n.model()) == folded


@pytest.mark.parametrize(("op", "shape"), [("Conv", (2, 0, 1, 1)), ("ConvTranspose", (0, 2, 1, 1))])
def test_no_input_channels(net, apply, op, shape):
    n = net()
    n.input("x", (1, 0, 4, 4))
    n.weight("w", *shape)
    n.node(op, ["x", "w"], "c")
    n.output(n.norm("c", "y", 2))
    assert apply(n, fold_batch_norm, 0).rewrites == 0
