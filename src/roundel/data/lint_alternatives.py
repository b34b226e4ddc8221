"""Whether the model would understand the data better if it were scaled, or its colours ordered, otherwise.

A classifier that understands its inputs is sure of each, and not of the same class each time. Both together
are the mean divergence of each answer from the average answer. Where another reading of the same pixels
raises it clearly, the reading at hand is suspect. That is a hint, not a proof, and needs no labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.data.lint import Finding, Profile, colour_axis
from roundel.data.lint_values import Form, form_of

Answer = Callable[[NDArray[Any]], NDArray[Any]]
Change = Callable[[NDArray[Any]], NDArray[Any]]

_FEWEST = 8
_FIRST_LOOK = 16  # samples; only a reading that seems better then is tried on all
_CLEARLY = 0.08  # nats
_STANDARD_ERRORS = 2.5
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_STD = np.array([0.229, 0.224, 0.225], np.float32)


def alternative_findings(
    name: str,
    samples: Sequence[NDArray[Any]],
    scores: Sequence[NDArray[Any]],
    profile: Profile,
    answer: Answer,
) -> list[Finding]:
    """Other readings of the pixels that the model prefers.

    Args:
        name: of the input.
        samples: some samples of it.
        scores: the model's class scores for each, (rows, classes).
        profile: of all samples.
        answer: gives the model's class scores for another sample.
    """
    if len(samples) < _FEWEST or colour_axis(samples[0].shape) is None:
        return []
    findings = []
    for what, hint, change in _readings(samples[0].shape, form_of(profile)):
        other = [answer(change(sample)) for sample in samples[:_FIRST_LOOK]]
        gain = _gain(scores[:_FIRST_LOOK], other)
        if gain.mean() > 0 and len(samples) > _FIRST_LOOK:
            other += [answer(change(sample)) for sample in samples[_FIRST_LOOK:]]
            gain = _gain(scores, other)
        error = float(gain.std(ddof=1)) / np.sqrt(len(gain))
        if np.isfinite(gain).all() and float(gain.mean()) > max(_CLEARLY, _STANDARD_ERRORS * error):
            findings.append((float(gain.mean()), what, hint))
    if not findings:
        return []
    _, what, hint = max(findings)
    return [
        Finding(
            "another-reading",
            "warning",
            f"The model is surer of its answers, and tells samples better apart, with input '{name}' {what}.",
            hint,
        )
    ]


def _gain(before: Sequence[NDArray[Any]], after: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """How much surer each answer has become."""
    return certainty(np.concatenate(after)) - certainty(np.concatenate(before))


def certainty(scores: NDArray[Any]) -> NDArray[np.float64]:
    """How far each answer is from the average answer, in nats (Kullback-Leibler)."""
    logits = scores.astype(np.float64)
    if (logits >= 0).all() and np.allclose(logits.sum(axis=1), 1, atol=1e-3):
        chances = logits
    else:
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
    average = chances.mean(axis=0)
    ratio = np.log(np.maximum(chances, 1e-12)) - np.log(np.maximum(average, 1e-12))
    return np.asarray((chances * ratio).sum(axis=1))


def _readings(shape: Sequence[int], form: Form) -> list[tuple[str, str, Change]]:
    """(what it would be, what to do, how to get there) for each other way to read the pixels."""
    axis = colour_axis(shape)
    found: list[tuple[str, str, Change]] = []
    if axis is None:
        return found
    if shape[axis] == 3:
        hint = "Check the order of the colours: RGB or BGR (--bgr)."
        found.append(("read with red and blue swapped", hint, lambda a: np.flip(a, axis).copy()))
    if form is Form.OTHER or (form is Form.STANDARD and shape[axis] != 3):
        return found
    hints = {
        Form.UNIT: "Divide pixels by 255 and leave mean and std out, if training did so.",
        Form.SIGNED: "Use mean 0.5 and std 0.5 on 0..1, if training did so.",
        Form.RAW: "Feed pixels 0..255 (--scale raw), if training did so.",
        Form.STANDARD: "Set mean and std as in training (ImageNet: 0.485,0.456,0.406 and 0.229,0.224,0.225).",
    }
    targets = (
        (Form.UNIT, Form.SIGNED, Form.RAW, Form.STANDARD) if shape[axis] == 3 else (Form.UNIT, Form.SIGNED)
    )
    for target in targets:
        if target is not form:
            what = f"scaled to {target.value}"
            found.append((what, hints[target], _converter(form, target, axis)))
    return found


def _converter(form: Form, target: Form, axis: int) -> Change:
    shape = [1, 1, 1, 1]
    shape[axis] = 3
    mean, std = _MEAN.reshape(shape), _STD.reshape(shape)

    def convert(array: NDArray[Any]) -> NDArray[Any]:
        unit = array
        if form is Form.SIGNED:
            unit = (array + 1) / 2
        elif form is Form.RAW:
            unit = array / 255
        elif form is Form.STANDARD:
            unit = array * std + mean
        if target is Form.SIGNED:
            unit = unit * 2 - 1
        elif target is Form.RAW:
            unit = unit * 255
        elif target is Form.STANDARD:
            unit = (unit - mean) / std
        return np.asarray(unit, array.dtype)

    return convert
