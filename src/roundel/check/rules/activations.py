"""Patterns that AMD's logs show on the CPU (P08, P09, P10, P11)."""

from __future__ import annotations

from collections.abc import Iterator

from roundel.check.facts import Facts
from roundel.check.patterns import channel_shuffle, conv_before, is_depthwise, norm_after_concat
from roundel.check.types import Hit, Rule, Severity
from roundel.model.graph import clip_bounds, op_key, rank
from roundel.targets.devices import Compiler, Format

_GATES = ("Sigmoid", "HardSigmoid", "HardSwish")
_OTHER_FORMAT = "Use --preset a8w8 or a16w8, where AMD's logs have this pair on the NPU."
_DEPTHWISE = "In XINT8 these pairs explain 3 islands of mobilenet_v3_small and all 62 cuts of densenet121."


def _conv_and_activation(facts: Facts) -> Iterator[Hit]:
    placed = {place.name: place for place in facts.before.nodes if place.rule == "P08"}
    for node in facts.prepared.graph:
        conv = conv_before(node) if node.name in placed else None
        if conv is None:
            continue
        macs = placed[str(conv.name)].macs
        cost = "" if macs is None else f", {macs / 1e6:.2f} M MACs"
        if is_depthwise(conv):
            text = f"depthwise Conv + {node.op_type} '{node.name}'{cost}"
            yield Hit(Severity.WARNING, text, str(conv.name), _OTHER_FORMAT, why=_DEPTHWISE)
        else:
            low, high = clip_bounds(node) or (None, None)
            bounds = "computed" if high is None else f"{low or 0:g}, {high:g}"
            automatic = facts.float_model and facts.legaliser.becomes_relu(node)
            text = f"Conv + Clip({bounds}) '{node.name}'{cost}"
            yield Hit(Severity.WARNING, text, str(conv.name), automatic=automatic)


def _gates(facts: Facts) -> Iterator[Hit]:
    if facts.format is not Format.XINT8 or facts.device.compiler is not Compiler.X2:
        return
    gates = [node for node in facts.prepared.graph if op_key(node) in _GATES]
    for node in gates:
        yield Hit(Severity.WARNING, f"{node.op_type} in XINT8, one of {len(gates)}", str(node.name))


def _shuffles(facts: Facts) -> Iterator[Hit]:
    for node in facts.prepared.graph:
        found = channel_shuffle(node) if facts.format.integer else None
        if found is not None:
            shape = node.outputs[0].shape
            text = f"Reshape, Transpose, Reshape through {rank(node.outputs[0])}-D {shape}"
            yield Hit(Severity.WARNING, text, str(node.name))


def _norms(facts: Facts) -> Iterator[Hit]:
    converted = facts.float_model and facts.recipe.prepare.batch_norm_to_conv
    # In XINT8 the depthwise Conv that takes its place falls to the CPU with the Relu behind it.
    automatic = converted and facts.format in (Format.A8W8, Format.A16W8)
    for node in facts.given.graph:
        concat = norm_after_concat(node) if facts.format.integer else None
        if concat is not None:
            text = f"BatchNormalization behind Concat '{concat.name}' of {len(concat.inputs)} tensors"
            yield Hit(Severity.WARNING, text, str(node.name), automatic=automatic)


RULES = (
    Rule(
        "P08",
        "Conv + activation",
        "The X2 compiler left 18 Conv + ReLU6 pairs of mobilenet_v2 on the CPU, one island each.",
        "Let the quantizer saturate instead of the Clip: roundel quantize --device stx.",
        _conv_and_activation,
    ),
    Rule(
        "P09",
        "sigmoid in XINT8",
        "The X2 compiler leaves (Hard)Sigmoid in XINT8 on the CPU: 66 islands in efficientnet_b0.",
        "Use --preset a8w8 or a16w8, where that model ran wholly on the NPU; measure the accuracy.",
        _gates,
    ),
    Rule(
        "P10",
        "channel shuffle",
        "A 5-D channel shuffle runs on the CPU: 17 islands in shufflenet_v2.",
        "Export the shuffle as a 1x1 Conv with a permutation as weights, or as Slice and Concat.",
        _shuffles,
    ),
    Rule(
        "P11",
        "norm behind Concat",
        "It cannot be folded into a Conv and cuts the graph: 63 islands in densenet121 in XINT8.",
        "Use --preset a8w8 or a16w8: quantize turns it into a depthwise Conv there.",
        _norms,
    ),
)
