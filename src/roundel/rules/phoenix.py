"""Phoenix and Hawk Point (compiler X1): what is refused there, and what is placed and computed wrongly.

Measured on one Phoenix NPU with Ryzen AI 1.7.1. The wrong ones are errors: no report and no log shows them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from roundel.errors import ModelError, RecipeError
from roundel.model.graph import op_key
from roundel.qdq.read import StoredTensor, product_step
from roundel.recipe.settings import Recipe
from roundel.rules.facts import Facts, fixed_rows
from roundel.rules.types import Finding, NodePlace, Severity, rule
from roundel.targets.npu import Compiler, Device
from roundel.targets.operators import BIASED_LAYERS
from roundel.targets.x1 import NO_XCLBIN
from roundel.types import QType

# Rules whose errors no report shows: the file would run and give other numbers, or be refused as a whole.
SILENT = frozenset({"P03", "P19", "Q01", "Q02", "Q03", "Q15", "Q16"})
_INT8 = QType.INT8
_SAME = 1e-3


@rule("Q15", "domain of Q/DQ", "Write standard nodes: -s placement.domain=ai.onnx, at opset 13 or newer.")
def _domain(facts: Facts) -> Iterator[Finding]:
    """X1 refuses the whole graph for Q/DQ in com.microsoft: 0 of 395 nodes on the NPU, and no message."""
    foreign = [t for t in facts.tensors.values() if t.domain == "com.microsoft"] if facts.first else []
    if foreign:
        text = f"{len(foreign)} of {len(facts.tensors)} tensors have Q/DQ in com.microsoft"
        yield Finding(Severity.ERROR, text, foreign[0].name)


@rule("Q16", "int32 bias", "Store biases in int8 with a scale of their own; preset xint8 does.")
def _wide_biases(facts: Facts) -> Iterator[Finding]:
    """X1 places int32 biases at the products' scale and computes them wrongly: RMSE 8, no argmax right."""
    for node in facts.graph if facts.first else ():
        if op_key(node) not in BIASED_LAYERS or len(node.inputs) < 3:
            continue
        data, weight, bias = (
            facts.tensors.get(str(value.name)) if value is not None else None for value in node.inputs[:3]
        )
        if bias is None or bias.codes is None or bias.dtype != "int32":
            continue
        beyond = int(np.count_nonzero((bias.codes < _INT8.qmin) | (bias.codes > _INT8.qmax)))
        at = " at input scale x weight scale" if _at_product(node, data, weight, bias) else ""
        if beyond:
            text = f"int32 bias{at}: {beyond} of {bias.codes.size} codes do not fit int8"
            yield Finding(Severity.ERROR, text, bias.name)
        else:
            why = "The NPU computes it rightly, and ONNX Runtime's optimized session does not (RMSE 5)."
            yield Finding(Severity.WARNING, "int32 bias whose codes fit int8", bias.name, why=why)


def _at_product(
    node: ir.Node, data: StoredTensor | None, weight: StoredTensor | None, bias: StoredTensor
) -> bool:
    if data is None or weight is None or data.scale.size != 1 or bias.scale.size != 1:
        return data is not None and weight is not None and weight.scale.size == bias.scale.size
    step = product_step(node, data, weight)
    return bool(np.allclose(bias.scale.reshape(-1), step.reshape(-1), rtol=_SAME, atol=0))


@rule("P23", "5-D tensor", "Export it with at most 4 dimensions: as Slice and Concat, or as a 1x1 Conv.")
def _five_dimensions(facts: Facts) -> Iterator[Finding]:
    """What touches a tensor of five dimensions never ran on Phoenix, and tears the graph apart."""
    for place in _placed(facts, "P23"):
        yield Finding(Severity.WARNING, f"{place.op} {place.reason}", place.name)


@rule("P24", "never on Phoenix", "Replace the operator, or cut the model there and do the rest on the host.")
def _never(facts: Facts) -> Iterator[Finding]:
    """In no measured network did the first NPU run it, whatever AMD's table says."""
    for place in _placed(facts, "P24"):
        yield Finding(Severity.WARNING, f"{place.op} ({place.reason})", place.name)


@rule(
    "P25",
    "nothing is placed",
    "End the graph at its last Conv: quantize --cut-head, or --device phx.",
)
def _ejected(facts: Facts) -> Iterator[Finding]:
    """Such parts made the provider drop every Conv of the graph: 0 of 965 nodes of a YOLOv8n on the NPU."""
    for place in _placed(facts, "P25")[:1]:
        severity = Severity.WARNING if facts.float_model else Severity.ERROR
        subject = None if facts.float_model else facts.loaded.name
        yield Finding(severity, place.reason, subject, automatic=facts.cut is not None)


def _placed(facts: Facts, number: str) -> list[NodePlace]:
    return [place for place in facts.before.nodes if place.rule == number]


@rule(
    "P26", "no xclbin", "Install Ryzen AI 1.7.1, or keep its phoenix/4x4.xclbin and name it to the session."
)
def _xclbin(facts: Facts) -> Iterator[Finding]:
    """The xclbin chooses the chip; without one the compiler builds for another, silently."""
    if facts.first:
        yield Finding(Severity.NOTE, NO_XCLBIN)


def refuse_recipe(recipe: Recipe, device: Device) -> None:
    """Refuse, before anything runs, what X1 would compute wrongly.

    Raises:
        RecipeError: the first such setting.
    """
    if device.compiler is not Compiler.X1:
        return
    bias, domain = recipe.bias.type, recipe.placement.domain
    tests = (
        ("weights.per_channel", recipe.weights.per_channel, "true", "false: X1 refuses the whole graph"),
        ("weights.scale", recipe.weights.scale != "power_of_two", recipe.weights.scale, "power_of_two"),
        ("bias.type", bias in ("int16", "int32"), bias, "int8: X1 computes int32 biases wrongly"),
        ("placement.domain", domain == "com.microsoft", domain, "ai.onnx: X1 refuses the whole graph"),
    )
    for where, broken, observed, expected in tests:
        if broken:
            raise RecipeError(
                "The NPU would not run such a file, or would run it wrongly, without a message.",
                where=f"--device {device.name}, {where}",
                observed=observed,
                expected=expected,
                hint="Take preset xint8 as it is.",
            )


def refuse_batch(graph: ir.Graph, device: Device) -> None:
    """Refuse a fixed batch above 1 before anything runs.

    Raises:
        ModelError: the model has one, and the device computes the first sample only.
    """
    rows = fixed_rows(graph) if device.compiler is Compiler.X1 else 1
    if rows > 1:
        raise ModelError(
            "The model has a fixed batch, of which this NPU computes the first sample only.",
            where=f"--device {device.name}",
            observed=f"a batch of {rows}",
            expected="1, or an open batch axis",
            hint="Export with batch 1, or with an open batch axis.",
        )
