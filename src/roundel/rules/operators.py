"""Operators and their attributes (P06, P07, P12, P17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from roundel.model import graph
from roundel.passes.activations import is_depthwise
from roundel.plan.float_parts import find_detection_head, joins_scores, maker_behind
from roundel.rules.facts import Facts
from roundel.rules.placement import channel_shuffle, conv_before, norm_after_concat
from roundel.rules.types import Finding, NodePlace, Severity, rule
from roundel.targets.npu import Compiler, Format
from roundel.targets.operators import GATES, LAYERS, Trait, ops_with

_CONV_ATTRIBUTES = ("kernel_shape", "strides", "pads", "dilations", "group")
_CONVS = ops_with(Trait.CONV)
_POOLS = ops_with(Trait.POOL)  # those without a window have no ceil_mode and no pads


@rule(
    "P06",
    "implicit attributes",
    "Write the attributes out; quantize does so (prepare.explicit_conv_attributes).",
)
def _implicit_attributes(facts: Facts) -> Iterator[Finding]:
    """A Conv that relies on ONNX defaults has aborted a session [one report]."""
    automatic = facts.float_model and facts.recipe.prepare.explicit_conv_attributes
    for node in facts.graph:
        if graph.op_key(node) not in _CONVS:
            continue
        missing = [name for name in _CONV_ATTRIBUTES if name not in node.attributes]
        if missing:
            text = f"{len(missing)} attributes left to defaults: {', '.join(missing)}"
            yield Finding(Severity.WARNING, text, str(node.name), automatic=automatic)


@rule("P07", "pool rounding", "Pad explicitly before the pool and set ceil_mode to 0, then export again.")
def _pools(facts: Facts) -> Iterator[Finding]:
    """The compiler computes pool sizes in floor mode with equal pads; another size breaks it."""
    for node in facts.graph:
        if graph.op_key(node) not in _POOLS:
            continue
        ceil = graph.attribute_int(node, "ceil_mode", 0)
        pads = graph.attribute_ints(node, "pads") or ()
        half = len(pads) // 2
        same = graph.attribute_string(node, "auto_pad", "").startswith("SAME")
        if not ceil and pads[:half] == pads[half:] and not same:
            continue
        actual, floor = _spatial(node.outputs[0]), _floor_shape(node, pads)
        differs = actual is None or floor is None or actual != floor
        words = f"ceil_mode {ceil}, pads {list(pads)}"
        if differs and actual is not None and floor is not None:
            words += f": makes {_by(actual)}, the compiler expects {_by(floor)}"
        yield Finding(Severity.WARNING if differs else Severity.NOTE, words, str(node.name))


def _spatial(value: ir.Value | None) -> tuple[int, ...] | None:
    """Sizes behind batch and channels."""
    shape = graph.dims(value)
    if shape is None or None in shape[2:]:
        return None
    return tuple(size for size in shape[2:] if size is not None)


def _floor_shape(node: ir.Node, pads: Sequence[int]) -> tuple[int, ...] | None:
    """What the compiler computes: floor mode, with the leading pads on both sides."""
    source, kernel = _spatial(node.inputs[0]), graph.attribute_ints(node, "kernel_shape")
    if source is None or kernel is None:
        return None
    strides = graph.attribute_ints(node, "strides") or (1,) * len(kernel)
    dilations = graph.attribute_ints(node, "dilations") or (1,) * len(kernel)
    begin = tuple(pads[: len(kernel)]) or (0,) * len(kernel)
    rows = zip(source, kernel, strides, dilations, begin, strict=True)
    return tuple((size + 2 * pad - (d * (k - 1) + 1)) // step + 1 for size, k, step, d, pad in rows)


def _by(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


@rule(
    "P12",
    "not in AMD's table",
    "Another format may list it (docs/check.md); or replace the operator. The table is advice.",
)
def _outside_table(facts: Facts) -> Iterator[Finding]:
    """Operators outside the table for this format usually run on the CPU and cut the graph."""
    kinds: dict[str, list[NodePlace]] = {}
    for place in facts.before.nodes:
        if place.rule == "P12":
            kinds.setdefault(place.op, []).append(place)
    total = facts.before.macs
    for op, places in kinds.items():
        macs = sum(place.macs or 0 for place in places)
        share = f", {macs / total:.1%} of MACs" if total else ""
        text = f"{len(places)} {op} ({places[0].reason}){share}"
        yield Finding(Severity.NOTE, text, places[0].name)


@rule("P17", "BF16 doubts", "Verify every output on the NPU against the CPU before shipping.")
def _bf16_doubts(facts: Facts) -> Iterator[Finding]:
    """Wrong values without a message have been reported for these in BF16."""
    if facts.format is not Format.BF16:
        return
    outputs = facts.graph.outputs
    if len(outputs) > 1:
        yield Finding(Severity.WARNING, f"BF16 with {len(outputs)} outputs", str(outputs[0].name))
    for node in facts.graph:
        if graph.op_key(node) == "PRelu":
            shape = graph.static_shape(node.inputs[1])
            yield Finding(Severity.WARNING, f"PRelu with slopes {list(shape or ())} in BF16", str(node.name))


_OTHER_FORMAT = "Use --preset a8w8 or a16w8, where AMD's logs have this pair on the NPU."
_DEPTHWISE = "In XINT8 these pairs explain 3 islands of mobilenet_v3_small and all 62 cuts of densenet121."


@rule(
    "P08",
    "Conv + activation",
    "Let the quantizer saturate instead of the Clip: roundel quantize --device stx.",
)
def _conv_and_activation(facts: Facts) -> Iterator[Finding]:
    """The X2 compiler left 18 Conv + ReLU6 pairs of mobilenet_v2 on the CPU, one island each."""
    places = {place.name: place for place in facts.before.nodes}
    for node in facts.prepared.graph:
        place = places.get(str(node.name))
        conv = conv_before(node) if place is not None and place.rule == "P08" else None
        if conv is None:
            continue
        macs = places[str(conv.name)].macs if conv.name in places else None
        cost = "" if macs is None else f", {macs / 1e6:.2f} M MACs"
        if is_depthwise(conv):
            text = f"depthwise Conv + {node.op_type} '{node.name}'{cost}"
            yield Finding(Severity.WARNING, text, str(conv.name), _OTHER_FORMAT, why=_DEPTHWISE)
        else:
            low, high = graph.clip_bounds(node) or (None, None)
            bounds = "computed" if high is None else f"{low or 0:g}, {high:g}"
            automatic = facts.float_model and facts.becomes_relu(node)
            text = f"Conv + Clip({bounds}) '{node.name}'{cost}"
            yield Finding(Severity.WARNING, text, str(conv.name), automatic=automatic)


@rule(
    "P09",
    "sigmoid in XINT8",
    "Use --preset a8w8 or a16w8, where that model ran wholly on the NPU; measure the accuracy.",
)
def _gates(facts: Facts) -> Iterator[Finding]:
    """The X2 compiler leaves (Hard)Sigmoid in XINT8 on the CPU: 66 islands in efficientnet_b0."""
    if facts.format is not Format.XINT8 or facts.device.compiler is not Compiler.X2:
        return
    gates = [node for node in facts.prepared.graph if graph.op_key(node) in GATES]
    for node in gates:
        yield Finding(Severity.WARNING, f"{node.op_type} in XINT8, one of {len(gates)}", str(node.name))


@rule(
    "P10",
    "channel shuffle",
    "Export the shuffle as a 1x1 Conv with a permutation as weights, or as Slice and Concat.",
)
def _shuffles(facts: Facts) -> Iterator[Finding]:
    """A 5-D channel shuffle runs on the CPU: 17 islands in shufflenet_v2."""
    for node in facts.prepared.graph:
        found = channel_shuffle(node) if facts.format.integer else None
        if found is not None:
            shape = node.outputs[0].shape
            text = f"Reshape, Transpose, Reshape through {graph.rank(node.outputs[0])}-D {shape}"
            yield Finding(Severity.WARNING, text, str(node.name))


@rule(
    "P11", "norm behind Concat", "Use --preset a8w8 or a16w8: quantize turns it into a depthwise Conv there."
)
def _norms(facts: Facts) -> Iterator[Finding]:
    """It cannot be folded into a Conv and cuts the graph: 63 islands in densenet121 in XINT8."""
    converted = facts.float_model and facts.recipe.prepare.batch_norm_to_conv
    # In XINT8 the depthwise Conv that takes its place falls to the CPU with the Relu behind it.
    automatic = converted and facts.format in (Format.A8W8, Format.A16W8)
    for node in facts.graph:
        concat = norm_after_concat(node) if facts.format.integer else None
        if concat is not None:
            text = f"BatchNormalization behind Concat '{concat.name}' of {len(concat.inputs)} tensors"
            yield Finding(Severity.WARNING, text, str(node.name), automatic=automatic)


_PROBABILITIES = {"Sigmoid": "probabilities (Sigmoid)", "Softmax": "probabilities (Softmax)"}
_ARITHMETIC = ops_with(Trait.ARITHMETIC)
_MOST_NAMES = 6
_BY_ITSELF = "Effort fast and high do so behind the last layers."


@rule("P13", "detection head", "Keep the head in float with --exclude-subgraph, or use --preset a16w8.")
def _heads(facts: Facts) -> Iterator[Finding]:
    """Concat gives one scale to boxes (hundreds) and scores (0 to 1): the scores become zero."""
    if not facts.format.integer:
        return
    head = find_detection_head(facts.graph)
    for node in facts.graph:
        if graph.op_key(node) != "Concat":
            continue
        meanings = {meaning for value in node.inputs if (meaning := _meaning(value)) is not None}
        certain = meanings & set(_PROBABILITIES.values())
        if node in head and joins_scores(node) and meanings == certain:
            meanings.add("values of another kind")
        if certain and meanings - certain and (facts.float_model or node.outputs[0].name in facts.tensors):
            text = f"Concat of {len(node.inputs)}: {' with '.join(sorted(meanings))}"
            yield Finding(Severity.WARNING, text, str(node.name), _exclusion(facts.graph, node))


def _meaning(value: ir.Value | None) -> str | None:
    """What kind of number a Concat input holds, looking back through operators that only move values."""
    node = maker_behind(value)
    if node is None:
        return None
    op = graph.op_key(node)
    if op in _PROBABILITIES:
        return _PROBABILITIES[op]
    if op in LAYERS:
        return "box distribution (DFL)" if _after_softmax(node) else "raw values"
    if op in _ARITHMETIC and not _is_gate(node):
        return "box arithmetic"
    return None


def _after_softmax(node: ir.Node) -> bool:
    """The expectation over bins: a layer that reads a Softmax."""
    source = maker_behind(node.inputs[0])
    return source is not None and graph.op_key(source) == "Softmax"


def _is_gate(node: ir.Node) -> bool:
    """SiLU and residual sums join two computed tensors; decoding of boxes uses constants."""
    inputs = [value for value in node.inputs if value is not None]
    return len(inputs) > 1 and not any(graph.is_constant(value) for value in inputs)


def _exclusion(whole: ir.Graph, concat: ir.Node) -> str:
    """The words for the command line that keep the head in float, from the last layers to the outputs."""
    starts, reached = _layer_outputs(concat), graph.downstream(whole, [concat])
    ends = [str(value.name) for value in whole.outputs if value.producer() in reached]
    if not starts or not ends or len(starts) + len(ends) > _MOST_NAMES:
        return f"Keep the head in float: --exclude '{concat.name}', or use --preset a16w8. {_BY_ITSELF}"
    border = f"{','.join(starts)}->{','.join(ends)}"
    return f"Keep the head in float: --exclude-subgraph '{border}'; or a16w8. {_BY_ITSELF}"


def _layer_outputs(concat: ir.Node) -> list[str]:
    found: dict[str, None] = {}
    stack, seen = [value.producer() for value in concat.inputs if value is not None], set[ir.Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if graph.op_key(node) in LAYERS and not _after_softmax(node):
            found[str(node.outputs[0].name)] = None
        else:
            stack.extend(node.predecessors())
    return sorted(found)
