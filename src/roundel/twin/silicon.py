"""A file as the silicon computes it: half a step in biases, exact sums, the chip's factors of pools."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from roundel.model import graph as look
from roundel.numerics.affine import pool_gain
from roundel.qdq import read
from roundel.qdq.half_up import HalfUp, Lattice, SummedLayer, finest, is_nearest, of_layer, read_sums
from roundel.targets.x1 import Evidence, x1_row

_ORDER_KEEPING = ("Relu", "MaxPool")  # half a step passes through them
_FUSED = ("Relu", "Clip")
_SIXTH, _SIXTH_ERROR = 1 / 6, 1e-3
_HARD_SIGMOID = 2731 / 2**14
_WHOLE = 2.0**24


class Silicon(HalfUp):
    """The walk that makes a twin; its result is for running only.

    Attributes:
        evidence: how well each node's numbers are known, by its name in the file.
    """

    def __init__(self, model: ir.Model, on_npu: Collection[str]) -> None:
        super().__init__(model, lambda node: str(node.name) in on_npu or str(node.name) in self._made)
        self.evidence: dict[str, Evidence] = {}
        self._layers: dict[ir.Node, SummedLayer] = {}
        self._made: set[str] = set()

    def compute(self, node: ir.Node) -> None:
        """What the node makes, and how well that is known."""
        name, op = str(node.name), look.op_key(node)
        self.evidence[name] = x1_row(op).arithmetic
        if op in ("GlobalAveragePool", "AveragePool"):
            self._pool(node)
            return
        if op == "HardSigmoid" and self._hard_sigmoid(node):
            return
        if is_nearest(node):
            self.evidence[name] = Evidence.COPIED
        if op == "Conv" and _as_measured(node):
            self.evidence[name] = Evidence.MEASURED
        super().compute(node)
        if node.outputs[0] not in self.known and self.evidence[name] is not Evidence.COPIED:
            self.evidence[name] = Evidence.ASSUMED

    def rounds(self, maker: ir.Node) -> None:
        """Codes in another scale are computed, not moved; an activation is part of the layer before it."""
        name = str(maker.name)
        if self.evidence.get(name) is Evidence.COPIED and look.op_key(maker) not in _FUSED:
            self.evidence[name] = Evidence.ASSUMED

    def layer(self, node: ir.Node, data: Lattice) -> Lattice | None:
        """As far as float32 goes; beyond, in two halves."""
        sums = read_sums(node, data)
        if sums is None:
            return None
        self._layers[node] = sums
        lattice = sums.lattice.cut()
        if not sums.lattice.whole:
            joined = sums.split(self.editor)
            self._made.add(str(joined.name))
            self.known[joined.outputs[0]] = lattice
        return lattice

    def nudge(self, quantizer: ir.Node, value: ir.Value, half: float, scale: float) -> None:
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
        super().nudge(quantizer, value, half, scale)

    def _pool(self, node: ir.Node) -> None:
        """A Conv whose weights are the NPU's k / 2**n, whether or not the file has a Mul that imitates it."""
        data, shape = None if node.inputs[0] is None else self.of(node.inputs[0]), look.dims(node.inputs[0])
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
        self.known[made.outputs[0]] = lattice

    def _without_gain(self, node: ir.Node) -> ir.Node:
        """The node, with the output that the Mul behind it had; the Mul is gone."""
        reader = look.only_reader(node.outputs[0])
        if reader is not None and read.is_gain(reader):
            self.evidence[str(reader.name)] = self.evidence[str(node.name)]
            name = reader.outputs[0].name
            reader.outputs[0].replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
            self.editor.drop(reader)
            node.outputs[0].name = name
        return node

    def _hard_sigmoid(self, node: ir.Node) -> bool:
        """min(max(x + 3, 0), 6) x 2731 / 2**14, which is HardSigmoid(1/6) and the Mul behind it."""
        alpha, beta = look.attribute_float(node, "alpha", 0.2), look.attribute_float(node, "beta", 0.5)
        data = None if node.inputs[0] is None else self.of(node.inputs[0])
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
        self.known[made.outputs[0]] = Lattice(data.unit * step, 0.0, 6 / data.unit * _HARD_SIGMOID / step)
        return True


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
