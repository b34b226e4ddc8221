"""Whether the values are those that the model was made for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.data.lint import DataFinding, Profile, colour_axis
from roundel.model.graph import constant_array, only_reader, op_key
from roundel.types import Array, Doubles

_PIXEL_SCALE = 1 / 50  # a model that makes its input this much smaller takes pixels 0..255
_FEWEST = 8
_WIDER = 1.8
_CARRIERS = frozenset({"Cast", "Transpose", "Identity", "Reshape"})


class Form(enum.Enum):
    """How pixels were scaled, as far as their values show it."""

    UNIT = "0..1"
    SIGNED = "-1..1"
    RAW = "0..255"
    STANDARD = "mean 0, standard deviation about 1"
    OTHER = "something else"


def form_of(profile: Profile) -> Form:
    """What the values look like."""
    low, high = profile.low, profile.high
    if low >= -0.01 and high <= 1.01:
        return Form.UNIT
    if -1.05 <= low < -0.5 and high <= 1.05:
        return Form.SIGNED
    if low >= -0.01 and 20 < high <= 255.5:
        return Form.RAW
    if -4 < low < -0.5 and 0.5 < high < 4:
        return Form.STANDARD
    return Form.OTHER


def _own_factor(graph: ir.Graph, name: str) -> float | None:
    """What a model multiplies its input by before anything else; None where nothing scales or shifts it."""
    value = next((v for v in graph.inputs if v.name == name), None)
    factor, found = 1.0, False
    while value is not None and (node := only_reader(value)) is not None:
        if op_key(node) not in _CARRIERS:
            step = _affine(node, value)
            if step is None:
                break
            factor, found = factor * step, True
        value = node.outputs[0]
    return factor if found else None


def _affine(node: ir.Node, value: ir.Value) -> float | None:
    """The factor of an addition or a product with a constant; None for any other node."""
    if op_key(node) not in ("Add", "Sub", "Mul", "Div") or len(node.inputs) != 2:
        return None
    first = node.inputs[0] is value
    constant = constant_array(node.inputs[1 if first else 0])
    if constant is None or constant.dtype.kind != "f" or not constant.size or constant.size > 4:
        return None
    number = float(np.mean(constant))
    if op_key(node) in ("Add", "Mul"):
        return 1.0 if op_key(node) == "Add" else number
    if op_key(node) == "Sub":
        return 1.0 if first else -1.0
    return 1 / number if first and number else None


def scaling_findings(graph: ir.Graph, profiles: Mapping[str, Profile]) -> Iterator[DataFinding]:
    """Data that was scaled although the model scales its input itself, or was not although it should be."""
    for name, profile in profiles.items():
        factor = _own_factor(graph, name)
        if factor is None:
            continue
        seen, form = f"values from {profile.low:.3g} to {profile.high:.3g}", form_of(profile)
        if abs(factor) <= _PIXEL_SCALE and max(abs(profile.low), abs(profile.high)) <= 4:  # it takes pixels
            yield DataFinding(
                "scaled-twice",
                f"The model divides input '{name}' by {1 / abs(factor):.0f} itself, and the data has {seen}.",
                "Feed pixels 0..255 (--scale raw), without mean and std.",
            )
        elif abs(factor) > 1 and form is Form.RAW:
            yield DataFinding(
                "not-scaled",
                f"The model normalises input '{name}' as if it lay in 0..1, and the data has {seen}.",
                "Divide the pixels by 255 (--scale unit).",
            )
        elif abs(factor) > 1 and form in (Form.SIGNED, Form.STANDARD):
            yield DataFinding(
                "scaled-twice",
                f"The model normalises input '{name}' itself, and the data has {seen}: it seems to be"
                " normalised already.",
                "Leave out mean and std.",
            )


@dataclass(frozen=True, slots=True, eq=False)
class FirstNorm:
    """The batch norm behind the first layer: it remembers what that layer gave in training.

    On data as in training, its output has this mean and standard deviation in each channel.

    Attributes:
        input: the graph input before it.
        tensor: its output, which a layer that it is folded into takes over.
        mean: of each channel.
        std: likewise.
    """

    input: str
    tensor: str
    mean: Doubles
    std: Doubles


def first_norms(graph: ir.Graph) -> tuple[FirstNorm, ...]:
    """The first batch norm behind each input, with one Conv before it."""
    found = [_first_norm(value) for value in graph.inputs]
    return tuple(norm for norm in found if norm is not None)


def _first_norm(start: ir.Value) -> FirstNorm | None:
    value, layers = start, 0
    while (node := only_reader(value)) is not None:
        if op_key(node) == "BatchNormalization" and layers == 1:
            gamma, beta = constant_array(node.inputs[1]), constant_array(node.inputs[2])
            if gamma is None or beta is None:
                return None
            mean, std = beta.astype(np.float64), np.abs(gamma.astype(np.float64))
            return FirstNorm(str(start.name), str(node.outputs[0].name), mean, std)
        if op_key(node) == "Conv" and layers == 0:
            layers = 1
        elif op_key(node) not in _CARRIERS and _affine(node, value) is None:
            return None
        value = node.outputs[0]
    return None


def norm_finding(norm: FirstNorm, arrays: Sequence[Array]) -> DataFinding | None:
    """Whether the first layer gives on this data about what it gave in training.

    Args:
        norm: what its batch norm gave in training.
        arrays: what it gives for some samples, channels second.
    """
    if len(arrays) < _FEWEST or any(a.ndim < 3 or a.shape[1] != norm.mean.size for a in arrays):
        return None
    values = np.concatenate([np.moveaxis(a, 1, 0).reshape(a.shape[1], -1) for a in arrays], axis=1)
    mean, std = values.mean(axis=1, dtype=np.float64), values.std(axis=1, dtype=np.float64)
    live = norm.std > 0.05 * norm.std.max()  # channels that died in training say nothing
    spread = float(np.median(std[live] / norm.std[live]))
    shift = float(np.median(np.abs(mean[live] - norm.mean[live]) / norm.std[live]))
    if 1 / _WIDER <= spread <= _WIDER and shift <= 1:
        return None
    return DataFinding(
        "not-as-in-training",
        f"Behind the first layer, input '{norm.input}' spreads {spread:.2g} times as wide as in training and"
        f" lies {shift:.1f} standard deviations off: it is not normalised as it was then.",
        "Set mean, std and scale (or resize and crop) as in training.",
    )


Answer = Callable[[Array], Array]
Change = Callable[[Array], Array]

_FIRST_LOOK = 16  # samples; only a reading that seems better then is tried on all
_CLEARLY = 0.08  # nats
_STANDARD_ERRORS = 2.5
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_STD = np.array([0.229, 0.224, 0.225], np.float32)


def alternative_findings(
    name: str,
    samples: Sequence[Array],
    scores: Sequence[Array],
    profile: Profile,
    answer: Answer,
) -> Iterator[DataFinding]:
    """Other readings of the pixels that the model prefers.

    Args:
        name: of the input.
        samples: some samples of it.
        scores: the model's class scores for each, (rows, classes).
        profile: of all samples.
        answer: gives the model's class scores for another sample.
    """
    if len(samples) < _FEWEST or colour_axis(samples[0].shape) is None:
        return
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
    if findings:
        _, what, hint = max(findings)
        yield DataFinding(
            "another-reading",
            f"The model is surer of its answers, and tells samples better apart, with input '{name}' {what}.",
            hint,
        )


def _gain(before: Sequence[Array], after: Sequence[Array]) -> Doubles:
    """How much surer each answer has become."""
    return certainty(np.concatenate(after)) - certainty(np.concatenate(before))


def certainty(scores: Array) -> Doubles:
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

    # There and back, by way of 0..1.
    ways: dict[Form, tuple[Change, Change]] = {
        Form.UNIT: (lambda a: a, lambda a: a),
        Form.SIGNED: (lambda a: (a + 1) / 2, lambda a: a * 2 - 1),
        Form.RAW: (lambda a: a / 255, lambda a: a * 255),
        Form.STANDARD: (lambda a: a * std + mean, lambda a: (a - mean) / std),
    }
    return lambda array: np.asarray(ways[target][1](ways[form][0](array)), array.dtype)
