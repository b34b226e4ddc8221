"""Models that are quantized already, by any tool (Q02 to Q06, Q08 to Q11), the target and int32 biases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from roundel.model.graph import constant_array, is_constant, op_key, opset_version
from roundel.plan.types import Role
from roundel.qdq.read import CENTRES, OTHER_FORMS, StoredTensor, product_step
from roundel.rules.facts import Facts
from roundel.rules.types import Finding, Severity, rule
from roundel.rules.written import AGAIN, tensor_before, tensor_behind
from roundel.targets.npu import NATIVE_16_BIT_OPSET, RECOMMENDED_OPSET, Compiler, Format
from roundel.targets.operators import BIASED_LAYERS, OPERATORS, Trait, ops_with
from roundel.targets.x1 import NO_WINML
from roundel.types import QType

_KEEPING = ops_with(Trait.ONE_SCALE)
_RANGED = frozenset(op for op, row in OPERATORS.items() if row.output_range is not None)
_NEAR_CENTRE = 127  # what a tool writes that halves 255 and rounds down
_BIAS_TOLERANCE = 1e-3


@rule("Q02", "per-channel scales", "Quantize per tensor (weights.per_channel=false).")
def _per_channel(facts: Facts) -> Iterator[Finding]:
    """XINT8 has one scale per tensor, X1 refuses others as a whole; other formats have none documented."""
    severity = Severity.ERROR if facts.format is Format.XINT8 or facts.first else Severity.NOTE
    for tensor in facts.tensors.values():
        if tensor.scale.size > 1 and tensor.dtype != "int32":
            yield Finding(severity, f"{tensor.scale.size} scales along axis {tensor.axis}", tensor.name)


@rule(
    "Q03",
    "zero points",
    "Symmetric activations: int8 with zero point 0 or uint8 with 128. X2 takes others since 1.6.",
)
def _zero_points(facts: Facts) -> Iterator[Finding]:
    """XINT8 and the first NPU are symmetric; uint8 around 127 gives silently wrong numbers."""
    tensors = facts.tensors.values()
    bytes_ = [t for t in tensors if t.dtype == "uint8" and not t.constant]
    shifted = [t for t in bytes_ if (t.zero_point == _NEAR_CENTRE).all()]
    slipped = len(shifted) > 1 and 2 * len(shifted) > len(bytes_)
    older = facts.format is Format.XINT8 or facts.device.compiler is Compiler.X1
    # Quark's own XINT8 files store a Softmax from 0 up; whether the NPU minds has not been measured.
    settled = {str(node.outputs[0].name) for node in facts.graph if op_key(node) in _RANGED}
    for tensor in tensors:
        centre = CENTRES.get(tensor.dtype)
        if centre is None or (tensor.zero_point == centre).all():
            continue
        zero = int(tensor.zero_point.reshape(-1)[0])
        if slipped and zero == _NEAR_CENTRE and tensor.dtype == "uint8":
            yield Finding(Severity.ERROR, "zero point 127 where a symmetric uint8 has 128", tensor.name)
        else:
            severity = Severity.ERROR if older else Severity.NOTE
            if older and zero == 0 and tensor.name in settled:
                severity = Severity.WARNING
            yield Finding(severity, f"zero point {zero} of {tensor.dtype}, centre is {centre}", tensor.name)


@rule(
    "Q04",
    "bias type",
    "Quantize again with a preset for this format; roundel writes the biases that it wants.",
)
def _bias_types(facts: Facts) -> Iterator[Finding]:
    """XINT8 wants int8 biases with a power-of-two scale, A8W8 and A16W8 int32 ones."""
    if not facts.tensors or not facts.format.integer:
        return
    for node in facts.graph:
        value = node.inputs[2] if op_key(node) in BIASED_LAYERS and len(node.inputs) > 2 else None
        if value is None or not is_constant(value):
            continue
        tensor = facts.tensors.get(str(value.name))
        if tensor is None:
            if str(node.inputs[1].name if node.inputs[1] else "") in facts.tensors:
                yield Finding(Severity.WARNING, f"float bias of {node.op_type} '{node.name}'", value.name)
        elif facts.first and tensor.dtype == "int32":
            continue  # rule Q16
        elif facts.format is Format.XINT8 and tensor.dtype != "int8":
            yield Finding(Severity.ERROR, f"{tensor.dtype} bias of {node.op_type} '{node.name}'", value.name)


@rule(
    "Q05", "no Q/DQ", "Quantize it, too (selection.extra_op_types), or cut it off the model if it comes last."
)
def _gaps(facts: Facts) -> Iterator[Finding]:
    """An operator that reads or makes float runs on the CPU."""
    severity = Severity.NOTE if facts.float_model else Severity.WARNING
    for place in facts.before.nodes:
        if place.rule == "Q05":
            yield Finding(severity, f"{place.op}: {place.reason}", place.name)


@rule("Q08", "node order", "Sort the graph; every model that roundel writes is sorted.")
def _order(facts: Facts) -> Iterator[Finding]:
    """ONNX wants each node behind those that it reads; the ONNX checker refuses other files."""
    done: set[ir.Node] = set()
    early: list[ir.Node] = []
    for node in facts.raw.graph:
        if any(other not in done for other in node.predecessors() if other.graph is node.graph):
            early.append(node)
        done.add(node)
    if early:
        text = f"{len(early)} nodes stand before a node that they read"
        yield Finding(Severity.WARNING, text, str(early[0].name), automatic=facts.float_model)


@rule("Q09", "bias scale", "Write the bias at that scale; roundel derives it.")
def _bias_scales(facts: Facts) -> Iterator[Finding]:
    """The accumulator's step is input scale x weight scale; another bias scale shifts the result."""
    for node in () if facts.first else facts.graph:  # X1 wants biases at a scale of their own: rule Q16
        if op_key(node) not in BIASED_LAYERS or len(node.inputs) < 3:
            continue
        data, weight, bias = (
            facts.tensors.get(str(v.name)) if v is not None else None for v in node.inputs[:3]
        )
        if data is None or weight is None or bias is None or bias.dtype != "int32" or data.scale.size != 1:
            continue
        wanted = product_step(node, data, weight).reshape(-1)
        fits = bias.scale.size in (1, wanted.size)
        ratio = bias.scale.reshape(-1) / wanted if fits else np.asarray([np.nan])
        worst = float(ratio[np.abs(ratio - 1).argmax()])
        if not abs(worst - 1) <= _BIAS_TOLERANCE:
            text = f"bias scale is {worst:.4g} times input scale x weight scale"
            yield Finding(Severity.ERROR, text, bias.name)


