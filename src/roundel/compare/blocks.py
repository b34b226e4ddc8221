"""AMD's own operators: block formats, which store and restore a tensor in one node, and wide pairs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from roundel.check.pairs import QUARK
from roundel.check.stored import StoredTensor, StoredTensors, strip_pairs
from roundel.compare.cutting import cut_to
from roundel.model.graph import is_constant, op_key
from roundel.model.session import open_session

BLOCK_FORMATS = {f"{QUARK}::BFPQuantizeDequantize": "bfp", f"{QUARK}::MXQuantizeDequantize": "mx"}


def strip_stored(model: ir.Model) -> StoredTensors:
    """Take every pair and every block-format node out of the graph, in place, and say what they held."""
    blocks: dict[str, StoredTensor] = {}
    for node in list(model.graph):
        source = node.inputs[0] if op_key(node) in BLOCK_FORMATS else None
        if source is None:
            continue
        name, kind = str(source.name), BLOCK_FORMATS[op_key(node)]
        blocks.setdefault(name, StoredTensor(kind, np.ones(()), np.zeros(()), None, QUARK, name))
        ir.convenience.replace_all_uses_with(node.outputs[0], source, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    pairs = strip_pairs(model)
    return StoredTensors({**blocks, **pairs.tensors}, pairs.unreadable, pairs.mismatched)


def with_plain_constants(model: ir.Model) -> ir.Model:
    """A copy in which what AMD's operators make of constants is a constant itself.

    Their bodies are long, and ONNX Runtime takes minutes to load hundreds of them.
    """
    copy = model.clone()
    graph = copy.graph
    fixed: set[ir.Value] = set()
    for node in graph:
        if node.domain == QUARK and all(v is None or is_constant(v) or v in fixed for v in node.inputs):
            fixed.update(node.outputs)
    read = [value for value in fixed if any(use.node.outputs[0] not in fixed for use in value.uses())]
    if not read:
        return copy
    names = [str(value.name) for value in read]
    inputs = {str(value.name) for value in graph.inputs}
    arrays = open_session(cut_to(model, names, drop_inputs=inputs), simulate=True).run(names, {})
    for value, name, array in zip(read, names, arrays, strict=True):
        constant = ir.Value(
            name=f"roundel_constant:{name}",
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.FLOAT),
            const_value=ir.tensor(array, name=f"roundel_constant:{name}"),
        )
        graph.register_initializer(constant)
        ir.convenience.replace_all_uses_with(value, constant, replace_graph_outputs=True)
    graph.remove([node for node in graph if fixed.issuperset(node.outputs) and node.outputs])
    return copy
