"""Q/DQ pairs taken out, under other names, or as QLinear operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.model.edit import Names, add_constant
from roundel.model.graph import attribute_float, attribute_int, constant_array, only_reader, opset_version
from roundel.numerics.affine import fake_quantize
from roundel.qdq import read
from roundel.qdq.nodes import CODES, MICROSOFT, QUARK, stand_for
from roundel.quark.tools.tool import Rewritten, dequantizer, on_copy

Pair = tuple[str, str]


@on_copy
def remove_qdq(model: ir.Model) -> str:
    """The float model that is left without Q/DQ nodes; weights keep the values that their codes stand for."""
    graph, names = model.graph, Names(model.graph)
    weights = count = 0
    for node in list(graph):
        values, codes = read.stored_values(node), node.inputs[0] if node.inputs else None
        if values is not None and codes is not None:
            whole = add_constant(graph, names(str(codes.name).removesuffix(CODES)), values)
            stand_for(graph, node.outputs[0], whole)
            weights += 1
    for quantizer, readers in list(read.pairs(graph)):
        source, said = quantizer.inputs[0], read.read_quantizer(quantizer)
        assert source is not None
        array, params = constant_array(source), None if said is None else said.params
        if array is not None and params is not None:  # a float constant: as its pair leaves it
            source = add_constant(graph, names(str(source.name)), fake_quantize(array, params))
        for reader in readers:
            stand_for(graph, reader.outputs[0], source)
        count += 1
    return f"removed {count} pairs, restored {weights} constants"


@on_copy
def remove_qdq_between_ops(model: ir.Model, between_ops: Iterable[Pair]) -> str:
    """Without the pairs between an operator and the one behind it, for each (maker, reader) given."""
    wanted, count = {tuple(pair) for pair in between_ops}, 0
    for quantizer, readers in read.pairs(model.graph):
        source = quantizer.inputs[0]
        maker = source.producer() if source is not None else None
        for use in [use for reader in readers for use in reader.outputs[0].uses()]:
            if maker is not None and (maker.op_type, use.node.op_type) in wanted:
                use.node.replace_input_with(use.idx, source)
                count += 1
    return f"removed the pair before {count} inputs"


def remove_qdq_mul_add(model: ir.Model) -> Rewritten:
    """Without the pairs between Mul and the Add behind it."""
    return remove_qdq_between_ops(model, [("Mul", "Add")])


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


@on_copy
def convert_customqdq_to_qdq(model: ir.Model) -> str:
    """AMD's Q/DQ operators on integers become ONNX Runtime's (com.microsoft); short floats stay."""
    count = left = 0
    for node in model.graph:
        if node.domain != QUARK or not (read.is_quantize(node) or read.is_dequantize(node)):
            continue
        said = read.read_quantizer(node)
        if said is None or said.dtype not in read.BITS:
            left += 1
            continue
        _rename(node, MICROSOFT, node.op_type.removeprefix("Extended"))
        count += 1
    _imports(model, MICROSOFT)
    more = f"; {left} of other types stay" if left else ""
    return f"renamed {count} nodes{more}"


@on_copy
def convert_qdq_to_customqdq(model: ir.Model) -> str:
    """Q/DQ nodes of any domain become AMD's operators, with bodies that a stock ONNX Runtime computes."""
    count = 0
    for node in model.graph:
        if node.op_type in _PLAIN:
            _rename(node, QUARK, f"Extended{node.op_type}")
            count += 1
    _imports(model, QUARK)
    if count:
        for op in _PLAIN:
            function = _body(op, opset_version(model))
            model.functions[function.identifier()] = function
        model.ir_version = max(model.ir_version, _IR_FUNCTION_DEFAULTS)
    return f"renamed {count} nodes"


def _body(op: str, opset: int) -> ir.Function:
    """AMD's operator on integers is ONNX Runtime's under another name."""
    inputs = [ir.Value(name=name) for name in ("x", "scale", "zero_point")]
    axis = ir.RefAttr("axis", "axis", ir.AttributeType.INT)
    node = ir.Node(MICROSOFT, op, inputs, attributes=[axis], outputs=[ir.Value(name="y")])
    imports = {"": opset, MICROSOFT: 1}
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports)
    return ir.Function(QUARK, f"Extended{op}", "", graph=graph, attributes=[ir.AttrInt64("axis", 1)])


@on_copy
def convert_custom_ops(model: ir.Model, reverse_conversion: bool = False) -> str:
    """AMD's operators under their older names (com.vai.quantize), or back."""
    names = {old: new for new, old in OLD_NAMES.items()} if reverse_conversion else OLD_NAMES
    domain = QUARK if reverse_conversion else OLD_DOMAIN
    count = 0
    for node in model.graph.all_nodes():
        if node.domain in (QUARK, OLD_DOMAIN) and node.op_type in names:
            _rename(node, domain, names[node.op_type])
            count += 1
    _imports(model, domain)
    return f"renamed {count} nodes"


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


