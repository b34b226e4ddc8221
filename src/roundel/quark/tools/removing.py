"""Take Q/DQ pairs out of a model: all of them, or those between given operators."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from roundel.model.graph import constant_array, is_constant
from roundel.quark.tools.files import Rewritten
from roundel.quark.tools.wiring import (
    along,
    fresh_constant,
    is_dequantize,
    is_quantize,
    numbers,
    pairs,
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
