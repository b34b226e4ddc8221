"""Format and device (P18, P19)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from roundel.check.facts import Facts
from roundel.check.types import Hit, Rule, Severity
from roundel.model.graph import opset_version
from roundel.targets.devices import NATIVE_16_BIT_OPSET, RECOMMENDED_OPSET, Format


def _sixteen_bit_domain(facts: Facts) -> Iterator[Hit]:
    if facts.format is not Format.A16W8:
        return
    if facts.stored is not None:
        wide = [t.domain for t in facts.stored.tensors.values() if t.dtype in ("int16", "uint16")]
        opset = opset_version(facts.raw)
        if opset < NATIVE_16_BIT_OPSET:
            domains = ", ".join(f"{domain or 'ai.onnx'} {n}" for domain, n in Counter(wide).most_common())
            yield Hit(Severity.NOTE, f"opset {opset}, 16-bit Q/DQ by domain: {domains or 'none'}")
        return
    opset = facts.recipe.output.opset or max(facts.loaded.source_opset, RECOMMENDED_OPSET)
    if opset < NATIVE_16_BIT_OPSET:
        yield Hit(Severity.NOTE, f"opset {opset}: 16-bit Q/DQ are written in the domain com.microsoft")


def _available(facts: Facts) -> Iterator[Hit]:
    if facts.format not in facts.device.formats:
        takes = ", ".join(sorted(kind.value for kind in facts.device.formats))
        text = f"{facts.format.value} on {facts.device.name} ({facts.device.processors}), which takes {takes}"
        yield Hit(Severity.ERROR, text)


RULES = (
    Rule(
        "P18",
        "16-bit Q/DQ domain",
        "Standard 16-bit Q/DQ exist from opset 21; which domain the compiler takes is undocumented.",
        "If it does not compile, try native nodes: -s output.opset=21 -s placement.domain=ai.onnx.",
        _sixteen_bit_domain,
    ),
    Rule(
        "P19",
        "format on device",
        "The device's compilers do not take this format; the model would run on the CPU.",
        "Choose --preset xint8 for this device, or another device.",
        _available,
    ),
)