_LAYERS = ("Conv", "MatMul", "Gemm")
_ELEMENTWISE = ("Add", "Mul", "Sigmoid", "LeakyRelu", "GlobalAveragePool")


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A node between pairs: its dequantizers in order, the quantizer behind it, and what all of them say."""

    node: ir.Node
    inputs: list[ir.Node]
    output: ir.Node
    said: list[read.Quantizer]

    def operands(self, count: int) -> list[ir.Value | None]:
        """Codes, scale and zero point of so many inputs."""
        return [value for maker in self.inputs[:count] for value in maker.inputs[:3]]

    @property
    def ends(self) -> list[ir.Value | None]:
        """Scale and zero point of the output."""
        return list(self.output.inputs[1:3])


@on_copy
def convert_qdq_to_qop(model: ir.Model) -> str:
    """QLinear operators for Conv, MatMul, Gemm, Add, Mul, Sigmoid, LeakyRelu and GlobalAveragePool in 8 bits.

    A node is converted where all its data inputs come from DQ nodes and only a Q node reads its output.
    Results may differ by one code: integer kernels round once, Q/DQ nodes compute in float.
    """
    count = 0
    for node in list(model.graph):
        place = _place(node) if node.op_type in (*_LAYERS, *_ELEMENTWISE) else None
        made = None if place is None else _layer(place) if node.op_type in _LAYERS else _elementwise(place)
        if place is None or made is None:
            continue
        out = place.output.outputs[0]
        # ONNX Runtime's integer convolution and product keep the pair's own output: codes behind codes.
        made.outputs[0].type = ir.TensorType(out.dtype or ir.DataType.UINT8)
        made.outputs[0].shape = out.shape
        made.name, made.outputs[0].name = f"{node.name}_quant", f"{out.name}_quant"
        model.graph.insert_before(place.output, made)
        stand_for(model.graph, out, made.outputs[0])
        if made.domain == MICROSOFT:
            model.graph.opset_imports.setdefault(MICROSOFT, 1)
        count += 1
    return f"{count} QLinear operators"


def _place(node: ir.Node) -> _Place | None:
    behind = only_reader(node.outputs[0])
    if not read.is_quantize(behind):
        return None
    found = list(filter(None, map(dequantizer, node.inputs)))
    said = list(filter(None, map(read.read_quantizer, (*found, behind))))
    if len(found) != len(node.inputs) or len(said) != len(found) + 1 or not _eight_bits(said[-1]):
        return None
    return _Place(node, found, behind, said)


def _eight_bits(said: read.Quantizer) -> bool:
    return read.BITS.get(said.dtype) == 8 and said.scale.size == 1


def _layer(place: _Place) -> ir.Node | None:
    node, (data, weight) = place.node, place.said[:2]
    codes = place.inputs[2].inputs[0] if len(place.inputs) > 2 else None
    bias = constant_array(codes)
    # The integer kernels take for granted that a bias is in 32 bits and in the step of the products.
    if not _eight_bits(data) or (codes is not None and (bias is None or bias.dtype != np.int32)):
        return None
    if node.op_type == "Conv" and read.BITS.get(weight.dtype) == 8:
        inputs = [*place.operands(2), *place.ends, *([codes] if codes is not None else [])]
        return ir.Node("", "QLinearConv", inputs, attributes=list(node.attributes.values()))
    if node.op_type == "Conv" or not _eight_bits(weight):
        return None
    if node.op_type == "MatMul":
        return ir.Node("", "QLinearMatMul", [*place.operands(2), *place.ends])
    if attribute_float(node, "beta", 1.0) != 1.0:
        return None
    attributes: list[ir.Attr] = [ir.AttrInt64(a, attribute_int(node, a, 0)) for a in ("transA", "transB")]
    attributes.append(ir.AttrFloat32("alpha", attribute_float(node, "alpha", 1.0)))
    return ir.Node(MICROSOFT, "QGemm", [*place.operands(2), codes, *place.ends], attributes=attributes)


def _elementwise(place: _Place) -> ir.Node | None:
    """Inputs and output have one element type, which the com.microsoft kernels ask for."""
    if not all(map(_eight_bits, place.said)) or len({said.dtype for said in place.said}) != 1:
        return None
    op, attributes = place.node.op_type, list(place.node.attributes.values())
    if op == "GlobalAveragePool":
        attributes.append(ir.AttrInt64("channels_last", 0))
    inputs = [*place.operands(len(place.inputs)), *place.ends]
    return ir.Node(MICROSOFT, f"QLinear{op}", inputs, attributes=attributes)
