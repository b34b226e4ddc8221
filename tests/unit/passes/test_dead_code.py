import onnx_ir as ir
from onnx import helper

from roundel.passes.cleanup import remove_dead_code


def test_removes_what_no_output_needs(net, apply):
    n = net()
    n.input("x", (4,))
    n.weight("unused", 3)
    n.weight("w", 4)
    n.node("Relu", ["x"], "y")
    n.node("Mul", ["x", "w"], "dead")
    n.node("Neg", ["dead"], "dead2")
    n.output("y")
    done = apply(n, remove_dead_code, 0)
    assert done.rewrites == 4
    assert done.ops == {"Relu": 1}
    assert not done.model.graph.initializers


def test_body_keeps_a_value_alive(net, apply):
    n = net()
    n.input("x", (4,))
    n.node("Relu", ["x"], "r")
    n.if_reads("r", "y")
    n.output("y")
    assert apply(n, remove_dead_code, 0).rewrites == 0


def test_dead_control_flow_lets_go_of_what_its_body_read(net, apply):
    n = net()
    n.input("x", (4,))
    n.node("Relu", ["x"], "r")
    n.if_reads("r", "dead")
    n.node("Neg", ["x"], "y")
    n.output("y")
    done = apply(n, remove_dead_code, 0)
    assert done.ops == {"Neg": 1}


def test_one_used_output_of_several(net, apply):
    n = net()
    n.input("x", (4,))
    n.node("Split", ["x"], ["a", "b"], axis=0)
    n.output("b")
    assert apply(n, remove_dead_code, 0).rewrites == 0


def test_functions_nobody_calls(net):
    n = net()
    n.input("x", (4,))
    n.nodes.append(helper.make_node("Outer", ["x"], ["y"], domain="local"))
    n.output("y")
    proto = helper.make_model(
        helper.make_graph(n.nodes, "g", n.inputs, n.outputs),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
        ir_version=8,
    )
    imports = list(proto.opset_import)
    for name, inner in (("Outer", ("Inner", "local")), ("Inner", ("Relu", "")), ("Lost", ("Relu", ""))):
        body = [helper.make_node(inner[0], ["a"], ["b"], domain=inner[1])]
        proto.functions.append(helper.make_function("local", name, ["a"], ["b"], body, imports))
    model = ir.from_proto(proto)
    assert remove_dead_code(model) == 1
    assert {key[1] for key in model.functions} == {"Outer", "Inner"}
