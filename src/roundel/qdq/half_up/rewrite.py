"""Q/DQ graphs that round halves up, once, on the whole sum, as the first NPU does.

ONNX rounds halves to even. Where all values are multiples of a known step, half a step more before the same Q
gives the other rule: ties leave the middle upwards, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from roundel.model import graph as look
from roundel.model.edit import Editor
from roundel.qdq import read
from roundel.qdq.half_up.lattice import FINEST, Lattice, finest, of_codes, of_constant, through
from roundel.qdq.half_up.layers import read_sums
from roundel.targets.operators import Trait, ops_with

MOVING = ops_with(
    Trait.SHAPES | Trait.REARRANGES | Trait.SELECTS | Trait.REPEATS | Trait.JOINS | Trait.MAXIMUM
)
_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_SLOPES = 256
_REAL = look.FLOAT_TYPES


class HalfUp:
    """One walk over a graph, in place: every Q of what the NPU makes rounds halves up.

    Constants keep their names and tensors theirs, so that whoever knows the graph can go on changing it.

    Args:
        model: with its pairs.
        takes: whether the NPU runs a node.
    """

    def __init__(self, model: ir.Model, takes: Callable[[ir.Node], bool]) -> None:
        self.editor, self.graph, self.takes = Editor(model), model.graph, takes
        self.known: dict[ir.Value, Lattice] = {}

    def run(self) -> None:
        """Rewrite every node."""
        for node in list(self.graph):
            if node.graph is not self.graph:
                continue  # replaced together with one before
            if read.is_quantize(node):
                self._quantize(node)
            elif read.is_dequantize(node):
                self._dequantize(node)
            elif look.op_key(node) != "Constant" and self.takes(node):
                self.compute(node)

    def compute(self, node: ir.Node) -> None:
        """Note what the node makes of what is known."""
        found = self._lattice(node, look.op_key(node))
        if found is not None:
            self.known |= dict.fromkeys(node.outputs, found)

    def layer(self, node: ir.Node, data: Lattice) -> Lattice | None:
        """The sums of a layer."""
        sums = read_sums(node, data)
        return None if sums is None else sums.lattice.cut()

    def nudge(self, quantizer: ir.Node, value: ir.Value, half: float, scale: float) -> None:
        """Half a step more before a Q."""
        more = self.editor.initializer(f"{value.name}_half", np.asarray(half, np.float32))
        moved = self.editor.insert(quantizer, "Add", [value, more], {}, f"{quantizer.name}_half")
        self._stand_for(value, moved, quantizer)

    def rounds(self, maker: ir.Node) -> None:
        """Hear that the Q behind a node rounds."""

    def _lattice(self, node: ir.Node, op: str) -> Lattice | None:
        """Of what the node makes; None where it is not known to be one."""
        inputs = [self.of(value) for value in node.inputs if value is not None and value.dtype in _REAL]
        first = inputs[0] if inputs else None
        if first is None:
            return None
        if op in _LAYERS:
            return self.layer(node, first)
        second = inputs[1] if len(inputs) == 2 else None
        if second is not None and op in ("Add", "Sub", "Mul"):
            if op == "Mul":
                return first.times(second)
            return first.plus(second if op == "Add" else second.negative())
        if op == "Relu":
            return Lattice(first.unit, 0.0, first.high)
        bounds = look.clip_bounds(node) if op == "Clip" else None
        if bounds is not None:
            return first.within(*bounds)
        if op == "LeakyRelu":
            return self._leaky(node, first)
        if op == "Pad" or is_nearest(node):
            return first
        known = [each for each in inputs if each is not None]
        if op not in MOVING or len(known) < len(inputs):
            return None
        for each in known[1:]:
            first = first.union(each)
        return first

    def of(self, value: ir.Value) -> Lattice | None:
        """Of a value, constant or made."""
        array = look.real_constant(value)
        if array is None or not array.size or not np.isfinite(array).all():
            return self.known.get(value)
        unit = min(finest(array.astype(np.float64)), 1.0)
        return Lattice(unit, min(float(array.min()) / unit, 0.0), max(float(array.max()) / unit, 0.0))

    def _leaky(self, node: ir.Node, data: Lattice) -> Lattice:
        """The NPU has the slope in steps of 1 / 256."""
        slope = round(_SLOPES * look.attribute_float(node, "alpha", 0.01))
        node.attributes["alpha"] = ir.AttrFloat32("alpha", slope / _SLOPES)
        return Lattice(data.unit / _SLOPES, min(data.low * slope, 0.0), data.high * _SLOPES)

    def _dequantize(self, node: ir.Node) -> None:
        stored, codes = read.read_quantizer(node), look.constant_array(node.inputs[0])
        if stored is None:
            return
        source = node.inputs[0]
        held = None if source is None else self.known.get(source)
        found = of_constant(codes, stored) if codes is not None else held or of_codes(stored)
        if found is not None:
            self.known[node.outputs[0]] = found

    def _quantize(self, node: ir.Node) -> None:
        value, stored = node.inputs[0], read.read_quantizer(node)
        if value is None or stored is None:
            return
        maker, lattice = value.producer(), self.known.get(value)
        held = through(stored, lattice)
        if held is not None:
            self.known[node.outputs[0]] = held
        if maker is None or stored.scale.size != 1 or not (self.takes(maker) or read.is_dequantize(maker)):
            return  # the CPU quantizes the graph's inputs and what it makes itself: halves to even
        scale = float(stored.scale.reshape(()))
        if lattice is not None and lattice.unit >= scale:
            return  # nothing to round
        self.rounds(maker)
        if lattice is not None and lattice.whole and scale / lattice.unit <= 2.0**FINEST:
            self.nudge(node, value, lattice.unit / 2, scale)
        else:
            self._floor(node, value, scale)

    def _floor(self, node: ir.Node, value: ir.Value, scale: float) -> None:
        """floor(x / s + 1/2), for values of which no step is known."""
        current: ir.Value = value
        for op, number in (("Mul", 1 / scale), ("Add", 0.5), ("Floor", None), ("Mul", scale)):
            inputs = [current]
            if number is not None:
                inputs.append(
                    self.editor.initializer(f"{node.name}_constant", np.asarray(number, np.float32))
                )
            current = self.editor.insert(node, op, inputs, {}, f"{node.name}_half_up")
        self._stand_for(value, current, node)

    def _stand_for(self, value: ir.Value, new: ir.Value, quantizer: ir.Node) -> None:
        """Let the quantizer read the new value, under the old one's name where nobody else knows it."""
        quantizer.replace_input_with(0, new)
        if not value.is_graph_output() and len(value.uses()) == 1:  # what makes the new one
            name, value.name = value.name, self.editor.fresh(f"{value.name}_exact")
            new.name = name
        new.type, new.shape = value.type, value.shape


def is_nearest(node: ir.Node) -> bool:
    """Whether the node is a Resize that only repeats or drops values."""
    mode = look.attribute_string(node, "mode", "nearest")
    return look.op_key(node) == "Resize" and mode == "nearest"


def round_half_up(model: ir.Model) -> None:
    """Let every node of a written model round so, in place."""
    HalfUp(model, lambda node: True).run()
