"""Other element types for activations: the same codes shifted, or coarser ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import is_constant
from roundel.quark.tools.biases import rederive_biases
from roundel.quark.tools.files import Rewritten
from roundel.quark.tools.wiring import numbers, pairs, set_type, swap_constant, tidy

Numbers = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Retype:
    """From one element type to another, and what becomes of scale and zero point."""

    source: ir.DataType
    target: ir.DataType
    change: Callable[[Numbers], Numbers]


def _shifted(offset: int, dtype: Any) -> Callable[[Numbers], Numbers]:
    """The same scale; codes and zero point move together, so that nothing changes."""

    def change(given: Numbers) -> Numbers:
        scale, zero = given
        return scale, np.asarray(zero.astype(np.int64) + offset, dtype)

    return change


def _coarser(given: Numbers) -> Numbers:
    """The same range in 256 steps instead of 65,536."""
    scale, zero = given
    ratio = 65535 / 255
    steps = np.clip(np.rint(zero.astype(np.float64) / ratio), 0, 255)
    return np.asarray(scale * ratio, np.float32), np.asarray(steps, np.uint8)


S8_TO_U8 = Retype(ir.DataType.INT8, ir.DataType.UINT8, _shifted(128, np.uint8))
U16_TO_S16 = Retype(ir.DataType.UINT16, ir.DataType.INT16, _shifted(-32768, np.int16))
U16_TO_U8 = Retype(ir.DataType.UINT16, ir.DataType.UINT8, _coarser)


def convert_s8s8_to_u8s8(model: ir.Model) -> Rewritten:
    """Activations in uint8 instead of int8; exact."""
    return _retyped(model, S8_TO_U8)


def convert_u16s8_to_s16s8(model: ir.Model) -> Rewritten:
    """Activations in int16 instead of uint16; exact."""
    return _retyped(model, U16_TO_S16)


def convert_u16u8_to_u8u8(model: ir.Model) -> Rewritten:
    """Activations in uint8 instead of uint16: 256 times coarser; 32-bit biases follow the new scales."""
    result, done = _retyped(model, U16_TO_U8)
    biases = rederive_biases(result)
    return result, f"{done}, recomputed {biases} biases"


def _retyped(model: ir.Model, retype: Retype) -> Rewritten:
    result = model.clone()
    groups: dict[tuple[str, str], list[ir.Node]] = {}  # pairs that share scale and zero point go on doing so
    count = 0
    for quantizer, readers in _of_type(result.graph, retype.source):
        key = (_name(quantizer, 1), _name(quantizer, 2))
        groups.setdefault(key, []).extend((quantizer, *readers))
        set_type(quantizer.outputs[0], retype.target)
        count += 1
    for nodes in groups.values():
        given = numbers(nodes[0])
        assert given is not None
        for index, part in enumerate(retype.change(given), start=1):
            swap_constant(result.graph, [(node, index) for node in nodes], part)
    kinds = f"{retype.source.name.lower()} to {retype.target.name.lower()}"
    return tidy(result), f"changed {count} activations from {kinds}"


def _name(node: ir.Node, index: int) -> str:
    value = node.inputs[index] if index < len(node.inputs) else None
    return str(value.name) if value is not None else str(node.name)


def _of_type(graph: ir.Graph, dtype: ir.DataType) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    for quantizer, readers in list(pairs(graph)):
        given = numbers(quantizer)
        moving = quantizer.inputs[0] is not None and not is_constant(quantizer.inputs[0])
        if moving and given is not None and ir.DataType.from_numpy(given[1].dtype) is dtype:
            yield quantizer, readers
