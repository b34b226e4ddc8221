"""Weights in files of their own: mapped while Roundel works, and never left behind in what it hands out."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir


def external_values(model: ir.Model) -> Iterator[tuple[ir.Value, ir.ExternalTensor]]:
    """Every initializer, in subgraphs too, whose data lie in another file."""
    for graph in (model.graph, *model.graph.subgraphs()):
        if isinstance(graph, ir.Graph):
            for value in graph.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    yield value, value.const_value


def self_contained(model: ir.Model, keep: Collection[str] = ()) -> ir.Model:
    """The model, or a clone that refers to no other file; the clone's weights stay mapped, not copied.

    Args:
        model: any model.
        keep: initializers that may go on referring to their file.
    """
    if all(value.name in keep for value, _ in external_values(model)):
        return model
    clone = model.clone()
    for value, tensor in list(external_values(clone)):
        if value.name not in keep:
            content = tensor.numpy()
            value.const_value = ir.Tensor(content, dtype=tensor.dtype, shape=tensor.shape, name=value.name)
    return clone
