"""AMD's own Q/DQ operators, their older names, and ONNX Runtime's."""

from __future__ import annotations

import onnx_ir as ir

from roundel.model.graph import opset_version
from roundel.qdq.nodes import MICROSOFT, QUARK
from roundel.quark.tools.files import Rewritten
from roundel.quark.tools.wiring import DEQUANTIZE, QUANTIZE, numbers, tidy

OLD_DOMAIN = "com.vai.quantize"
OLD_NAMES = {
    "ExtendedQuantizeLinear": "VitisQuantizeLinear",
    "ExtendedDequantizeLinear": "VitisDequantizeLinear",
    "ExtendedInstanceNormalization": "VitisInstanceNormalization",
    "ExtendedLSTM": "VitisLSTM",
    "BFPQuantizeDequantize": "BFPFixNeuron",
    "MXQuantizeDequantize": "MXFixNeuron",
}
_PLAIN = ("QuantizeLinear", "DequantizeLinear")
_IR_FUNCTION_DEFAULTS = 9
_INTEGERS = frozenset({"int8", "uint8", "int16", "uint16", "int32"})


def convert_customqdq_to_qdq(model: ir.Model) -> Rewritten:
    """AMD's Q/DQ operators on integers become ONNX Runtime's (com.microsoft); short floats stay."""
    result = model.clone()
    count = left = 0
    for node in result.graph:
        if node.domain != QUARK or node.op_type not in QUANTIZE | DEQUANTIZE:
            continue
        given = numbers(node)
        if given is None or given[1].dtype.name not in _INTEGERS:
            left += 1
            continue
        _rename(node, MICROSOFT, node.op_type.removeprefix("Extended"))
        count += 1
    _imports(result, MICROSOFT)
    more = f"; {left} of other types stay" if left else ""
    return tidy(result), f"renamed {count} nodes{more}"


def convert_qdq_to_customqdq(model: ir.Model) -> Rewritten:
    """Q/DQ nodes of any domain become AMD's operators, with bodies that a stock ONNX Runtime computes."""
    result = model.clone()
    count = 0
    for node in result.graph:
        if node.op_type in _PLAIN:
            _rename(node, QUARK, f"Extended{node.op_type}")
            count += 1
    _imports(result, QUARK)
    if count:
        for op in _PLAIN:
            function = _body(op, opset_version(result))
            result.functions[function.identifier()] = function
        result.ir_version = max(result.ir_version, _IR_FUNCTION_DEFAULTS)
    return tidy(result), f"renamed {count} nodes"


def _body(op: str, opset: int) -> ir.Function:
    """AMD's operator on integers is ONNX Runtime's under another name."""
    inputs = [ir.Value(name=name) for name in ("x", "scale", "zero_point")]
    axis = ir.RefAttr("axis", "axis", ir.AttributeType.INT)
    node = ir.Node(MICROSOFT, op, inputs, attributes=[axis], outputs=[ir.Value(name="y")])
    imports = {"": opset, MICROSOFT: 1}
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports)
    return ir.Function(QUARK, f"Extended{op}", "", graph=graph, attributes=[ir.AttrInt64("axis", 1)])


def convert_custom_ops(model: ir.Model, reverse_conversion: bool = False) -> Rewritten:
    """AMD's operators under their older names (com.vai.quantize), or back."""
    result = model.clone()
    names = {old: new for new, old in OLD_NAMES.items()} if reverse_conversion else OLD_NAMES
    domain = QUARK if reverse_conversion else OLD_DOMAIN
    count = 0
    for node in result.graph.all_nodes():
        if node.domain in (QUARK, OLD_DOMAIN) and node.op_type in names:
            _rename(node, domain, names[node.op_type])
            count += 1
    _imports(result, domain)
    return result, f"renamed {count} nodes"


def _rename(node: ir.Node, domain: str, op_type: str) -> None:
    node.domain, node.op_type, node.overload = domain, op_type, ""


def _imports(model: ir.Model, domain: str) -> None:
    """Import the domains that are in use, and no others of AMD's."""
    used = {node.domain for node in model.graph.all_nodes()}
    for name in (QUARK, OLD_DOMAIN, MICROSOFT):
        if name in used:
            model.graph.opset_imports.setdefault(name, 1)
        elif name != MICROSOFT:
            model.graph.opset_imports.pop(name, None)
