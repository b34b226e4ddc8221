"""The float model computing with packed weights, for measuring what they do."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from roundel.numerics.packed import Packed
from roundel.plan.weight_only import WeightLayer
from roundel.qdq.pairs import Names


class Carried:
    """A copy of the float model whose layers read weights of their own, float until packed ones come.

    Packed weights are restored each time they are read: they stay small in memory.

    Args:
        model: the prepared float model.
        layers: those whose weights will be packed.
    """

    def __init__(self, model: ir.Model, layers: Sequence[WeightLayer]) -> None:
        self.model = model.clone()
        graph, names = self.model.graph, Names(self.model.graph)
        nodes = {str(node.name): node for node in graph}
        self._values: dict[tuple[str, bool], ir.Value] = {}
        for layer in layers:
            node = nodes[layer.node]
            old = node.inputs[1]
            assert old is not None
            if layer.key not in self._values:
                name = names(f"{layer.weight}_carried")
                value = ir.Value(name=name, shape=old.shape, type=old.type, const_value=old.const_value)
                graph.register_initializer(value)
                self._values[layer.key] = value
            node.replace_input_with(1, self._values[layer.key])
            if not old.uses() and not old.is_graph_output():
                del graph.initializers[layer.weight]

    def take(self, layer: WeightLayer, stored: Packed) -> None:
        """From now on, compute this layer, and all with the same key, with a packed weight."""
        value = self._values[layer.key]
        assert value.shape is not None
        value.const_value = ir.LazyTensor(
            lambda: ir.tensor(layer.tensor(stored.restored())),
            dtype=ir.DataType.FLOAT,
            shape=value.shape,
            name=value.name,
        )
