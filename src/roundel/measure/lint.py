"""Calibration lint: what is odd about data, seen from the model it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir

from roundel.calibrate.collect import collect
from roundel.calibrate.masks import mask_inputs
from roundel.calibrate.observers import StatKind
from roundel.data import lint, lint_values
from roundel.measure.reference import cut_to
from roundel.measure.scores import class_scores
from roundel.model.graph import input_specs, is_constant, is_float32, iter_values, values_by_name
from roundel.model.session import open_session
from roundel.model.structure import ModelSource
from roundel.options import DataWords, data_settings, takes_data_words
from roundel.plain import from_plain, to_plain
from roundel.recipe.settings import Data, Recipe
from roundel.stages import open_data, prepare
from roundel.types import Array, Listener, Sample, heard_by

_LOOKED_AT = 16  # samples that run through the first layer once more
_KEPT = 64  # samples that may be read in other ways


@dataclass(frozen=True, slots=True)
class DataReport:
    """What the lint says.

    Attributes:
        findings: what is odd, warnings first.
        samples: how many were looked at.
        profiles: the values of each float input.
        data: what the samples were.
    """

    findings: tuple[lint.DataFinding, ...]
    samples: int
    profiles: Mapping[str, lint.Profile]
    data: Mapping[str, Any]

    @property
    def clean(self) -> bool:
        """Whether there is no warning."""
        return all(finding.level != "warning" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "samples": self.samples,
            "findings": to_plain(self.findings),
            "inputs": {name: profile.to_dict() for name, profile in self.profiles.items()},
            "data": dict(self.data),
        }


@takes_data_words
def lint_data(
    model: ModelSource,
    data: object,
    *,
    options: Data | None = None,
    against: object = None,
    against_options: Data | None = None,
    listener: Listener | None = None,
    **words: Unpack[DataWords],
) -> DataReport:
    """Look for what would spoil a calibration: odd samples, wrong scaling or colours, too few samples.

    Args:
        model: the float model.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `letterbox`.
        options: the words of the data as one object.
        against: other data that should look the same (evaluation data).
        against_options: how those become samples; as for `data` when not given.
        listener: told about progress.

    Raises:
        RoundelError: the model or the data cannot be read.
    """
    settings = data_settings(options, words)
    with heard_by(listener) as told:
        told.step("load")
        ready = prepare(model, Recipe())
        samples = open_data(ready.model, settings, data)
        watch = lint.SampleWatch()
        told.step("look", samples.count)
        wanted = {
            str(value.name): StatKind.MINMAX
            for value in iter_values(ready.model.graph)
            if is_float32(value) and not is_constant(value)
        }
        seen = collect(ready.model, wanted, watch.watch(samples), keep=_KEPT, progress=told.advance)
        ends = {name: (observer.lows, observer.highs) for name, observer in seen.stats.items()}
        findings = [*watch.findings(), *lint.range_findings(ends)]
        findings += model_findings(ready.model, ready.norms, seen.inputs, watch.profiles)
        findings += _readings(ready.model, seen.inputs, seen.outputs, watch.profiles)
        if against is not None:
            told.step("look at the other data")
            other = open_data(ready.model, against_options or settings, against)
            second = lint.SampleWatch()
            for sample in other:
                second.look(sample)
            findings += lint.difference_findings(watch.profiles, second.profiles, "other data")
            ours, theirs = (said.description.get("preprocessing") for said in (samples, other))
            differing = lint.preprocessing_finding(ours, theirs, "other data")
            findings += [] if differing is None else [differing]
    ranked = sorted(findings, key=lambda finding: finding.level != "warning")
    return DataReport(tuple(ranked), seen.samples_seen, watch.profiles, samples.description)


def quantize_findings(
    model: ir.Model,
    norms: Sequence[lint_values.FirstNorm],
    samples: tuple[Sequence[Sample], Sequence[Sample]],
    facts: Mapping[str, Any],
) -> list[lint.DataFinding]:
    """The part of the lint that a quantization run can afford.

    The model is asked for other readings of the pixels only where nobody has said how to read them, or where
    they look unscaled.

    Args:
        model: prepared, as the data was run through it.
        norms: of the model before it was prepared.
        samples: a few samples, and the model's outputs for them.
        facts: what the record says about the data.
    """
    if facts.get("random"):
        return []
    profiles = {name: from_plain(lint.Profile, tree) for name, tree in facts.get("inputs", {}).items()}
    inputs, outputs = samples
    findings = model_findings(model, norms, inputs, profiles)
    unscaled = any(lint_values.form_of(profile) is lint_values.Form.RAW for profile in profiles.values())
    if facts.get("preprocessing_chosen_by") or unscaled:
        findings += _readings(model, inputs, outputs, profiles)
    return findings


def model_findings(
    model: ir.Model,
    norms: Sequence[lint_values.FirstNorm],
    inputs: Sequence[Sample],
    profiles: Mapping[str, lint.Profile],
) -> list[lint.DataFinding]:
    """What the model's own first nodes say about the data."""
    findings = [*lint_values.scaling_findings(model.graph, profiles), *mask_findings(model.graph, inputs)]
    values = values_by_name(model.graph)
    for norm in norms:
        if norm.tensor not in values or not inputs:
            continue
        session = open_session(cut_to(model, [norm.tensor]))
        arrays = [session.run([norm.tensor], sample)[0] for sample in inputs[:_LOOKED_AT]]
        found = lint_values.norm_finding(norm, arrays)
        findings += [] if found is None else [found]
    return findings


def mask_findings(graph: ir.Graph, inputs: Sequence[Sample]) -> Iterator[lint.DataFinding]:
    """Inputs that say what attention must not see, and that say the same throughout."""
    for name in mask_inputs(graph):
        arrays = [np.asarray(sample[name]) for sample in inputs if name in sample]
        values = {value for array in arrays for value in np.unique(array).tolist()}
        if len(values) == 1:
            yield lint.DataFinding(
                "mask-never-varies",
                f"Input '{name}', an attention mask, holds {values.pop()}"
                f" in all {len(arrays)} samples looked at: what it hides in padded batches was never seen.",
                "Calibrate on padded batches, too; hidden places got a range that should be safe.",
            )


def _readings(
    model: ir.Model, inputs: Sequence[Sample], outputs: Sequence[Sample], profiles: Mapping[str, lint.Profile]
) -> list[lint.DataFinding]:
    """Other readings of the pixels, for a model with one input and class scores as its first output."""
    specs, name = input_specs(model), str(model.graph.outputs[0].name)
    if len(specs) != 1 or specs[0].name not in profiles:
        return []
    key = specs[0].name
    given = [class_scores(out[name]) for out in outputs[:_KEPT] if name in out]
    known = [scores for scores in given if scores is not None]
    if not known or len(known) != len(inputs[:_KEPT]):
        return []
    session = open_session(model)

    def answer(array: Array) -> Array:
        scores = class_scores(session.run([name], {key: array})[0])
        assert scores is not None
        return scores

    arrays = [sample[key] for sample in inputs[:_KEPT]]
    return list(lint_values.alternative_findings(key, arrays, known, profiles[key], answer))