@rule("Q10", "not Q/DQ", "Quantize the float model in Q/DQ form, statically.")
def _other_forms(facts: Facts) -> Iterator[Finding]:
    """The compilers read constant Q/DQ pairs only; other quantized operators stay on the CPU."""
    if facts.stored is None:
        return
    for node in facts.graph:
        if op_key(node) in OTHER_FORMS:
            yield Finding(Severity.ERROR, f"{op_key(node)} node", str(node.name))


@rule(
    "Q06",
    "uneven scales",
    "Align them (placement.align_concat, align_pool, align_pad, align_slice); preset xint8 does.",
)
def _alignment(facts: Facts) -> Iterator[Finding]:
    """Concat, pools, Pad and Slice copy codes: inputs and output must share one scale."""
    if facts.format is not Format.XINT8:
        return
    stored, floats = facts.tensors, {place.name for place in facts.before.nodes if place.rule == "Q05"}
    for node in facts.graph:
        if op_key(node) not in _KEEPING or node.name in floats:
            continue
        sources = node.inputs if op_key(node) == "Concat" else node.inputs[:1]
        before = [_position(tensor_before(value, stored), stored) for value in sources]
        after = _position(tensor_behind(node, stored), stored)
        # Without a pair behind it, the node computes in float.
        if after is not None and len({*before, after} - {None}) > 1:
            words = ", ".join("?" if position is None else str(position) for position in before)
            yield Finding(Severity.ERROR, f"{op_key(node)} from positions {words} to {after}", str(node.name))


def _position(name: str | None, stored: Mapping[str, StoredTensor]) -> int | None:
    return None if name is None else stored[name].position


@rule("Q11", "another format", AGAIN)
def _other_format(facts: Facts) -> Iterator[Finding]:
    """The rules of the format asked for were applied."""
    known = facts.recognised
    if known is not None and facts.asked and known.format is not facts.format:
        text = f"judged as {facts.format.value}, the model shows {known.format.value}: {known.reason}"
        yield Finding(Severity.WARNING, text)


