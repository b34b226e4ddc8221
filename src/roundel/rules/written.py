"""Whether stored numbers are legal: the rules that a run's gate and the check of a finished model share.

The gate judges what a run has written by these and by nothing else, and then runs it. What it finds is a
defect of Roundel, not of the user's model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from roundel.calibrate.positions import asked_for, find_sites
from roundel.errors import ModelError, VerifyError
from roundel.model.graph import is_constant, only_reader, op_key
from roundel.model.session import open_session
from roundel.qdq.read import PAIRS, StoredTensor, StoredTensors, is_gain, strip_pairs
from roundel.recipe.settings import Recipe
from roundel.rules.placement import maker_of
from roundel.rules.types import Finding, Severity, rule, rules_of
from roundel.targets.operators import AVERAGE_POOLS, FUSING_CONSUMERS
from roundel.targets.shifts import XINT8_LIMITS, Breach

AGAIN = "Quantize the float model again: roundel quantize MODEL --preset xint8."
_UNCHECKED = "roundel.unchecked"
_HINT = "This is a defect of Roundel, not of your model: please report it with the model's structure."
_TINY = float(np.finfo(np.float32).tiny)
_CHAIN = 3  # activation and gain may follow before the pair does


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A model with Q/DQ pairs, as these rules see it.

    Attributes:
        graph: its graph in float, the pairs taken out.
        stored: what the pairs held; None for a float model.
        powers: whether every scale must be a power of two.
        limits: the families of shift limits that must hold.
        computed: the nodes for which they must.
    """

    graph: ir.Graph
    stored: StoredTensors | None
    powers: bool
    limits: frozenset[str]
    computed: tuple[ir.Node, ...]

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What the pairs held, by the tensor's name; nothing for a float model."""
        return self.stored.tensors if self.stored is not None else {}

    @property
    def breaches(self) -> Iterator[Breach]:
        """The shift limits that do not hold."""
        if not self.limits:
            return
        stored = self.tensors
        known = {
            name: p for name, t in stored.items() if t.dtype != "int32" and (p := t.position) is not None
        }
        before, behind = partial(tensor_before, stored=stored), partial(tensor_behind, stored=stored)
        sites = find_sites(self.computed, before, behind, lambda node: op_key(node) == "HardSigmoid")
        for site in sites:
            if site.bias is not None and site.bias not in known:
                site = replace(site, bias=None)
            if known.keys() >= {*site.inputs, site.output, site.weight} - {None}:
                yield from XINT8_LIMITS.breaches(site, known.__getitem__, self.limits)


def errors_of(model: ir.Model, recipe: Recipe, quantized: Collection[str]) -> Iterator[Finding]:
    """What is illegal in a model that a run has written.

    Args:
        model: with its Q/DQ pairs; it is not changed.
        recipe: what was asked for.
        quantized: names of the nodes that the plan quantizes; the limits are theirs alone.
    """
    if not any(op_key(node) in PAIRS for node in model.graph):
        return
    copy = model.clone()
    stored = strip_pairs(copy)
    kinds = {recipe.activations.scale, recipe.weights.scale}
    powers = kinds == {"power_of_two"} and recipe.bias.type == "int8"
    nodes = tuple(node for node in copy.graph if node.name in quantized)
    written = Written(copy.graph, stored, powers, asked_for(recipe.npu), nodes)
    for each in rules_of(sys.modules[__name__]):
        yield from (found for found in each.findings(written) if found.severity is Severity.ERROR)


def check_written(model: ir.Model, recipe: Recipe, quantized: Collection[str]) -> None:
    """Refuse what is illegal.

    Raises:
        VerifyError: the first thing that is.
    """
    for found in errors_of(model, recipe, quantized):
        raise VerifyError(
            f"The quantized model breaks rule {found.rule} ({found.title}).",
            where=found.subject,
            observed=found.message,
            expected=found.why,
            hint=_HINT,
        )
    gc.collect()  # the stripped copy is full of cycles, and holds a second set of codes


def check_file(path: Path, threads: int | None = None) -> ort.InferenceSession:
    """Check a written model and hand back a session on it, computing exactly as written.

    Args:
        path: of the model.
        threads: of the session; None leaves the choice to ONNX Runtime.

    Raises:
        VerifyError: the ONNX checker or ONNX Runtime refuses it.
    """
    try:
        _check_onnx(path)
    except onnx.checker.ValidationError as error:
        observed = " ".join(str(error).split())[:400]
        raise VerifyError(
            "The quantized model fails the ONNX checker.", observed=observed, hint=_HINT
        ) from error
    try:
        return open_session(path, threads=threads, simulate=True)
    except ModelError as error:
        raise VerifyError(
            "ONNX Runtime does not load the quantized model.", observed=error.observed, hint=_HINT
        ) from error


