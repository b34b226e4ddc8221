"""A model that travels to other processes, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.external import self_contained

_WORTH_CARRYING = 1024  # bytes; smaller constants stay in the outline


@dataclass(frozen=True, slots=True, eq=False)
class Portable:
    """A model as plain bytes and arrays, which pickle well: protobuf alone ends at 2 GB.

    Attributes:
        outline: the graph without its large constants.
        weights: these, by name.
    """

    outline: bytes
    weights: dict[str, NDArray[Any]]

    @staticmethod
    def of(model: ir.Model) -> Portable:
        """A model, packed; it is not changed."""
        outline = self_contained(model).clone()
        weights: dict[str, NDArray[Any]] = {}
        for name, value in outline.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _WORTH_CARRYING or tensor.dtype is ir.DataType.STRING:
                continue
            weights[name] = tensor.numpy()
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor("carried", 0, None, tensor.dtype, shape=shape, name=name)
        return Portable(ir.to_proto(outline).SerializeToString(), weights)

    def model(self) -> ir.Model:
        """The model again."""
        model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(self.outline))
        for name, array in self.weights.items():
            value = model.graph.initializers[name]
            assert value.const_value is not None
            value.const_value = ir.Tensor(array, value.const_value.dtype, name=name)
        return model
