"""Layers as sums of whole steps: how large they get, and two halves of a weight where that is too large."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from roundel.model import graph as look
from roundel.model.edit import Editor
from roundel.qdq import read
from roundel.qdq.half_up.lattice import Lattice, of_constant, of_layer
from roundel.types import Array, Doubles

_PART = 16.0  # a weight of 8 bits is 16 times one of 5 bits, and one of 4 bits more


class SummedLayer:
    """A layer in the graph whose sums are known to be whole steps.

    Attributes:
        node: the layer.
        lattice: that all its sums, and all parts of them, lie on.
    """

    def __init__(self, node: ir.Node, lattice: Lattice, bias: Doubles) -> None:
        self.node, self.lattice = node, lattice
        self._bias = bias

    @property
    def takes_half(self) -> bool:
        """Whether the sums leave room for half a step more."""
        return Lattice(self.lattice.unit / 2, 2 * self.lattice.low, 2 * self.lattice.high + 1).whole

    def add_half(self, editor: Editor) -> None:
        """Half a step more in the bias."""
        more = (self._bias + self.lattice.unit / 2).astype(np.float32)
        name = f"{self.node.name}_bias_and_half"
        if len(self.node.inputs) < 3:
            self.node.resize_inputs(3)
        self.node.replace_input_with(2, editor.initializer(name, more))

    def split(self, editor: Editor) -> ir.Node:
        """Two layers with the high and the low bits of the weight, and their sum.

        Each is exact in float32; so is their sum, unless it is so large that the next Q saturates.

        Returns:
            The sum.
        """
        maker = self.node.inputs[1].producer() if self.node.inputs[1] is not None else None
        values = read.stored_values(maker)
        stored = None if maker is None else read.read_quantizer(maker)
        assert values is not None
        assert stored is not None
        step = float(stored.scale.reshape(())) * _PART
        high = np.rint(values / step) * step
        node, name = self.node, str(self.node.name)
        low = [node.inputs[0], editor.initializer(f"{name}_low", (values - high).astype(np.float32))]
        attributes = {key: attribute.value for key, attribute in node.attributes.items()}
        part = editor.insert(node, node.op_type, low, attributes, f"{name}_low")
        node.replace_input_with(1, editor.initializer(f"{name}_high", high.astype(np.float32)))
        out, readers = node.outputs[0], [(use.node, use.idx) for use in node.outputs[0].uses()]
        total = ir.node("Add", [out, part], name=editor.fresh(f"{name}_sum"))
        total.outputs[0].type, total.outputs[0].shape = out.type, out.shape
        total.outputs[0].name, out.name = out.name, editor.fresh(f"{name}_high")
        node.append(total)
        for reader, index in readers:
            reader.replace_input_with(index, total.outputs[0])
        return total


def read_sums(node: ir.Node, data: Lattice) -> SummedLayer | None:
    """The sums of a Conv, ConvTranspose or Gemm; None where they are not whole steps."""
    weight = node.inputs[1].producer() if node.inputs[1] is not None else None
    codes = look.constant_array(weight.inputs[0]) if read.is_dequantize(weight) else None
    stored = None if weight is None or codes is None else read.read_quantizer(weight)
    lattice = None if stored is None or codes is None else of_constant(codes, stored)
    if lattice is None or codes is None or stored is None or not _plain(node):
        return None
    rows = _rows(node, codes.astype(np.float64) - float(stored.zero_point.reshape(-1)[0]))
    bias = _bias(node, len(rows))
    return None if bias is None else SummedLayer(node, of_layer(data, lattice, rows, bias), bias)


def _plain(node: ir.Node) -> bool:
    factors = [look.attribute_float(node, name, 1.0) for name in ("alpha", "beta")]
    return node.op_type != "Gemm" or factors == [1.0, 1.0]


def _rows(node: ir.Node, weight: Doubles) -> Doubles:
    """One row for each output; of a grouped ConvTranspose in the order of the outputs."""
    if node.op_type == "Gemm":
        return weight if look.attribute_int(node, "transB", 0) else weight.T
    if node.op_type == "Conv":
        return weight.reshape(len(weight), -1)
    groups = look.attribute_int(node, "group", 1)
    blocks = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)
    return blocks.transpose(0, 2, 1, 3).reshape(groups * weight.shape[1], -1)


def _bias(node: ir.Node, outputs: int) -> Doubles | None:
    """As numbers, one for each output; None where it is computed, or has another shape."""
    value = look.input_at(node, 2)
    if value is None:
        return np.zeros(outputs)
    stored: Array | None = read.stored_values(value.producer())
    array = look.real_constant(value) if stored is None else stored
    if array is None or array.size not in (1, outputs):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (outputs,)).copy()
