"""What a comparison of a float model with its quantized form says: plain frozen values, made for reports.

Where equalization has rescaled channels, the float values are rescaled alike before they are compared, so
that ranges, histograms and errors are those that the quantizer deals with. Sums run over all samples: figures
do not depend on how the data was cut into batches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from roundel.plain import Card, counted, csv_text, decibel, from_plain, to_plain
from roundel.qdq.read import StoredTensor
from roundel.report.verdict import Verdict
from roundel.types import Array

COMPARISON_VERSION = 1

Place = Literal["input", "inside", "output"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far values are from their float reference.

    Attributes:
        sqnr_db: signal over noise in dB; infinite when equal.
        cosine: of the angle between the two.
        mse: mean squared error.
        worst: largest absolute error.
    """

    sqnr_db: float
    cosine: float
    mse: float
    worst: float


@dataclass(frozen=True, slots=True)
class TensorStorage:
    """How a tensor is stored.

    Attributes:
        dtype: element type of the codes: int8, uint16, bfloat16 …
        low: smallest value that has a code (of the widest channel, where there are several scales).
        high: largest such value.
        scale: the step; of the widest channel, where there are several.
        scales: how many scales: 1 per tensor, more per channel.
        axis: of the channels with scales of their own, None per tensor.
    """

    dtype: str
    low: float
    high: float
    scale: float
    scales: int = 1
    axis: int | None = None

    @property
    def one_range(self) -> bool:
        """Whether the tensor has one finite range."""
        return self.scales == 1 and self.scale > 0

    def beyond(self, array: Array, low: float, high: float) -> int:
        """How many values, from `low` to `high`, lie more than half a step outside the range."""
        first, last = self.low - self.scale / 2, self.high + self.scale / 2
        if low >= first and high <= last:
            return 0
        return int(np.count_nonzero(array < first) + np.count_nonzero(array > last))


@dataclass(frozen=True, slots=True)
class CoarseHistogram:
    """Counts of float values in bins of equal width: of large tensors, of values evenly apart.

    Attributes:
        low: left edge of the first bin.
        high: right edge of the last bin.
        counts: values in each bin.
    """

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChannelError:
    """One of the channels that lose most.

    Attributes:
        channel: its index.
        sqnr_db: of this channel alone.
        share: its part of the tensor's whole error power, 0 to 1.
    """

    channel: int
    sqnr_db: float
    share: float


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor that flows through both models, over all samples.

    The *layer* of a tensor is what computes it from the tensors in `sources`. Three differences tell where
    an error comes from: `total` is what the next layer reads; `introduced` is what remains of it when the
    layer's quantized computation reads float inputs; `inherited` is what quantized inputs add to that. They
    are differences of the same arrays: total error = introduced error + inherited error, value by value.

    Attributes:
        name: in the float model.
        quantized_name: in the quantized model, before its quantizer.
        place: graph input, graph output, or inside.
        node: name of the main node of its layer in the float model ("" for an input).
        op: that node's operator ("Input" for an input).
        nodes: all nodes of its layer, by their names in the quantized model, without Q/DQ.
        sources: names of the compared tensors that the layer reads.
        weights: names of the compared weights of the layer.
        shape: of the first sample.
        storage: how it is stored, None where it stays float.
        total: error of the tensor as the next layer reads it.
        introduced: error that the layer makes on float inputs; None where it cannot be told apart.
        inherited: what the errors of its inputs become; None likewise.
        rounding: error of storing the float values alone (rounding and saturation); None where it stays
            float. What `introduced` has beyond it comes from the layer's weights and arithmetic.
        saturated: share of float values that the range cuts off, 0 to 1.
        range_use: share of the stored range that the float values span, 0 to 1.
        float_low: smallest float value.
        float_high: largest float value.
        channel_axis: of `worst_channels`, None where the tensor has no channels.
        worst_channels: the channels with most of the introduced error (of the total, where that is unknown).
        histogram: of the float values; its range is [float_low, float_high].
        rescaled: whether equalization has given its channels factors, which the float values then have, too.
        effect: SQNR at the outputs in dB, were the error that this layer introduces the only one; None where
            it was not measured: of layers that cost little.
    """

    name: str
    quantized_name: str
    place: Place
    node: str
    op: str
    nodes: tuple[str, ...]
    sources: tuple[str, ...]
    weights: tuple[str, ...]
    shape: tuple[int, ...]
    storage: TensorStorage | None
    total: Difference
    introduced: Difference | None
    inherited: Difference | None
    rounding: Difference | None
    saturated: float | None
    range_use: float | None
    float_low: float
    float_high: float
    channel_axis: int | None
    worst_channels: tuple[ChannelError, ...]
    histogram: CoarseHistogram
    rescaled: bool = False
    effect: float | None = None


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """One weight or bias.

    Attributes:
        name: in the quantized model, without a `_quantized` suffix.
        float_name: in the float model (after batch norms were folded).
        node: name of the node that reads it, in the float model.
        op: that node's operator.
        role: which operand it is.
        shape: of the weight.
        storage: how it is stored, None where it stays float.
        error: stored against float values; where equalization rescaled the layer, against the rescaled ones.
        saturated: share of values that the range cuts off, 0 to 1.
        channel_axis: of the ranges below.
        float_ranges: (low, high) of each output channel in the float model.
        stored_ranges: (low, high) of each output channel as stored, after equalization and fine-tuning.
        worst_channels: the output channels with most of the error.
        rescaled: whether equalization has rescaled rows or columns.
    """

    name: str
    float_name: str
    node: str
    op: str
    role: Literal["weight", "bias", "constant"]
    shape: tuple[int, ...]
    storage: TensorStorage | None
    error: Difference
    saturated: float | None
    channel_axis: int | None
    float_ranges: tuple[tuple[float, float], ...]
    stored_ranges: tuple[tuple[float, float], ...]
    worst_channels: tuple[ChannelError, ...]
    rescaled: bool = False


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One graph output.

    Attributes:
        name: in the float model.
        difference: over all samples.
        same_top: share of rows whose largest entry sits at the same place; None where rows are not classes.
    """

    name: str
    difference: Difference
    same_top: float | None


