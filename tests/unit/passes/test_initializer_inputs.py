import onnx
import onnx_ir as ir
from onnx import helper

from roundel.passes.cleanup import InitializerInputs


def test_weights_leave_the_inputs(net):
    n = net()
    n.input("x", (2, 4))
    n.weight("w", 4)
    n.node("Mul", ["x", "w"], "y")
    n.output("y")
    proto = n.proto()
    proto.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, (4,)))
    proto.ir_version = 3
    model = ir.from_proto(proto)
    assert InitializerInputs()(model) == 1
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert model.ir_version >= 4
    onnx.checker.check_model(ir.to_proto(model))


def test_nothing_to_do(net, apply):
    n = net()
    n.input("x", (2, 4))
    n.node("Relu", ["x"], "y")
    n.output("y")
    assert apply(n, InitializerInputs(), 0).rewrites == 0
