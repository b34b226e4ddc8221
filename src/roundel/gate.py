"""Whether a written model computes what the float model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.calibrate.runner import run_session
from roundel.errors import DataError, ModelError, VerifyError
from roundel.model.load import as_written
from roundel.model.session import ONE_LANE, Lanes, open_session
from roundel.model.structure import ModelSource
from roundel.numerics.metrics import Closeness, comparable
from roundel.plan.float_parts import Joint, paired_parts
from roundel.recipe.settings import Recipe
from roundel.types import Sample

_EXACT_ENOUGH_DB = 60.0  # rounding in another order of operations stays above 90 dB; a wrong rewrite does not
_HALF_ENOUGH_DB = 25.0  # where inputs or outputs have 16 bits
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
    fixed: Mapping[str, NDArray[Any]] | None = None,
    lanes: Lanes = ONE_LANE,
) -> tuple[OutputReport, ...]:
    """Run the quantized model on the kept samples and compare with the kept float outputs.

    Args:
        session: of the quantized model.
        inputs: the samples.
        expected: what the float model makes of them.
        source: the float model as given, to tell whose fault it is where a sample does not run.
        joints: outputs of which each part is compared by itself: boxes and scores, say.
        fixed: what the float model as given takes besides.
        lanes: of the session.

    Raises:
        VerifyError: the quantized model does not run a sample.
        ModelError: nor does the float model, as it is written.
    """
    names = [out.name for out in session.get_outputs()]
    sums: dict[str, Closeness] = {}
    tops: dict[str, list[bool]] = {}

    def one(numbered: tuple[int, Sample]) -> Sample:
        index, sample = numbered
        try:
            return run_session(session, names, sample, index)
        except (DataError, ModelError) as error:
            if source is not None:
                _check_as_written(source, {**sample, **(fixed or {})}, index)
            raise VerifyError(
                "The quantized model does not run a sample that the float model runs.",
                where=error.where,
                observed=error.observed,
                hint="This is a defect of Roundel: please report it.",
            ) from error

    for results, wanted in zip(lanes.each(one, enumerate(inputs)), expected, strict=True):
        for name, result in results.items():
            if not comparable(wanted.get(name), result):
                continue
            for part, whole, other in paired_parts(name, wanted[name], result, joints or {}):
                sums[part] = sums.get(part, Closeness()).merge(Closeness.of(whole, other))
                tops.setdefault(part, []).extend(_same_top(whole, other))
    return tuple(
        OutputReport(name, s.sqnr_db, s.cosine, s.worst, fmean(tops[name]) if tops[name] else None)
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
    half = "tensor(float16)" in {*types.values(), *(out.type for out in session.get_outputs())}
    floor = _HALF_ENOUGH_DB if half else _EXACT_ENOUGH_DB
    first = run_session(session, names, feed, 0)
    worst = _worst(first, outputs)
    if worst is None or worst[1] >= floor:
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
        expected=f"at least {floor:.0f} dB",
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
    if hasattr(source, "SerializeToString"):
        source = as_written(source)
    model = source if isinstance(source, ir.Model | bytes) else Path(str(source))
    return open_session(model, threads=1, optimise=optimise)


def _worst(a: Sample, b: Sample) -> tuple[str, float] | None:
    found = {n: Closeness.of(a[n], b[n]).sqnr_db for n in a if n in b and comparable(a[n], b[n])}
    return min(found.items(), key=lambda pair: pair[1], default=None)


def _same_top(a: NDArray[Any], b: NDArray[Any]) -> list[bool]:
    """Rows of class scores: does the winner stay?"""
    return (a.argmax(1) == b.argmax(1)).tolist() if a.ndim == 2 and a.shape[1] > 1 else []


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
