"""Whether a finished file is a valid model that ONNX Runtime loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.calibrate.positions import breaches
from roundel.calibrate.runner import run_session
from roundel.calibrate.statistics import QuantState
from roundel.errors import DataError, ModelError, VerifyError
from roundel.model.graph import constant_array
from roundel.model.load import ModelSource, as_written
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness, comparable
from roundel.plan.float_parts import Joint, paired_parts
from roundel.recipe.settings import Npu, Recipe
from roundel.types import Sample

_UNCHECKED = "roundel.unchecked"
_HINT = "This is a defect of Roundel, not of your model: please report it with the model's structure."


def check_file(path: Path) -> ort.InferenceSession:
    """Check a written model and hand back a session on it, computing exactly as written.

    Raises:
        VerifyError: the ONNX checker or ONNX Runtime refuses it, or a scale is not usable.
    """
    try:
        _check_onnx(path)
    except onnx.checker.ValidationError as error:
        raise VerifyError(
            "The quantized model fails the ONNX checker.", observed=_short(error), hint=_HINT
        ) from error
    try:
        return open_session(path, simulate=True)
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


def check_scales(model: ir.Model) -> None:
    """Every Q/DQ node has finite, positive scales and as many as its axis has entries."""
    for node in model.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale = constant_array(node.inputs[1])
        if scale is None or not (np.isfinite(scale).all() and (scale > 0).all()):
            raise VerifyError(
                "A scale is not a positive finite number.",
                where=f"{node.op_type} '{node.name}'",
                observed=None if scale is None else scale.reshape(-1)[:4],
                hint=_HINT,
            )


def check_limits(model: ir.Model, state: QuantState, npu: Npu) -> None:
    """Every shift limit that the recipe asks for holds with the final scales."""
    for breach in breaches(model.graph, state, npu) if npu.limits else ():
        raise VerifyError(
            f"The NPU's limit {breach.rule} does not hold.",
            where=f"node '{breach.node}'",
            observed=breach.value,
            expected=f"{breach.low} to {breach.high}",
            hint=_HINT,
        )


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


_EXACT_ENOUGH_DB = 60.0  # rounding in another order of operations stays above 90 dB; a wrong rewrite does not


_NOISE_MARGIN_DB = 10.0


@dataclass(frozen=True, slots=True)
class OutputReport:
    """One graph output over all verified samples."""

    name: str
    sqnr_db: float
    cosine: float
    worst: float
    same_top: float | None  # share of rows whose largest entry sits at the same place


def compare_outputs(
    session: ort.InferenceSession,
    inputs: Sequence[Sample],
    expected: Sequence[Sample],
    source: ModelSource | None = None,
    joints: Mapping[str, Joint] | None = None,
) -> tuple[OutputReport, ...]:
    """Run the quantized model on the kept samples and compare with the kept float outputs.

    Args:
        session: of the quantized model.
        inputs: the samples.
        expected: what the float model makes of them.
        source: the float model as given, to tell whose fault it is where a sample does not run.
        joints: outputs of which each part is compared by itself: boxes and scores, say.

    Raises:
        VerifyError: the quantized model does not run a sample.
        ModelError: nor does the float model, as it is written.
    """
    names = [out.name for out in session.get_outputs()]
    sums: dict[str, Closeness] = {}
    tops: dict[str, list[bool]] = {}
    for index, (sample, wanted) in enumerate(zip(inputs, expected, strict=True)):
        try:
            results = run_session(session, names, sample, index)
        except (DataError, ModelError) as error:
            if source is not None:
                _check_as_written(source, sample, index)
            raise VerifyError(
                "The quantized model does not run a sample that the float model runs.",
                where=error.where,
                observed=error.observed,
                hint="This is a defect of Roundel: please report it.",
            ) from error
        for name, result in results.items():
            if not comparable(wanted.get(name), result):
                continue
            for part, whole, other in paired_parts(name, wanted[name], result, joints or {}):
                sums[part] = sums.get(part, Closeness()).merge(Closeness.of(whole, other))
                tops.setdefault(part, []).extend(_same_top(whole, other))
    return tuple(
        OutputReport(name, s.sqnr_db, s.cosine, s.worst, _share(tops[name]))
        for name, s in sums.items()
        if s.count
    )


def check_prepared(source: ModelSource, inputs: Sample, outputs: Sample) -> str | None:
    """Prove on one sample that preparing changed no output.

    Args:
        source: the model as the user gave it.
        inputs: one sample.
        outputs: what the prepared model made of it.

    Returns:
        A note when the question cannot be decided (the model itself is not deterministic, or only its
        normalised form loads).

    Raises:
        DataError: the model as given does not run the sample.
        VerifyError: an output has changed.
    """
    try:
        session = _original(source)
    except ModelError as error:
        return f"the prepared graph could not be compared with the model as given: {error.observed}"
    types = {i.name: i.type for i in session.get_inputs()}
    feed = {
        name: array.astype(np.float16) if types[name] == "tensor(float16)" else array
        for name, array in inputs.items()
        if name in types
    }
    names = [out.name for out in session.get_outputs()]
    floor = (
        25.0 if "tensor(float16)" in {o.type for o in session.get_outputs()} | set(types.values()) else None
    )
    first = run_session(session, names, feed, 0)
    worst = _worst(first, outputs)
    if worst is None or worst[1] >= (floor or _EXACT_ENOUGH_DB):
        return None
    itself = _worst(first, run_session(session, names, _nudged(feed), 0))
    if itself is not None and worst[1] >= itself[1] - _NOISE_MARGIN_DB:
        return (
            f"the float model itself moves to {itself[1]:.0f} dB when its input changes by a millionth"
            f" (or on each run); preparing it moved it to {worst[1]:.0f} dB"
        )
    raise VerifyError(
        "Preparing the model changed an output.",
        where=f"output '{worst[0]}'",
        observed=f"{worst[1]:.1f} dB against the model as given",
        expected=f"at least {floor or _EXACT_ENOUGH_DB:.0f} dB",
        hint="This is a defect of Roundel: please report it. Passes can be switched off under `prepare:`.",
    )


def _check_as_written(source: ModelSource, sample: Sample, index: int) -> None:
    """A broken node can run by luck, where ONNX Runtime's optimizations fuse it away."""
    session = _original(source, optimise=False)
    names = {i.name for i in session.get_inputs()}
    feed = {name: array for name, array in sample.items() if name in names}
    try:
        run_session(session, [out.name for out in session.get_outputs()], feed, index)
    except (DataError, ModelError) as error:
        raise ModelError(
            "The float model runs only because ONNX Runtime's optimizations pass over a broken node.",
            where=error.where,
            observed=error.observed,
            hint="Export the model again, or run it with ORT_DISABLE_ALL to see which node is wrong.",
        ) from error