def _check_onnx(path: Path) -> None:
    """ONNX's checker on all but two things that the float model may have and ONNX Runtime takes.

    Operators that ONNX Runtime has added to ONNX's own domain: exporters write them
    (SimplifiedLayerNormalization, or LayerNormalization before opset 17), and ONNX has no schema for them.
    And outputs of a rank that only the run shows.
    """
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError:
        proto = onnx.load(path, load_external_data=False)
        version = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
        own = [node for node in proto.graph.node if not node.domain]
        foreign = [node for node in own if not onnx.defs.has(node.op_type, version, "")]
        kinds = [o.type.tensor_type for o in proto.graph.output if o.type.HasField("tensor_type")]
        open_kinds = [kind for kind in kinds if not kind.HasField("shape")]
        if not foreign and not open_kinds:
            raise
        for kind in open_kinds:
            kind.shape.SetInParent()
        for node in foreign:
            node.domain = _UNCHECKED
        proto.opset_import.add(domain=_UNCHECKED, version=1)
        onnx.checker.check_model(proto)


@rule("Q01", "scales", AGAIN)
def _powers(judged: Written) -> Iterator[Finding]:
    """XINT8 shifts instead of multiplying: scales are 2**-n. X1 places others and computes them wrongly."""
    for tensor in judged.tensors.values() if judged.powers else ():
        if not tensor.power_of_two:
            text = f"scale {tensor.scale.reshape(-1)[0]:.6g} is no power of two"
            yield Finding(Severity.ERROR, text, tensor.name)


@rule("Q13", "illegal scale", "Quantize the float model again, statically.")
def _illegal_scales(judged: Written) -> Iterator[Finding]:
    """A scale is a constant, positive and finite, and no smaller than the smallest normal float32."""
    for tensor in judged.tensors.values():
        broken = ~(np.isfinite(tensor.scale) & (tensor.scale > 0))
        # A bias of zeros may have any scale: its step is the product of two others.
        empty = tensor.codes is not None and not tensor.codes.any()
        if not empty:
            broken |= tensor.scale < _TINY
        if broken.any():
            worst = float(tensor.scale[broken].reshape(-1)[0])
            yield Finding(Severity.ERROR, f"scale {worst:.6g}", tensor.name)
    if judged.stored is not None and judged.stored.unreadable:
        names = judged.stored.unreadable
        yield Finding(Severity.ERROR, f"{len(names)} Q/DQ nodes compute their scale at run time", names[0])


@rule("Q14", "illegal shape", "Quantize the float model again.")
def _illegal_shapes(judged: Written) -> Iterator[Finding]:
    """A tensor has one scale and one zero point, or one of each for every entry of its axis."""
    for tensor in judged.tensors.values():
        if tensor.zero_point.size != tensor.scale.size:
            text = f"{tensor.zero_point.size} zero points for {tensor.scale.size} scales"
            yield Finding(Severity.ERROR, text, tensor.name)
        elif tensor.dtype == "int32" and tensor.zero_point.any():
            text = f"zero point {int(tensor.zero_point.reshape(-1)[0])} of int32, which knows 0 only"
            yield Finding(Severity.ERROR, text, tensor.name)
        elif tensor.codes is not None and tensor.axis is not None and tensor.scale.ndim == 1:
            rank = tensor.codes.ndim
            size = tensor.codes.shape[tensor.axis] if -rank <= tensor.axis < rank else None
            if size != tensor.scale.size:
                text = f"{tensor.scale.size} scales along axis {tensor.axis} of {list(tensor.codes.shape)}"
                yield Finding(Severity.ERROR, text, tensor.name)


@rule("Q12", "uneven pairs", "Give Q and DQ the same constants.")
def _disagreeing(judged: Written) -> Iterator[Finding]:
    """A pair whose halves differ rescales the tensor; compilers assume that they are equal."""
    for name in judged.stored.mismatched if judged.stored is not None else ():
        yield Finding(Severity.ERROR, "Q and DQ of one pair have different scales or zero points", name)


@rule("Q07", "shift limits", "Move the scales within reach (recipe section npu); preset xint8 does.")
def _shifts(judged: Written) -> Iterator[Finding]:
    """The NPU's shifters reach only so far: X1 leaves a Conv beyond them to the CPU, others may be wrong."""
    for breach in judged.breaches:
        text = f"{breach.rule} {breach.value}, allowed {breach.low} to {breach.high}"
        yield Finding(Severity.ERROR, text, breach.node)


def tensor_before(value: ir.Value | None, stored: Mapping[str, StoredTensor]) -> str | None:
    """The stored tensor that a node reads, looking back through a Pad that has no pair of its own."""
    if value is None or value.name in stored:
        return None if value is None else str(value.name)
    maker = None if is_constant(value) else value.producer()
    return tensor_before(maker.inputs[0], stored) if maker is not None and op_key(maker) == "Pad" else None


def tensor_behind(node: ir.Node, stored: Mapping[str, StoredTensor]) -> str | None:
    """What holds a node's result, looking on through activations and gains that share its pair."""
    value = node.outputs[0]
    for _ in range(_CHAIN):
        if value.name in stored:
            return str(value.name)
        reader = only_reader(value)
        if reader is None or maker_of(reader) is not value.producer():
            return None
        onward = op_key(reader) in FUSING_CONSUMERS or is_gain(reader)
        if not onward and not (op_key(node) == "Pad" and op_key(reader) in AVERAGE_POOLS):
            return None
        value = reader.outputs[0]
    return None
