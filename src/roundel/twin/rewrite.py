"""A Q/DQ graph that computes what the first NPU computes: halves go up, once, on the whole sum.

ONNX rounds halves to even. Where all values are multiples of a known step, half a step more before the same Q
gives the other rule at no price: ties leave the middle upwards, and nothing else changes. For a layer it goes
into the bias.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from roundel.model import graph as look
from roundel.model.edit import Editor
from roundel.numerics.affine import pool_gain
from roundel.qdq import read
from roundel.rules.placement import is_gain
from roundel.targets.operators import Trait, ops_with
from roundel.targets.x1 import Evidence, x1_row
from roundel.twin.lattice import FINEST, Lattice, finest, of_codes, of_constant, of_layer, through
from roundel.twin.layers import SummedLayer, read_sums

_MOVING = ops_with(
    Trait.SHAPES | Trait.REARRANGES | Trait.SELECTS | Trait.REPEATS | Trait.JOINS | Trait.MAXIMUM
)
_ORDER_KEEPING = ("Relu", "MaxPool")  # half a step passes through them
_SIXTH, _SIXTH_ERROR = 1 / 6, 1e-3
_HARD_SIGMOID = 2731 / 2**14
_SLOPES = 256
_WHOLE = 2.0**24


class Rewriter:
    """One walk over a graph, in place.

    Attributes:
        evidence: how well each node's numbers are known, by its name in the file.
    """

    def __init__(self, model: ir.Model, on_npu: Collection[str]) -> None:
        self.editor, self.graph = Editor(model), model.graph
        self.evidence: dict[str, Evidence] = {}
        self._on_npu = on_npu
        self._known: dict[ir.Value, Lattice] = {}
        self._layers: dict[ir.Node, SummedLayer] = {}
        self._made: set[str] = set()

    def run(self) -> None:
        """Rewrite every node."""
        for node in list(self.graph):
            if node.graph is not self.graph:
                continue  # a gain, gone with its pool
            if read.is_quantize(node):
                self._quantize(node)
            elif read.is_dequantize(node):
                self._dequantize(node)
            elif look.op_key(node) != "Constant":
                self._compute(node)

    def _compute(self, node: ir.Node) -> None:
        name, op = str(node.name), look.op_key(node)
        if name not in self._on_npu:
            self.evidence[name] = Evidence.CPU
            return
        self.evidence[name] = x1_row(op).arithmetic
        if op in ("GlobalAveragePool", "AveragePool"):
            self._pool(node)
            return
        if op == "HardSigmoid" and self._hard_sigmoid(node):
            return
        if op == "Conv" and _as_measured(node):
            self.evidence[name] = Evidence.MEASURED
        found = self._lattice(node, op)
        if found is not None:
            self._known[node.outputs[0]] = found
            for other in node.outputs[1:]:
                self._known[other] = found
        elif self.evidence[name] is not Evidence.COPIED:
            self.evidence[name] = Evidence.ASSUMED

    def _lattice(self, node: ir.Node, op: str) -> Lattice | None:
        """Of what the node makes; None where it is not known to be one."""
        inputs = [self._of(value) for value in node.inputs if value is not None and value.dtype in _REAL]
        first = inputs[0] if inputs else None
        if first is None:
            return None
        if op in ("Conv", "ConvTranspose", "Gemm"):
            return self._layer(node, first)
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
        nearest = op == "Resize" and look.attribute_string(node, "mode", "nearest") == "nearest"
        if nearest:
            self.evidence[str(node.name)] = Evidence.COPIED
        if op == "Pad" or nearest:
            return first
        known = [each for each in inputs if each is not None]
        if op not in _MOVING or len(known) < len(inputs):
            return None
        for each in known[1:]:
            first = first.union(each)
        return first

    def _of(self, value: ir.Value) -> Lattice | None:
        array = look.real_constant(value)
        if array is None or not array.size or not np.isfinite(array).all():
            return self._known.get(value)
        unit = min(finest(array.astype(np.float64)), 1.0)
        return Lattice(unit, min(float(array.min()) / unit, 0.0), max(float(array.max()) / unit, 0.0))

    def _layer(self, node: ir.Node, data: Lattice) -> Lattice | None:
        sums = read_sums(node, data)
        if sums is None:
            return None
        self._layers[node] = sums
        lattice = sums.lattice.cut()
        if not sums.lattice.whole:
            joined = sums.split(self.editor)
            self._made.add(str(joined.name))
            self._known[joined.outputs[0]] = lattice
        return lattice

    def _leaky(self, node: ir.Node, data: Lattice) -> Lattice:
        """The NPU has the slope in steps of 1 / 256."""
        slope = round(_SLOPES * look.attribute_float(node, "alpha", 0.01))
        node.attributes["alpha"] = ir.AttrFloat32("alpha", slope / _SLOPES)
        return Lattice(data.unit / _SLOPES, min(data.low * slope, 0.0), data.high * _SLOPES)

    def _pool(self, node: ir.Node) -> None:
        """A Conv whose weights are the NPU's k / 2**n, whether or not the file has a Mul that imitates it."""
        data, shape = None if node.inputs[0] is None else self._of(node.inputs[0]), look.dims(node.inputs[0])
        window = _window(node, shape or ())
        channels = shape[1] if shape and window else None
        if data is None or channels is None or window is None:
            return
        kernel, attributes = window
        factor = pool_gain(*kernel) / math.prod(kernel)
        step = finest(np.asarray([factor]))
        if factor / step > _WHOLE:
            return  # no k / 2**n: the NPU's own is not known
        weight = np.full((channels, 1, *kernel), factor, np.float32)
        none = np.zeros(channels)
        rows = np.full((1, math.prod(kernel)), factor / step)
        lattice = of_layer(data, Lattice(step, 0.0, factor / step), rows, none[:1])
        evidence = self.evidence[str(node.name)]
        node = self._without_gain(node)
        inputs = [
            node.inputs[0],
            self.editor.initializer(f"{node.name}_weight", weight),
            self.editor.initializer(f"{node.name}_bias", none.astype(np.float32)),
        ]
        made = self.editor.replace(node, "Conv", inputs, {"group": channels, **attributes})
        self.evidence[str(made.name)] = evidence
        self._layers[made] = SummedLayer(made, lattice, none)
        self._known[made.outputs[0]] = lattice

    def _without_gain(self, node: ir.Node) -> ir.Node:
        """The node, with the output that the Mul behind it had; the Mul is gone."""
        reader = look.only_reader(node.outputs[0])
        if reader is not None and is_gain(reader):
            self.evidence[str(reader.name)] = self.evidence[str(node.name)]
            name = reader.outputs[0].name
            reader.outputs[0].replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
            self.editor.drop(reader)
            node.outputs[0].name = name
        return node

    def _hard_sigmoid(self, node: ir.Node) -> bool:
        """min(max(x + 3, 0), 6) x 2731 / 2**14, which is HardSigmoid(1/6) and the Mul behind it."""
        alpha, beta = look.attribute_float(node, "alpha", 0.2), look.attribute_float(node, "beta", 0.5)
        data = None if node.inputs[0] is None else self._of(node.inputs[0])
        if data is None or abs(alpha - _SIXTH) > _SIXTH_ERROR or beta != 0.5 or data.unit > 1:
            return False
        evidence = self.evidence[str(node.name)]
        node, name = self._without_gain(node), str(node.name)
        constants = [np.asarray(number, np.float32) for number in (3, 0, 6, _HARD_SIGMOID)]
        three, zero, six, factor = (self.editor.initializer(f"{name}_constant", each) for each in constants)
        moved = self.editor.insert(node, "Add", [node.inputs[0], three], {}, f"{name}_shifted")
        cut = self.editor.insert(node, "Clip", [moved, zero, six], {}, f"{name}_clipped")
        made = self.editor.replace(node, "Mul", [cut, factor], {})
        self.evidence[str(made.name)] = evidence
        step = finest(np.asarray([_HARD_SIGMOID]))
        self._known[made.outputs[0]] = Lattice(data.unit * step, 0.0, 6 / data.unit * _HARD_SIGMOID / step)
        return True

    def _dequantize(self, node: ir.Node) -> None:
        stored, codes = read.read_quantizer(node), look.constant_array(node.inputs[0])
        if stored is None:
            return
        source = node.inputs[0]
        held = None if source is None else self._known.get(source)
        found = of_constant(codes, stored) if codes is not None else held or of_codes(stored)
        if found is not None:
            self._known[node.outputs[0]] = found

    def _quantize(self, node: ir.Node) -> None:
        value, stored = node.inputs[0], read.read_quantizer(node)
        if value is None or stored is None:
            return
        maker, lattice = value.producer(), self._known.get(value)
        held = through(stored, lattice)
        if held is not None:
            self._known[node.outputs[0]] = held
        if maker is None or stored.scale.size != 1 or not (self._takes(maker) or read.is_dequantize(maker)):
            return  # the CPU quantizes the graph's inputs and what it makes itself: halves to even
        scale = float(stored.scale.reshape(()))
        if lattice is not None and lattice.unit >= scale:
            return  # nothing to round
        self._not_copied(maker)
        if lattice is not None and lattice.whole and scale / lattice.unit <= 2.0**FINEST:
            self._nudge(node, value, lattice.unit / 2, scale)
        else:
            self._floor(node, value, scale)

    def _takes(self, node: ir.Node) -> bool:
        return str(node.name) in self._on_npu or str(node.name) in self._made

    def _not_copied(self, maker: ir.Node) -> None:
        """Codes in another scale are computed, not moved; an activation is part of the layer before it."""
        name = str(maker.name)
        if self.evidence.get(name) is Evidence.COPIED and look.op_key(maker) not in ("Relu", "Clip"):
            self.evidence[name] = Evidence.ASSUMED

    def _nudge(self, node: ir.Node, value: ir.Value, half: float, scale: float) -> None:
        """Half a step more: in the bias of the layer that makes the value, else by an Add."""
        layer, current = None, value
        while look.only_reader(current) is not None and (maker := current.producer()) is not None:
            layer = self._layers.get(maker)
            if layer is not None or not _keeps_order(maker, scale) or maker.inputs[0] is None:
                break
            current = maker.inputs[0]
        if layer is not None and layer.takes_half and layer.lattice.unit == 2 * half:
            layer.add_half(self.editor)
            return
        more = self.editor.initializer(f"{value.name}_half", np.asarray(half, np.float32))
        moved = self.editor.insert(node, "Add", [value, more], {}, f"{node.name}_half")
        self._stand_for(value, moved, node)

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


