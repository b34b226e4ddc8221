"""Q/DQ models with QLinear operators in place of what stands between the pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.model.graph import attribute_float, attribute_int, constant_array
from roundel.qdq.nodes import MICROSOFT
from roundel.quark.tools.files import Rewritten
from roundel.quark.tools.wiring import is_dequantize, is_quantize, numbers, set_type, stand_for, tidy

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