def _nudged(feed: Sample) -> Sample:
    """The sample with float values moved by about one part in a million: what rounding alone may do."""
    rng = np.random.default_rng(0)
    return {
        name: (array * (1 + 1e-6 * rng.standard_normal(array.shape))).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in feed.items()
    }


def _original(source: ModelSource, *, optimise: bool = True) -> ort.InferenceSession:
    if isinstance(source, ir.Model | bytes):
        return open_session(source, optimise=optimise)
    if hasattr(source, "SerializeToString"):
        return open_session(as_written(source), optimise=optimise)
    return open_session(Path(str(source)), optimise=optimise)


def _worst(a: Sample, b: Sample) -> tuple[str, float] | None:
    pairs = [
        (name, Closeness.of(a[name], b[name]).sqnr_db)
        for name in a
        if name in b and comparable(a[name], b[name])
    ]
    return min(pairs, key=lambda pair: pair[1]) if pairs else None


def _same_top(a: NDArray[Any], b: NDArray[Any]) -> list[bool]:
    """Rows of class scores: does the winner stay?"""
    if a.ndim != 2 or a.shape[1] < 2:
        return []
    return [bool(x) for x in a.argmax(1) == b.argmax(1)]


def _share(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


_FAR_DB = 12.0  # errors are then a quarter as large as the values themselves


def advice(reports: Sequence[OutputReport], recipe: Recipe) -> tuple[str, ...]:
    """A note with the next commands to try, where an output is far off; otherwise none."""
    far = [report for report in reports if report.sqnr_db < _FAR_DB]
    if not far or recipe.mode != "static":
        return ()
    worst = min(far, key=lambda report: report.sqnr_db)
    more = "effort fast often mends it; " if recipe.effort == "none" else ""
    return (
        f"output '{worst.name}' is far from the float model ({worst.sqnr_db:.1f} dB): {more}'roundel "
        "sensitivity' names the nodes to leave in float, 'roundel auto' tries finer formats",
    )
