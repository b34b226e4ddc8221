"""Operators and their attributes (P06, P07, P12, P17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from roundel.check.facts import Facts
from roundel.check.types import Hit, NodePlace, Rule, Severity
from roundel.model.graph import attribute_int, attribute_ints, op_key, static_shape
from roundel.targets.devices import Format

_CONV_ATTRIBUTES = ("kernel_shape", "strides", "pads", "dilations", "group")
_POOLS = ("MaxPool", "AveragePool")


def _implicit_attributes(facts: Facts) -> Iterator[Hit]:
    automatic = facts.float_model and facts.recipe.prepare.explicit_conv_attributes
    for node in facts.given.graph:
        if op_key(node) not in ("Conv", "ConvTranspose"):
            continue
        missing = [name for name in _CONV_ATTRIBUTES if name not in node.attributes]
        if missing:
            text = f"{len(missing)} attributes left to defaults: {', '.join(missing)}"
            yield Hit(Severity.WARNING, text, str(node.name), automatic=automatic)


def _pools(facts: Facts) -> Iterator[Hit]:
    for node in facts.given.graph:
        if op_key(node) not in _POOLS:
            continue
        ceil = attribute_int(node, "ceil_mode", 0)
        pads = attribute_ints(node, "pads") or ()
        half = len(pads) // 2
        if not ceil and pads[:half] == pads[half:] and not _same_padding(node):
            continue
        actual, floor = _spatial(node.outputs[0]), _floor_shape(node, pads)
        differs = actual is None or floor is None or actual != floor
        words = f"ceil_mode {ceil}, pads {list(pads)}"
        if differs and actual is not None and floor is not None:
            words += f": makes {_by(actual)}, the compiler expects {_by(floor)}"
        yield Hit(Severity.WARNING if differs else Severity.NOTE, words, str(node.name))


def _same_padding(node: ir.Node) -> bool:
    attr = node.attributes.get("auto_pad")
    return attr is not None and attr.as_string().startswith("SAME")


def _spatial(value: ir.Value | None) -> tuple[int, ...] | None:
    """Sizes behind batch and channels."""
    if value is None or value.shape is None:
        return None
    dims = list(value.shape)[2:]
    return tuple(int(d) for d in dims) if all(isinstance(d, int) for d in dims) else None  # type: ignore[arg-type]


def _floor_shape(node: ir.Node, pads: Sequence[int]) -> tuple[int, ...] | None:
    """What the compiler computes: floor mode, with the leading pads on both sides."""
    source, kernel = _spatial(node.inputs[0]), attribute_ints(node, "kernel_shape")
    if source is None or kernel is None:
        return None
    strides = attribute_ints(node, "strides") or (1,) * len(kernel)
    dilations = attribute_ints(node, "dilations") or (1,) * len(kernel)
    begin = tuple(pads[: len(kernel)]) or (0,) * len(kernel)
    rows = zip(source, kernel, strides, dilations, begin, strict=True)
    return tuple((size + 2 * pad - (d * (k - 1) + 1)) // step + 1 for size, k, step, d, pad in rows)


def _by(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def _outside_table(facts: Facts) -> Iterator[Hit]:
    kinds: dict[str, list[NodePlace]] = {}
    for place in facts.before.nodes:
        if place.rule == "P12":
            kinds.setdefault(place.op, []).append(place)
    total = facts.before.macs
    for op, places in kinds.items():
        macs = sum(place.macs or 0 for place in places)
        share = f", {macs / total:.1%} of MACs" if total else ""
        text = f"{len(places)} {op} ({places[0].reason}){share}"
        yield Hit(Severity.NOTE, text, places[0].name)


def _bf16_doubts(facts: Facts) -> Iterator[Hit]:
    if facts.format is not Format.BF16:
        return
    outputs = facts.given.graph.outputs
    if len(outputs) > 1:
        yield Hit(Severity.WARNING, f"BF16 with {len(outputs)} outputs", str(outputs[0].name))
    for node in facts.given.graph:
        if op_key(node) == "PRelu":
            shape = static_shape(node.inputs[1])
            yield Hit(Severity.WARNING, f"PRelu with slopes {list(shape or ())} in BF16", str(node.name))


RULES = (
    Rule(
        "P06",
        "implicit attributes",
        "A Conv that relies on ONNX defaults has aborted a session [one report].",
        "Write the attributes out; quantize does so (prepare.explicit_conv_attributes).",
        _implicit_attributes,
    ),
    Rule(
        "P07",
        "pool rounding",
        "The compiler computes pool sizes in floor mode with equal pads; another size breaks it.",
        "Pad explicitly before the pool and set ceil_mode to 0, then export again.",
        _pools,
    ),
    Rule(
        "P12",
        "not in AMD's table",
        "Operators outside the table for this format usually run on the CPU and cut the graph.",
        "Another format may list it (docs/check.md); or replace the operator. The table is advice.",
        _outside_table,
    ),
    Rule(
        "P17",
        "BF16 doubts",
        "Wrong values without a message have been reported for these in BF16.",
        "Verify every output on the NPU against the CPU before shipping.",
        _bf16_doubts,
    ),
)
