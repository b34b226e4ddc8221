"""Weights and biases: the float values against what the quantized model's nodes read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.measure.points import LAYER_OPS
from roundel.measure.reference import Arrays, Matches, cut_to
from roundel.measure.sums import channel_errors, closeness
from roundel.measure.types import TensorStorage, WeightComparison, describe
from roundel.model.graph import attribute_int, constant_array, is_constant, op_key
from roundel.model.layers import read_layer
from roundel.model.session import open_session
from roundel.qdq.nodes import CODES, bare_name
from roundel.qdq.read import StoredTensors
from roundel.targets.operators import is_operand
from roundel.types import Doubles

Role = Literal["weight", "bias", "constant"]
Ranges = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class WeightPair:
    """One constant operand in both models.

    Attributes:
        node: of the float graph.
        index: of the operand.
        quantized: the value that the partner node reads.
        stored: its name in the stripped graph.
    """

    node: ir.Node
    index: int
    quantized: ir.Value
    stored: str


def compare_weights(
    quantized: ir.Model,
    stripped: ir.Model,
    stored: StoredTensors,
    matches: Matches,
    rescaled: Mapping[str, tuple[Doubles, Doubles]],
    plain: Arrays,
) -> dict[str, list[WeightComparison]]:
    """All weights, by name of the quantized model's node that reads them.

    Args:
        quantized: the quantized model.
        stripped: the same without Q/DQ pairs.
        stored: what the pairs held.
        matches: partners of its nodes.
        rescaled: factors on rows and columns of layers that another tool has equalized.
        plain: constants before equalization, by node and index of the float graph.
    """
    bare = {str(node.name): node for node in stripped.graph}
    pairs = [(str(n.name), p) for n in quantized.graph for p in _pairs(n, bare.get(str(n.name)), matches)]
    contents = _contents(quantized, [pair.quantized for _, pair in pairs])
    found: dict[str, list[WeightComparison]] = {}
    for name, pair in pairs:
        array = contents.get(str(pair.quantized.name))
        wanted = constant_array(pair.node.inputs[pair.index])
        if array is None or wanted is None or array.shape != wanted.shape or not array.size:
            continue
        storage = describe(stored.tensors.get(pair.stored))
        if storage is None and _role(op_key(pair.node), pair.index) == "constant":
            continue  # a batch norm's parameters, say: float in both
        before = plain.get((str(pair.node.name), pair.index), wanted)
        factors = rescaled.get(str(pair.node.name))
        found.setdefault(name, []).append(_compare(pair, wanted, array, storage, (before, factors)))
    return found


def _pairs(node: ir.Node, bare: ir.Node | None, matches: Matches) -> Iterator[WeightPair]:
    """Constant operands that a node shares with its float partner."""
    partner = matches.nodes.get(str(node.name))
    if partner is None or bare is None:
        return
    for index, value in enumerate(node.inputs[: len(partner.inputs)]):
        ours = constant_array(partner.inputs[index])
        if value is None or ours is None or ours.dtype.kind != "f" or not is_operand(op_key(node), index):
            continue
        inner = bare.inputs[index]
        yield WeightPair(partner, index, value, str(inner.name) if inner is not None else "")


def _contents(quantized: ir.Model, values: list[ir.Value]) -> dict[str, NDArray[Any]]:
    """What constants come to behind their DQ or Cast nodes: ONNX Runtime computes them."""
    found, computed = {}, []
    for value in values:
        array = constant_array(value)
        if array is not None:
            found[str(value.name)] = array
        elif _depends_on_constants(value):
            computed.append(str(value.name))
    names = list(dict.fromkeys(computed))
    if not names:
        return found
    inputs = {str(value.name) for value in quantized.graph.inputs}
    model = cut_to(quantized, names, drop_inputs=inputs)
    arrays = open_session(model, simulate=True).run(names, {})
    return found | dict(zip(names, arrays, strict=True))


def _depends_on_constants(value: ir.Value) -> bool:
    pending = [value]
    while pending:
        here = pending.pop()
        if is_constant(here):
            continue
        maker = here.producer()
        if maker is None:
            return False
        pending += [v for v in maker.inputs if v is not None]
    return True


def _compare(
    pair: WeightPair,
    wanted: NDArray[Any],
    array: NDArray[Any],
    storage: TensorStorage | None,
    history: tuple[NDArray[Any], tuple[Doubles, Doubles] | None],
) -> WeightComparison:
    before, factors = history
    node, op = pair.node, op_key(pair.node)
    role = _role(op, pair.index)
    axis = _channel_axis(node, role, storage, wanted.ndim)
    floats, stored = (wanted, array) if factors is None else _rescaled(pair, role, wanted, array, factors)
    own_axis = axis if floats.shape == wanted.shape else 0
    gap, signal = closeness(
        np.ascontiguousarray(floats, np.float32), np.ascontiguousarray(stored, np.float32), own_axis
    )
    assert gap.difference is not None
    return WeightComparison(
        name=_stored_name(pair.quantized),
        float_name=str(node.inputs[pair.index].name),  # type: ignore[union-attr]
        node=str(node.name),
        op=op,
        role=role,
        shape=tuple(wanted.shape),
        storage=storage,
        error=gap.difference,
        saturated=_saturated(floats, storage),
        channel_axis=axis,
        float_ranges=_ranges(before if before.shape == wanted.shape else wanted, axis),
        stored_ranges=_ranges(array, axis),
        worst_channels=channel_errors(gap.noise, signal),
        rescaled=factors is not None or not np.array_equal(before, wanted),
    )


def _stored_name(value: ir.Value) -> str:
    """The name of a constant that stands before DQ or Cast nodes, without what quantizers append."""
    maker = value.producer()
    while maker is not None and maker.inputs and maker.inputs[0] is not None:
        value = maker.inputs[0]
        maker = value.producer()
    return bare_name(str(value.name)).removesuffix(CODES)


def _role(op: str, index: int) -> Role:
    if op not in LAYER_OPS:
        return "constant"
    return "weight" if index < 2 else "bias"


def _channel_axis(node: ir.Node, role: Role, storage: TensorStorage | None, rank: int) -> int | None:
    if storage is not None and storage.axis is not None and rank:
        return storage.axis % rank
    if role == "constant" or rank == 0:
        return None
    if rank == 1 or op_key(node) == "Conv":
        return 0
    if op_key(node) == "ConvTranspose":
        return 1
    turned = op_key(node) == "Gemm" and attribute_int(node, "transB", 0)
    return 0 if turned else rank - 1


def _rescaled(
    pair: WeightPair,
    role: Role,
    wanted: NDArray[Any],
    array: NDArray[Any],
    factors: tuple[Doubles, Doubles],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Float and stored values in the quantized model's coordinates, one row for each output channel."""
    rows, columns = factors
    if role == "bias":
        return wanted * rows.astype(wanted.dtype), array
    layer = read_layer(pair.node)
    assert layer is not None
    ours, theirs = layer.blocks(layer.stored), layer.blocks(array)
    groups, outputs, inputs, _ = ours.shape
    scaled = ours * rows.reshape(groups, outputs, 1, 1) / columns.reshape(groups, 1, inputs, 1)
    return scaled.reshape(groups * outputs, -1), theirs.reshape(groups * outputs, -1)


def _saturated(floats: NDArray[Any], storage: TensorStorage | None) -> float | None:
    if storage is None or storage.scales > 1 or not np.isfinite(storage.high):
        return None
    low, high = storage.low - storage.scale / 2, storage.high + storage.scale / 2
    return float(np.mean((floats < low) | (floats > high)))


def _ranges(array: NDArray[Any], axis: int | None) -> Ranges:
    rows = (
        array.reshape(1, -1) if axis is None else np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    )
    pairs = zip(rows.min(axis=1).tolist(), rows.max(axis=1).tolist(), strict=True)
    return tuple((float(a), float(b)) for a, b in pairs)