_REAL = look.FLOAT_TYPES


def _keeps_order(node: ir.Node, scale: float) -> bool:
    """Whether half a step before the node is half a step behind it, as far as the next Q can see."""
    op = look.op_key(node)
    if op in _ORDER_KEEPING:
        return True
    bounds = look.clip_bounds(node) if op == "Clip" else None
    return bounds is not None and all(bound is None or (bound / scale).is_integer() for bound in bounds)


def _as_measured(node: ir.Node) -> bool:
    """Whether the fixtures had such a Conv: 1x1, stride 1, one group, no activation."""
    weight = look.dims(node.inputs[1])
    reader = look.only_reader(node.outputs[0])
    plain = look.attribute_int(node, "group", 1) == 1 and read.is_quantize(reader)
    strides = look.attribute_ints(node, "strides") or (1,)
    pads = look.attribute_ints(node, "pads") or (0,)
    return plain and set(strides) == {1} and set(pads) == {0} and set((weight or (0, 0, 0))[2:]) == {1}


def _window(
    node: ir.Node, shape: Sequence[int | None]
) -> tuple[tuple[int, int], dict[str, list[int]]] | None:
    """Kernel and Conv attributes of an average pool; None for one that no Conv with equal weights is."""
    if len(shape) != 4:
        return None
    if node.op_type == "GlobalAveragePool":
        height, width = shape[2:]
        if height is None or width is None:
            return None
        return (height, width), {"kernel_shape": [height, width]}
    kernel, pads = look.attribute_ints(node, "kernel_shape"), look.attribute_ints(node, "pads") or (0,) * 4
    inside = bool(look.attribute_int(node, "count_include_pad", 0)) or not any(pads)
    automatic = look.attribute_string(node, "auto_pad", "NOTSET") != "NOTSET"
    if (
        kernel is None
        or len(kernel) != 2
        or not inside
        or automatic
        or look.attribute_int(node, "ceil_mode", 0)
    ):
        return None
    strides = look.attribute_ints(node, "strides") or (1, 1)
    dilations = look.attribute_ints(node, "dilations") or (1, 1)
    attributes = {"kernel_shape": kernel, "pads": pads, "strides": strides, "dilations": dilations}
    return (kernel[0], kernel[1]), {name: list(numbers) for name, numbers in attributes.items()}
