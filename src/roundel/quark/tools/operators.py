"""Take Q/DQ pairs out of a model: all of them, or those between given operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.model.graph import attribute_float, attribute_int, constant_array, is_constant, opset_version
from roundel.qdq.nodes import MICROSOFT, QUARK
from roundel.quark.tools.tool import Rewritten
from roundel.quark.tools.wiring import (
    DEQUANTIZE,
    QUANTIZE,
    along,
    fresh_constant,
    is_dequantize,
    is_quantize,
    numbers,
    pairs,
    set_type,
    stand_for,
    stored_values,
    tidy,
)

Pair = tuple[str, str]


def remove_qdq(model: ir.Model) -> Rewritten:
    """The float model that is left without Q/DQ nodes; weights keep the values that their codes stand for."""
    result = model.clone()
    graph = result.graph
    weights = sum(_restore_constant(graph, node) for node in list(graph) if is_dequantize(node))
    count = 0
    for quantizer, readers in list(pairs(graph)):
        source = quantizer.inputs[0]
        assert source is not None
        if is_constant(source):
            source = _rounded(graph, quantizer, source)
        for reader in readers:
            stand_for(graph, reader.outputs[0], source)
        count += 1
    return tidy(result), f"removed {count} pairs, restored {weights} constants"


def _restore_constant(graph: ir.Graph, node: ir.Node) -> bool:
    values = stored_values(node)
    if values is None:
        return False
    base = str(node.inputs[0].name if node.inputs[0] is not None else node.name)
    whole = fresh_constant(graph, base.removesuffix("_quantized"), values)
    stand_for(graph, node.outputs[0], whole)
    return True


def _rounded(graph: ir.Graph, node: ir.Node, source: ir.Value) -> ir.Value:
    """A float constant as its pair leaves it; short floats and blocks are left to the file's own values."""
    array, given = constant_array(source), numbers(node)
    if array is None or given is None or given[1].dtype.kind not in "iu":
        return source
    scale, zero = (along(part, node, array.ndim).astype(np.float64) for part in given)
    limits = np.iinfo(given[1].dtype)
    codes = np.clip(np.rint(array / scale) + zero, limits.min, limits.max)
    return fresh_constant(graph, str(source.name), np.asarray((codes - zero) * scale, np.float32))


def remove_qdq_between_ops(model: ir.Model, between_ops: Iterable[Pair]) -> Rewritten:
    """Without the pairs between an operator and the one behind it, for each (maker, reader) given."""
    result = model.clone()
    wanted, count = {tuple(pair) for pair in between_ops}, 0
    for quantizer, readers in list(pairs(result.graph)):
        source = quantizer.inputs[0]
        maker = source.producer() if source is not None else None
        if maker is None or source is None:
            continue
        for reader in readers:
            for use in list(reader.outputs[0].uses()):
                if (maker.op_type, use.node.op_type) in wanted:
                    use.node.replace_input_with(use.idx, source)
                    count += 1
    return tidy(result), f"removed the pair before {count} inputs"


def remove_qdq_mul_add(model: ir.Model) -> Rewritten:
    """Without the pairs between Mul and the Add behind it."""
    return remove_qdq_between_ops(model, [("Mul", "Add")])


def operator_pairs(text: str) -> list[Pair]:
    """'Conv,Relu;Mul,Add' as pairs."""
    found = []
    for item in filter(str.strip, text.split(";")):
        maker, comma, reader = item.partition(",")
        if not comma:
            raise ValueError(item)
        found.append((maker.strip(), reader.strip()))
    return found


def quantizers(model: ir.Model) -> int:
    """How many Q and DQ nodes there are."""
    return sum(is_quantize(node) or is_dequantize(node) for node in model.graph)


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


