"""Models that are quantized already, by any tool (Q01 to Q05, Q08 to Q12)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from roundel.check.facts import Facts
from roundel.check.pairs import CENTRES, OTHER_FORMS
from roundel.check.stored import StoredTensor
from roundel.check.types import Hit, Rule, Severity
from roundel.model.graph import attribute_float, is_constant, op_key
from roundel.targets.devices import Compiler, Format

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_NEAR_CENTRE = 127  # what a tool writes that halves 255 and rounds down
_BIAS_TOLERANCE = 1e-3


def _tensors(facts: Facts) -> list[StoredTensor]:
    return list(facts.stored.tensors.values()) if facts.stored is not None else []


def _scales(facts: Facts) -> Iterator[Hit]:
    if facts.format is not Format.XINT8:
        return
    for tensor in _tensors(facts):
        if not tensor.power_of_two:
            text = f"scale {tensor.scale.reshape(-1)[0]:.6g} is no power of two"
            yield Hit(Severity.ERROR, text, tensor.name)


def _per_channel(facts: Facts) -> Iterator[Hit]:
    severity = Severity.ERROR if facts.format is Format.XINT8 else Severity.NOTE
    for tensor in _tensors(facts):
        if tensor.scale.size > 1 and tensor.dtype != "int32":
            yield Hit(severity, f"{tensor.scale.size} scales along axis {tensor.axis}", tensor.name)


def _zero_points(facts: Facts) -> Iterator[Hit]:
    tensors = _tensors(facts)
    bytes_ = [t for t in tensors if t.dtype == "uint8" and not t.constant]
    shifted = [t for t in bytes_ if (t.zero_point == _NEAR_CENTRE).all()]
    slipped = len(shifted) > 1 and 2 * len(shifted) > len(bytes_)
    older = facts.format is Format.XINT8 or facts.device.compiler is Compiler.X1
    for tensor in tensors:
        centre = CENTRES.get(tensor.dtype)
        if centre is None or (tensor.zero_point == centre).all():
            continue
        zero = int(tensor.zero_point.reshape(-1)[0])
        if slipped and zero == _NEAR_CENTRE and tensor.dtype == "uint8":
            yield Hit(Severity.ERROR, "zero point 127 where a symmetric uint8 has 128", tensor.name)
        else:
            severity = Severity.ERROR if older else Severity.NOTE
            yield Hit(severity, f"zero point {zero} of {tensor.dtype}, centre is {centre}", tensor.name)


def _bias_types(facts: Facts) -> Iterator[Hit]:
    if facts.stored is None or not facts.format.integer:
        return
    for node in facts.given.graph:
        value = node.inputs[2] if op_key(node) in _LAYERS and len(node.inputs) > 2 else None
        if value is None or not is_constant(value):
            continue
        tensor = facts.stored.tensors.get(str(value.name))
        if tensor is None:
            if str(node.inputs[1].name if node.inputs[1] else "") in facts.stored.tensors:
                yield Hit(Severity.WARNING, f"float bias of {node.op_type} '{node.name}'", value.name)
        elif facts.format is Format.XINT8 and tensor.dtype != "int8":
            yield Hit(Severity.ERROR, f"{tensor.dtype} bias of {node.op_type} '{node.name}'", value.name)


def _gaps(facts: Facts) -> Iterator[Hit]:
    severity = Severity.NOTE if facts.float_model else Severity.WARNING
    for place in facts.before.nodes:
        if place.rule == "Q05":
            yield Hit(severity, f"{place.op}: {place.reason}", place.name)


def _order(facts: Facts) -> Iterator[Hit]:
    done: set[ir.Node] = set()
    early: list[ir.Node] = []
    for node in facts.raw.graph:
        if any(other not in done for other in node.predecessors() if other.graph is node.graph):
            early.append(node)
        done.add(node)
    if early:
        text = f"{len(early)} nodes stand before a node that they read"
        yield Hit(Severity.WARNING, text, str(early[0].name), automatic=facts.float_model)


def _bias_scales(facts: Facts) -> Iterator[Hit]:
    if facts.stored is None:
        return
    known = facts.stored.tensors
    for node in facts.given.graph:
        if op_key(node) not in _LAYERS or len(node.inputs) < 3:
            continue
        data, weight, bias = (known.get(str(v.name)) if v is not None else None for v in node.inputs[:3])
        if data is None or weight is None or bias is None or bias.dtype != "int32":
            continue
        factor = 1.0
        if op_key(node) == "Gemm":
            factor = attribute_float(node, "alpha", 1.0) / (attribute_float(node, "beta", 1.0) or 1.0)
        wanted = np.asarray(data.scale * weight.scale * factor).reshape(-1)
        ratio = (
            bias.scale.reshape(-1) / wanted if bias.scale.size in (1, wanted.size) else np.asarray([np.nan])
        )
        worst = float(ratio[np.abs(ratio - 1).argmax()])
        if not abs(worst - 1) <= _BIAS_TOLERANCE:
            text = f"bias scale is {worst:.4g} times input scale x weight scale"
            yield Hit(Severity.ERROR, text, bias.name)


def _other_forms(facts: Facts) -> Iterator[Hit]:
    if facts.stored is None:
        return
    for node in facts.given.graph:
        if op_key(node) in OTHER_FORMS:
            yield Hit(Severity.ERROR, f"{op_key(node)} node", str(node.name))
    if facts.stored.unreadable:
        names = facts.stored.unreadable
        yield Hit(Severity.ERROR, f"{len(names)} Q/DQ nodes compute their scale at run time", names[0])


def _other_format(facts: Facts) -> Iterator[Hit]:
    known = facts.recognised
    if known is not None and facts.asked and known.format is not facts.format:
        text = f"judged as {facts.format.value}, the model shows {known.format.value}: {known.reason}"
        yield Hit(Severity.WARNING, text)


def _disagreeing(facts: Facts) -> Iterator[Hit]:
    for name in facts.stored.mismatched if facts.stored is not None else ():
        yield Hit(Severity.ERROR, "Q and DQ of one pair have different scales or zero points", name)


_AGAIN = "Quantize the float model again: roundel quantize MODEL --preset xint8."

RULES = (
    Rule("Q01", "scales", "XINT8 shifts instead of multiplying: every scale is 2**-n.", _AGAIN, _scales),
    Rule(
        "Q02",
        "per-channel scales",
        "XINT8 has one scale per tensor; for the other formats AMD documents none per channel.",
        "Quantize per tensor (weights.per_channel=false).",
        _per_channel,
    ),
    Rule(
        "Q03",
        "zero points",
        "XINT8 and the first NPU are symmetric; uint8 around 127 gives silently wrong numbers.",
        "Symmetric activations: int8 with zero point 0 or uint8 with 128. X2 takes others since 1.6.",
        _zero_points,
    ),
    Rule(
        "Q04",
        "bias type",
        "XINT8 wants int8 biases with a power-of-two scale, A8W8 and A16W8 int32 ones.",
        "Quantize again with a preset for this format; roundel writes the biases that it wants.",
        _bias_types,
    ),
    Rule(
        "Q05",
        "no Q/DQ",
        "An operator that reads or makes float runs on the CPU.",
        "Quantize it, too (selection.extra_op_types), or cut it off the model if it comes last.",
        _gaps,
    ),
    Rule(
        "Q08",
        "node order",
        "ONNX wants each node behind those that it reads; the ONNX checker refuses other files.",
        "Sort the graph; every model that roundel writes is sorted.",
        _order,
    ),
    Rule(
        "Q09",
        "bias scale",
        "The accumulator's step is input scale x weight scale; another bias scale shifts the result.",
        "Write the bias at that scale; roundel derives it.",
        _bias_scales,
    ),
    Rule(
        "Q10",
        "not Q/DQ",
        "The compilers read constant Q/DQ pairs only; other quantized operators stay on the CPU.",
        "Quantize the float model in Q/DQ form, statically.",
        _other_forms,
    ),
    Rule("Q11", "another format", "The rules of the format asked for were applied.", _AGAIN, _other_format),
    Rule(
        "Q12",
        "uneven pairs",
        "A pair whose halves differ rescales the tensor; compilers assume that they are equal.",
        "Give Q and DQ the same constants.",
        _disagreeing,
    ),
)
