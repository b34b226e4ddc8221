"""Write the tensors of a short-float model in another form: pairs, casts, or a plain graph.

A plain graph is what a compiler converts by itself: constants are rounded, the inputs are cast there and
back, and nothing else tells that the model is not float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from roundel.model.graph import constant_array, is_constant
from roundel.numerics.short_floats import rounded
from roundel.qdq.floats import FloatCell
from roundel.qdq.lift import LEFT_NAME, Stored, forget
from roundel.qdq.pairs import QUARK, Names, constant

Form = Literal["pair", "cast", "plain"]


def put(graph: ir.Graph, tensors: Sequence[Stored], form: Form, *, half_weights: bool = False) -> None:
    """Store lifted tensors in the given form, in place.

    Args:
        graph: where they were lifted from.
        tensors: what `lift` gave.
        form: pair, cast, or plain: constants rounded, casts at the graph inputs only.
        half_weights: constants in 16 bits.
    """
    names = Names(graph)
    for tensor in tensors:
        if is_constant(tensor.value):
            _put_constant(graph, names, tensor, form, half_weights=half_weights)
        elif form != "plain" or tensor.value.is_graph_input():
            _put_moving(graph, names, tensor, "cast" if form == "plain" else form)
    if any(node.domain == QUARK for node in graph):
        graph.opset_imports.setdefault(QUARK, 1)
    graph.sort()


def _put_moving(graph: ir.Graph, names: Names, tensor: Stored, form: Literal["pair", "cast"]) -> None:
    source, out_name = tensor.value, None
    if tensor.outputs and graph.outputs[tensor.outputs[0]] is source:
        out_name = str(source.name)
        source.name = names(f"{tensor.base}{LEFT_NAME}")
    cell = FloatCell.make(graph, names, tensor.base, tensor.ftype, tensor.factor, form)
    out = names(f"{tensor.base}_DequantizeLinear_Output") if out_name is None else out_name
    nodes = cell.there_and_back(source, out, clip=tensor.clipped)
    _insert(graph, source, nodes)
    last = nodes[-1].outputs[0]
    for node, index in tensor.uses:
        node.replace_input_with(index, last)
    if out_name is not None:
        for position in tensor.outputs:
            last.shape, last.type = source.shape, source.type
            graph.outputs[position] = last


def _insert(graph: ir.Graph, source: ir.Value, nodes: list[ir.Node]) -> None:
    producer = source.producer()
    if producer is not None:
        graph.insert_after(producer, nodes)
    else:
        graph.insert_before(graph[0], nodes)


def _put_constant(graph: ir.Graph, names: Names, tensor: Stored, form: Form, *, half_weights: bool) -> None:
    value, array = tensor.value, constant_array(tensor.value)
    assert array is not None
    if form == "plain" and not half_weights:
        factor = np.float32(1) if tensor.factor is None else tensor.factor
        content = np.asarray(rounded(array / factor, tensor.ftype) * factor, np.float32)
        if len(value.uses()) == len(tensor.uses) and not value.is_graph_output():
            value.const_value = ir.tensor(content, name=value.name)
            return
        last = constant(graph, names(f"{tensor.base}_rounded"), content)
    else:
        kind: Literal["pair", "cast"] = "pair" if form == "pair" else "cast"
        cell = FloatCell.make(graph, names, tensor.base, tensor.ftype, tensor.factor, kind)
        out = names(f"{tensor.base}_DequantizeLinear_Output")
        nodes = cell.stored(array, out) if half_weights else cell.there_and_back(value, out, clip=False)
        _insert(graph, value, nodes)
        last = nodes[-1].outputs[0]
    for node, index in tensor.uses:
        node.replace_input_with(index, last)
    forget(graph, value)