@dataclass(frozen=True, slots=True, repr=False)
class ModelScore(Card):
    """One model.

    Attributes:
        model: file name.
        file_bytes: its size, None for a model in memory.
        rows: how many rows were judged.
        top1: share of rows whose largest score is the label's; None without labels.
        top5: share of rows whose label is among the five largest scores; None without labels, or with no more
            than five classes.
        agreement: share of rows with the same largest score as the first model; None for the first.
        sqnr_db: the first output against the first model's; None for the first.
        cosine: likewise.
        metric: what the user's metric says, by name; or mAP and the F1 of boxes.
        seconds: inside the model.
        notes: what a careful reader wants to know, such as data unlike that of the calibration.
        margin: half of the interval that holds, with 95 %, what top1 loses or wins against the first model,
            were there no end of such data; None for the first, and without labels.
    """

    model: str
    file_bytes: int | None
    rows: int
    top1: float | None
    top5: float | None
    agreement: float | None
    sqnr_db: float | None
    cosine: float | None
    metric: Mapping[str, float]
    seconds: float
    notes: tuple[str, ...] = ()
    margin: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(to_plain(self))

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        shares = {"top1": self.top1, "top5": self.top5, "agreement": self.agreement}
        scores = [f"{name} {value:.2%}" for name, value in shares.items() if value is not None]
        scores += [f"{name} {value:.6g}" for name, value in self.metric.items()]
        return {
            "model": f"{self.model}, {counted(self.rows, 'row')}",
            "scores": ", ".join(scores) or "none",
            "output": decibel(self.sqnr_db),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Card):
    """A float model and its quantized form, tensor by tensor.

    Attributes:
        float_model: file name.
        quantized_model: file name.
        float_bytes: file size, None for a model in memory.
        quantized_bytes: likewise.
        samples: how many runs of both models.
        data: what the samples were.
        outputs: the graph outputs.
        tensors: in the order of execution.
        weights: in the order of execution.
        unmatched: computed float tensors of the quantized model without a partner, with the reason.
        seconds: `load` and `total` are wall time; `float` (the float model), `quantized` (the quantized model
            and each of its layers once more) and `figures` are added up over samples that ran side by side.
        notes: whatever a careful reader wants to know.
        scores: both models on labelled data, where these were given.
        verdict: is it accurate, will it run on the NPU, what next.
    """

    float_model: str
    quantized_model: str
    float_bytes: int | None
    quantized_bytes: int | None
    samples: int
    data: Mapping[str, Any]
    outputs: tuple[OutputComparison, ...]
    tensors: tuple[TensorComparison, ...]
    weights: tuple[WeightComparison, ...]
    unmatched: Mapping[str, str]
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    version: int = field(default=COMPARISON_VERSION)
    scores: tuple[ModelScore, ...] = ()
    verdict: Verdict | None = None

    def tensor(self, name: str) -> TensorComparison:
        """The tensor of that name in the float model.

        Raises:
            KeyError: it was not compared.
        """
        return {item.name: item for item in reversed(self.tensors)}[name]

    def by_introduced(self) -> tuple[TensorComparison, ...]:
        """The tensors whose layers introduce an error, the worst (lowest SQNR) first."""
        known = [(t.introduced.sqnr_db, t) for t in self.tensors if t.introduced is not None]
        return tuple(tensor for _, tensor in sorted(known, key=lambda pair: pair[0]))

    def by_effect(self) -> tuple[TensorComparison, ...]:
        """The tensors whose layers cost the outputs most, the worst (lowest SQNR there) first."""
        known = [(t.effect, t) for t in self.tensors if t.effect is not None]
        return tuple(tensor for _, tensor in sorted(known, key=lambda pair: pair[0]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinite numbers become strings, since JSON has none."""
        return dict(to_plain(self))

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> Comparison:
        """The comparison that `to_dict` was called on."""
        return from_plain(Comparison, tree)

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        worst = (self.by_effect() or self.by_introduced())[:1]
        return {
            "models": f"{self.float_model} and {self.quantized_model}, {counted(self.samples, 'sample')}",
            "outputs": ", ".join(f"{o.name} {decibel(o.difference.sqnr_db)}" for o in self.outputs),
            "compared": f"{counted(len(self.tensors), 'tensor')}, {counted(len(self.weights), 'weight')}",
            "worst layer": ", ".join(f"{t.name} ({t.op})" for t in worst) or "none",
        }


def describe(stored: StoredTensor | None) -> TensorStorage | None:
    """The range and step of a stored tensor; of its widest channel, where each channel has a scale."""
    if stored is None:
        return None
    integers = re.fullmatch(r"(u?)int(\d+)", stored.dtype)
    if integers is None:
        return TensorStorage(stored.dtype, -np.inf, np.inf, 0.0)
    first = 0 if integers[1] else -(2 ** (int(integers[2]) - 1))
    scale, zero = stored.scale.reshape(-1), stored.zero_point.astype(np.float64).reshape(-1)
    widest = int(scale.argmax())
    shift, step = float(zero[widest if zero.size > 1 else 0]), float(scale[widest])
    low, high = ((code - shift) * step for code in (first, first + 2 ** int(integers[2]) - 1))
    return TensorStorage(stored.dtype, low, high, step, int(scale.size), stored.axis)


def to_csv(comparison: Comparison) -> str:
    """One line for each tensor and weight, after a heading."""
    return csv_text([*map(_row, comparison.tensors), *map(_row, comparison.weights)])


def _row(item: TensorComparison | WeightComparison) -> dict[str, object]:
    storage = item.storage
    if isinstance(item, TensorComparison):
        error, ends = item.total, (item.float_low, item.float_high)
    else:
        lows, highs = zip(*item.float_ranges, strict=True)
        error, ends = item.error, (min(lows), max(highs))
    parts = {name: getattr(item, name, None) for name in ("introduced", "inherited", "rounding")}
    return {
        "kind": item.place if isinstance(item, TensorComparison) else item.role,
        **{name: getattr(item, name) for name in ("name", "node", "op")},
        "stored_as": storage.dtype if storage else "float",
        **{name: getattr(error, name) for name in ("sqnr_db", "cosine", "mse")},
        "worst_error": error.worst,
        **{f"{name}_sqnr_db": part and part.sqnr_db for name, part in parts.items()},
        "saturated": item.saturated,
        "range_use": getattr(item, "range_use", None),
        "float_low": ends[0],
        "float_high": ends[1],
        "stored_low": storage and storage.low,
        "stored_high": storage and storage.high,
        "worst_channels": " ".join(str(c.channel) for c in item.worst_channels),
    }
