"""Weights in files of their own: mapped while Roundel works, and never left behind in what it hands out."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir


def external_values(model: ir.Model) -> Iterator[tuple[ir.Value, ir.ExternalTensor]]:
    """Every initializer, in subgraphs too, whose data lie in another file."""
    for graph in (model.graph, *model.graph.subgraphs()):
        if isinstance(graph, ir.Graph):
            for value in graph.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    yield value, value.const_value


def self_contained(model: ir.Model) -> ir.Model:
    """The model, or a clone that refers to no other file; the clone's weights stay mapped, not copied."""
    if next(external_values(model), None) is None:
        return model
    clone = model.clone()
    for value, tensor in list(external_values(clone)):
        value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=value.name)
    return clone