_INT32 = np.iinfo(np.int32)
_USUAL_RANGE = 0.01  # activations with a smaller peak are rare


@rule(
    "P20",
    "bias overflow",
    "Clamp tiny weight scales, keep the layer in float (--exclude NAME), or -s bias.type=float.",
)
def _overflow(facts: Facts) -> Iterator[Finding]:
    """A bias is stored as b / (input scale x weight scale) in 32 bits; what does not fit is cut off."""
    if facts.stored is not None:
        yield from _saturated(facts)
    elif facts.plan is not None and facts.recipe.bias.type == "int32":
        for node in facts.prepared.graph:
            yield from _potential(facts, node)


def _saturated(facts: Facts) -> Iterator[Finding]:
    """Codes at the ends of int32 are biases that were cut off."""
    for tensor in facts.tensors.values():
        if tensor.codes is None or tensor.codes.dtype != np.int32:
            continue
        cut = int(np.count_nonzero((tensor.codes >= _INT32.max) | (tensor.codes <= _INT32.min + 1)))
        if cut:
            text = f"{cut} of {tensor.codes.size} stored biases are cut off at the end of int32"
            yield Finding(Severity.ERROR, text, tensor.name)


def _potential(facts: Facts, node: ir.Node) -> Iterator[Finding]:
    """The peak of the input below which b / (s_x * s_w) leaves int32."""
    plan = facts.plan
    bias = node.inputs[2] if len(node.inputs) > 2 and op_key(node) in BIASED_LAYERS else None
    values, weight = constant_array(bias), constant_array(node.inputs[1] if bias is not None else None)
    if plan is None or bias is None or values is None or weight is None or not values.size:
        return
    planned = plan.tensors.get(str(bias.name))
    peak_weight = float(np.abs(weight).max(initial=0))
    if planned is None or planned.role is not Role.BIAS or not np.isfinite(peak_weight) or peak_weight == 0:
        return
    peak_bias = float(np.abs(values).max())
    steps = QType(facts.recipe.activations.type)
    largest = steps.qmax if steps.signed else (steps.qmax + 1) // 2 - 1
    weight_scale = peak_weight / QType.INT8.qmax
    least = peak_bias * largest / (weight_scale * _INT32.max)
    if least > _USUAL_RANGE:
        text = (
            f"largest bias {peak_bias:.3g} against largest weight {peak_weight:.3g}: "
            f"overflows when the input's peak stays below {least:.3g}"
        )
        yield Finding(Severity.WARNING, text, str(node.name))


@rule(
    "P18",
    "16-bit Q/DQ domain",
    "If it does not compile, try native nodes: -s output.opset=21 -s placement.domain=ai.onnx.",
)
def _sixteen_bit_domain(facts: Facts) -> Iterator[Finding]:
    """Standard 16-bit Q/DQ exist from opset 21; which domain the compiler takes is undocumented."""
    if facts.format is not Format.A16W8:
        return
    if facts.stored is not None:
        wide = [t.domain for t in facts.tensors.values() if t.dtype in ("int16", "uint16")]
        opset = opset_version(facts.raw)
        if opset < NATIVE_16_BIT_OPSET:
            domains = ", ".join(f"{domain or 'ai.onnx'} {n}" for domain, n in Counter(wide).most_common())
            yield Finding(Severity.NOTE, f"opset {opset}, 16-bit Q/DQ by domain: {domains or 'none'}")
        return
    opset = facts.recipe.output.opset or max(facts.loaded.source_opset, RECOMMENDED_OPSET)
    if opset < NATIVE_16_BIT_OPSET:
        yield Finding(Severity.NOTE, f"opset {opset}: 16-bit Q/DQ are written in the domain com.microsoft")


@rule("P19", "format on device", "Choose --preset xint8 for this device, or another device.")
def _available(facts: Facts) -> Iterator[Finding]:
    """The device's compilers do not take this format; the model would run on the CPU."""
    if facts.format not in facts.device.formats:
        takes = ", ".join(sorted(kind.value for kind in facts.device.formats))
        text = f"{facts.format.value} on {facts.device.name} ({facts.device.processors}), which takes {takes}"
        first = facts.format.integer and facts.device.compiler is Compiler.X1
        yield Finding(Severity.ERROR, text, why=NO_WINML if first else "")