_EIGHT_BITS = (np.dtype(np.int8), np.dtype(np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A node between pairs: its dequantizers in order, and the quantizer behind it."""

    node: ir.Node
    inputs: list[ir.Node]
    output: ir.Node


def convert_qdq_to_qop(model: ir.Model) -> Rewritten:
    """QLinear operators for Conv, MatMul, Gemm, Add, Mul, Sigmoid, LeakyRelu and GlobalAveragePool in 8 bits.

    A node is converted where all its data inputs come from DQ nodes and only a Q node reads its output.
    Results may differ by one code: integer kernels round once, Q/DQ nodes compute in float.
    """
    result = model.clone()
    count = 0
    for node in list(result.graph):
        place = _place(node)
        made = _BUILDERS[node.op_type](place) if place is not None else None
        if place is None or made is None:
            continue
        out = place.output.outputs[0]
        # ONNX Runtime's integer convolution and product keep the pair's own output: codes behind codes.
        set_type(made.outputs[0], out.dtype or ir.DataType.UINT8)
        made.outputs[0].shape = out.shape
        made.name, made.outputs[0].name = f"{node.name}_quant", f"{out.name}_quant"
        result.graph.insert_before(place.output, made)
        stand_for(result.graph, out, made.outputs[0])
        if made.domain == MICROSOFT:
            result.graph.opset_imports.setdefault(MICROSOFT, 1)
        count += 1
    return tidy(result), f"{count} QLinear operators"


def _place(node: ir.Node) -> _Place | None:
    if node.op_type not in _BUILDERS or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
        return None
    makers = [value.producer() if value is not None else None for value in node.inputs]
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or not is_quantize(uses[0].node):
        return None
    found = [maker for maker in makers if maker is not None]
    if len(found) != len(node.inputs) or not all(map(_readable, found)) or not _eight_bits(uses[0].node):
        return None
    return _Place(node, found, uses[0].node)


def _readable(node: ir.Node) -> bool:
    return is_dequantize(node) and numbers(node) is not None


def _eight_bits(node: ir.Node) -> bool:
    given = numbers(node)
    return given is not None and given[1].dtype in _EIGHT_BITS and given[0].size == 1


def _triple(node: ir.Node) -> list[ir.Value | None]:
    """Codes, scale and zero point."""
    return [*node.inputs[:3]]


def _behind(place: _Place) -> list[ir.Value | None]:
    return [*place.output.inputs[1:3]]


def _bias_codes(place: _Place) -> ir.Value | None:
    """32-bit codes in the step of the products, which the integer kernels take for granted."""
    if len(place.inputs) < 3:
        return None
    codes = constant_array(place.inputs[2].inputs[0])
    return place.inputs[2].inputs[0] if codes is not None and codes.dtype == np.int32 else None


def _conv(place: _Place) -> ir.Node | None:
    bias = _bias_codes(place)
    if (bias is None) != (len(place.inputs) < 3) or not _eight_bits(place.inputs[0]):
        return None
    weight = numbers(place.inputs[1])
    if weight is None or weight[1].dtype not in _EIGHT_BITS:
        return None
    inputs = [*_triple(place.inputs[0]), *_triple(place.inputs[1]), *_behind(place)]
    inputs += [bias] if bias is not None else []
    return ir.Node("", "QLinearConv", inputs, attributes=list(place.node.attributes.values()))


def _matmul(place: _Place) -> ir.Node | None:
    if not all(_eight_bits(node) for node in place.inputs):
        return None
    inputs = [*_triple(place.inputs[0]), *_triple(place.inputs[1]), *_behind(place)]
    return ir.Node("", "QLinearMatMul", inputs)


def _gemm(place: _Place) -> ir.Node | None:
    node, bias = place.node, _bias_codes(place)
    plain = attribute_float(node, "beta", 1.0) == 1.0
    if (bias is None) != (len(place.inputs) < 3) or not plain:
        return None
    if not all(_eight_bits(maker) for maker in place.inputs[:2]):
        return None
    attributes = [
        ir.AttrInt64("transA", attribute_int(node, "transA", 0)),
        ir.AttrInt64("transB", attribute_int(node, "transB", 0)),
        ir.AttrFloat32("alpha", attribute_float(node, "alpha", 1.0)),
    ]
    inputs = [*_triple(place.inputs[0]), *_triple(place.inputs[1]), bias, *_behind(place)]
    return ir.Node(MICROSOFT, "QGemm", inputs, attributes=attributes)


def _of_two(op: str) -> Callable[[_Place], ir.Node | None]:
    def build(place: _Place) -> ir.Node | None:
        if not all(_eight_bits(node) for node in place.inputs) or not _one_type(place):
            return None
        inputs = [*_triple(place.inputs[0]), *_triple(place.inputs[1]), *_behind(place)]
        return ir.Node(MICROSOFT, op, inputs)

    return build


def _of_one(op: str, *, channels_last: bool = False) -> Callable[[_Place], ir.Node | None]:
    def build(place: _Place) -> ir.Node | None:
        if not _eight_bits(place.inputs[0]) or not _one_type(place):
            return None
        attributes = list(place.node.attributes.values())
        if channels_last:
            attributes.append(ir.AttrInt64("channels_last", 0))
        return ir.Node(MICROSOFT, op, [*_triple(place.inputs[0]), *_behind(place)], attributes=attributes)

    return build


def _one_type(place: _Place) -> bool:
    """Whether inputs and output have one element type, which the com.microsoft kernels ask for."""
    found = [numbers(node) for node in (*place.inputs, place.output)]
    return len({given[1].dtype for given in found if given is not None}) == 1


_BUILDERS: dict[str, Callable[[_Place], ir.Node | None]] = {
    "Conv": _conv,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Add": _of_two("QLinearAdd"),
    "Mul": _of_two("QLinearMul"),
    "Sigmoid": _of_one("QLinearSigmoid"),
    "LeakyRelu": _of_one("QLinearLeakyRelu"),
    "GlobalAveragePool": _of_one("QLinearGlobalAveragePool", channels_last=True),
}
