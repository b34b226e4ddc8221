import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from roundel.errors import ModelError
from roundel.passes import refresh_shapes
from roundel.passes.shapes import _skeleton


def shape_of(model, name):
    values = {value.name: value for node in model.graph for value in node.outputs}
    return [str(d) for d in values[name].shape]


def test_weights_do_not_travel(net):
    n = net()
    n.input("x", (2, 3000))
    n.weight("w", 3000, 40)
    n.node("MatMul", ["x", "w"], "y")
    n.output("y")
    model = n.model()
    assert _skeleton(model).ByteSize() < 1000
    refresh_shapes(model)
    assert shape_of(model, "y") == ["2", "40"]
    assert model.graph.initializers["w"].const_value is not None


def test_shape_tensors_are_read_and_large_constants_are_not(net):
    n = net()
    n.input("x", ("N", 12), (2, 12))
    n.const("target", np.array([0, 3, 4]))
    n.node("Reshape", ["x", "target"], "r")
    n.node("Constant", [], "big", value=onnx.numpy_helper.from_array(np.ones((500, 4), np.float32)))
    n.node("MatMul", ["big", "r_t"], "y")
    n.nodes.insert(2, helper.make_node("Transpose", ["r"], ["r_t"], perm=[0, 2, 1]))
    n.output("y")
    model = n.model()
    refresh_shapes(model)
    assert shape_of(model, "r") == ["N", "3", "4"]
    assert shape_of(model, "y") == ["N", "500", "3"]


def test_stale_declarations_give_way(net):
    n = net()
    n.input("x", (2, 3))
    n.node("Relu", ["x"], "a")
    n.node("Relu", ["a"], "y")
    n.output("y")
    model = n.model()
    first = next(iter(model.graph)).outputs[0]
    first.shape = ir.Shape([7, 7])
    refresh_shapes(model)
    assert shape_of(model, "a") == ["2", "3"]


def test_declared_outputs_of_custom_operators_are_used(net):
    n = net()
    n.input("x", (2, 3))
    n.node("Mystery", ["x"], "m", domain="vendor.custom")
    n.node("Relu", ["m"], "y")
    n.output("y")
    proto = n.proto()
    proto.graph.value_info.append(helper.make_tensor_value_info("m", onnx.TensorProto.FLOAT, (5, 6)))
    model = ir.from_proto(proto)
    refresh_shapes(model)
    assert shape_of(model, "y") == ["5", "6"]


def test_a_graph_that_onnx_cannot_walk(net):
    n = net()
    n.input("x", (2, 3))
    n.node("Mystery", ["x"], "y", domain="vendor.custom")
    n.output("y")
    model = n.model()
    del model.opset_imports["vendor.custom"]
    with pytest.raises(ModelError, match="cannot be inferred") as caught:
        refresh_shapes(model)
    assert "vendor.custom" in str(caught.value)
