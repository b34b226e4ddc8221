import numpy as np
import onnx
import onnx_ir as ir
import pytest

from roundel.passes import cleanup
from roundel.passes.cleanup import fold_constants


def test_arithmetic_on_constants(net, apply):
    n = net()
    n.input("x", (4,))
    n.const("a", np.array(2.0, np.float32))
    n.const("b", np.arange(4, dtype=np.float32))
    n.node("Mul", ["a", "b"], "ab")
    n.node("Sqrt", ["ab"], "root")
    n.node("Add", ["x", "root"], "y")
    n.output("y")
    done = apply(n, fold_constants, 0)
    assert done.rewrites == 2
    assert done.ops == {"Add": 1}
    np.testing.assert_allclose(done.array("root"), np.sqrt(2 * np.arange(4)), rtol=1e-6)


def test_flattening_as_exporters_write_it(net, apply):
    n = net()
    n.input("x", (2, 3, 4))
    n.node("Shape", ["x"], "shape")
    n.const("zero", np.array(0))
    n.const("axes", np.array([0]))
    n.const("minus", np.array([-1]))
    n.node("Gather", ["shape", "zero"], "batch", axis=0)
    n.node("Unsqueeze", ["batch", "axes"], "batch1")
    n.node("Concat", ["batch1", "minus"], "target", axis=0)
    n.node("Reshape", ["x", "target"], "y")
    n.output("y")
    done = apply(n, fold_constants, 0)
    assert done.ops == {"Reshape": 1}
    assert list(done.array("target")) == [2, -1]


def test_known_entries_of_a_partly_open_shape(net, apply):
    n = net()
    n.input("x", ("N", 3, 4), (2, 3, 4))
    n.node("Shape", ["x"], "shape")
    for name, value in (("one", [1]), ("three", [3]), ("zeros", [0]), ("two", 2)):
        n.const(name, np.array(value))
    n.node("Slice", ["shape", "one", "three", "zeros"], "tail")
    n.node("Gather", ["shape", "two"], "last")
    n.node("Gather", ["shape", "zeros"], "batch")
    n.node("Mul", ["tail", "last"], "y")
    n.output("y", "batch", kind=onnx.TensorProto.INT64)
    done = apply(n, fold_constants, 0)
    assert done.ops == {"Shape": 1, "Gather": 1, "Mul": 1}
    assert list(done.array("tail")) == [3, 4]
    assert done.array("last").shape == ()


def test_shape_with_start_and_end(net, apply):
    n = net()
    n.input("x", (2, 3, 4))
    n.node("Shape", ["x"], "s", start=1, end=-1)
    n.node("Size", ["x"], "n")
    n.node("Add", ["s", "n"], "y")
    n.output("y", kind=onnx.TensorProto.INT64)
    done = apply(n, fold_constants, 0)
    assert list(done.array("s")) == [3]
    assert done.array("n") == 24


def test_range_needs_a_second_round(net, apply):
    n = net()
    n.input("x", (1, 6))
    n.node("Shape", ["x"], "shape", start=1)
    n.const("first", np.array(0))
    n.const("step", np.array(1))
    n.node("Squeeze", ["shape"], "stop")
    n.node("Range", ["first", "stop", "step"], "ids")
    n.node("Cast", ["ids"], "floats", to=onnx.TensorProto.FLOAT)
    n.node("Add", ["x", "floats"], "y")
    n.output("y")
    done = apply(n, fold_constants, 0)
    assert done.ops == {"Add": 1}
    assert list(done.array("floats")) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("op", ["ConstantOfShape", "Expand", "Tile"])
def test_large_results_are_not_stored(net, apply, op):
    n = net()
    n.input("x", (1,))
    n.const("shape", np.array([1024, 1024]))
    n.const("one", np.ones((1, 1), np.float32))
    n.node(op, ["shape"] if op == "ConstantOfShape" else ["one", "shape"], "big")
    n.node("Mul", ["x", "big"], "y")
    n.output("y")
    assert apply(n, fold_constants, 0).rewrites == 0


def test_large_weight_is_rearranged_unless_another_node_reads_it(net, apply):
    n = net()
    n.input("x", (1, 600))
    n.weight("w", 500, 600)
    n.weight("v", 500, 600)
    for name in "wv":
        n.node("Transpose", [name], f"{name}t", perm=[1, 0])
        n.node("MatMul", ["x", f"{name}t"], f"{name}y")
    n.node("MatMul", ["vy", "v"], "z")
    n.output("wy", "z")
    done = apply(n, fold_constants)
    assert done.rewrites == 1
    assert done.array("wt").shape == (600, 500)


def test_quantize_dequantize_and_random_nodes_stay(net):
    n = net()
    n.input("x", (4,))
    n.const("w", np.arange(4, dtype=np.int8))
    n.const("s", np.array(0.5, np.float32))
    n.node("DequantizeLinear", ["w", "s"], "d")
    n.node("RandomNormalLike", ["s"], "r", seed=1.0)
    n.node("Add", ["x", "d"], "a")
    n.node("Add", ["a", "r"], "y")
    n.output("y")
    assert fold_constants(n.model()) == 0


def test_result_that_is_an_output_stays(net, apply):
    n = net()
    n.const("a", np.ones(3, np.float32))
    n.node("Neg", ["a"], "b")
    n.node("Neg", ["b"], "y")
    n.output("y")
    done = apply(n, fold_constants, 0)
    assert done.ops == {"Neg": 1}


def test_body_reads_a_folded_value(net, apply):
    n = net()
    n.const("a", np.ones(3, np.float32))
    n.node("Neg", ["a"], "b")
    n.if_reads("b", "y")
    n.output("y")
    assert apply(n, fold_constants, 0).ops == {"If": 1}


def test_an_operator_the_runtime_lacks_does_not_stop_the_others(net):
    n = net()
    n.input("x", (3,))
    n.const("a", np.array([True, False, True]))
    n.const("b", np.ones(3, np.float32))
    n.node("Neg", ["b"], "nb")
    n.const("h", np.ones((1, 1, 2, 2), np.float64))
    n.node("LRN", ["h"], "hl", size=1)  # no kernel for doubles
    n.node("Cast", ["hl"], "hf", to=onnx.TensorProto.FLOAT)
    n.node("Add", ["x", "nb"], "y")
    n.node("Add", ["hf", "hf"], "z")
    n.output("y", "z")
    model = n.model()
    assert fold_constants(model) == 1
    assert "nb" in model.graph.initializers


def test_missing_optional_input(net, apply):
    n = net()
    n.input("x", (3,))
    n.const("a", np.array([-1.0, 0.5, 9.0], np.float32))
    n.const("top", np.array(1.0, np.float32))
    n.node("Clip", ["a", "", "top"], "c")
    n.node("Add", ["x", "c"], "y")
    n.output("y")
    assert apply(n, fold_constants, 0).ops == {"Add": 1}


def test_work_is_linear_in_the_nodes(net, monkeypatch):
    """A chain of 5,000 nodes: each is looked at once per round, in a bounded number of rounds."""
    n = net()
    n.input("x", (1,))
    n.const("c", np.ones(1, np.float32))
    previous = "x"
    for index in range(5000):
        previous = n.node("Add", [previous, "c"], f"v{index}")
    n.output(previous)
    seen = 0
    consider = cleanup._Selection.consider

    def counted(self, node: ir.Node) -> None:
        nonlocal seen
        seen += 1
        consider(self, node)

    monkeypatch.setattr(cleanup._Selection, "consider", counted)
    assert fold_constants(n.model()) == 0
    assert seen == 5000
