"""What a run knows: one frozen value that every stage and every step takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.data.lint_values import FirstNorm
from roundel.model import LoadedModel
from roundel.plan.types import QuantPlan
from roundel.recipe.settings import Recipe
from roundel.types import Array, Listener, QParams, Sample, Silent
from roundel.work.executors import Work

if TYPE_CHECKING:
    from roundel.calibrate.observers import Observer
    from roundel.numerics.packed import Packed

FEWEST = 4  # samples: with fewer, nothing is left to judge by
_SHARE = 0.2
NUMBERS = ("plan", "params", "float_scales", "values", "codes", "reads")


@dataclass(frozen=True, slots=True)
class Context:
    """What surrounds a run and decides no number in its result: who listens, and where the work is done.

    Attributes:
        told: hears about progress.
        work: executor and checkpoints.
        kept: what a step leaves for the next one because it takes long to make.
    """

    told: Listener = field(default_factory=Silent)
    work: Work = field(default_factory=lambda: Work(None, None))
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What became of one layer.

    Attributes:
        layer: the node, or the tensor where a step works on those.
        op: its operator.
        before_db, after_db: the layer's own signal over its held-out error, in dB; equal where not kept.
        kept: whether the error fell, so that the new constants stay.
        seconds: what it cost.
        iterations: steps that fine-tuning took; None elsewhere.
    """

    layer: str
    op: str
    before_db: float
    after_db: float
    kept: bool
    seconds: float
    iterations: int | None = None


Layers = tuple[LayerReport, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, and what it did to the whole model's held-out SQNR in dB.

    Attributes:
        step: its name.
        before_db: without it.
        after_db: with it where it was kept, else without it.
        kept: whether the error fell.
        seconds: what it cost, judging included.
        layers: the same layer by layer, where the step works so.
        refused_db: with it where it was not kept.
        foreseen: whether that was judged with weights as rounding, which follows, will about leave them.
    """

    step: str
    before_db: float
    after_db: float
    kept: bool
    seconds: float
    layers: Layers = ()
    refused_db: float | None = None
    foreseen: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Few:
    """The first samples of the data, for steps that come before calibration.

    Attributes:
        inputs: as many as the steps behind calibration will see.
        wanted: what the float model, as it was prepared, makes of some of them, by their number.
    """

    inputs: Sequence[Sample] = ()
    wanted: Mapping[int, Sample] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class State:
    """A run so far.

    Attributes:
        recipe: what was asked for.
        model: the float model as it is now.
        reference: the float model as it should be, in the same tensors and units, where `model` itself
            computes something else by now.
        plan: what every tensor becomes.
        params: scale and zero point of every tensor that the plan stores in integers.
        float_scales: scale of every tensor that it stores as a scaled float.
        values: float content that replaces a constant's own (bias correction, equalization).
        codes: integer content of a constant where an algorithm chose the rounding itself.
        reads: by (tensor, node), the scale in which this node alone reads it: a tensor's, or one of its own.
        notes: adjustments worth telling.
        loaded: where it came from.
        tail: the float rest of a model whose head was cut off: it reads the model's outputs.
        norms: its first normalisations as it was given: they tell what the data was like in training.
        fixed: inputs that have become constants.
        rewrites: how often each pass and rewrite changed it.
        few: samples for the steps before calibration.
        stats: what calibration saw of each tensor.
        inputs: the samples that were kept.
        outputs: what the float model makes of them.
        facts: about the data, for the record.
        packed: mode weight_only: weights in few bits.
        written: the quantized model.
        steps: what was tried.
        layers, said: what the step that ran last tells of each layer, and in words.
        held: SQNR in dB of each output on samples that no step has learned from, once that is final.
        judged: who judged this state last, and the result: the next step need not ask again.
        known: scales of constants that were found before, with the constants.
        seconds: wall time by stage and step.
    """

    plan: QuantPlan = field(default_factory=lambda: QuantPlan({}, {}, {}))
    params: Mapping[str, QParams] = field(default_factory=dict)
    float_scales: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    values: Mapping[str, Array] = field(default_factory=dict)
    codes: Mapping[str, Array] = field(default_factory=dict)
    reads: Mapping[tuple[str, str], QParams | str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recipe: Recipe
    model: ir.Model
    reference: ir.Model | None = None
    loaded: LoadedModel
    tail: ir.Model | None = None
    norms: tuple[FirstNorm, ...] = ()
    fixed: Mapping[str, Array] = field(default_factory=dict)
    rewrites: Mapping[str, int] = field(default_factory=dict)
    few: Few = field(default_factory=Few)
    stats: Mapping[str, Observer] = field(default_factory=dict)
    inputs: Sequence[Sample] = ()
    outputs: Sequence[Sample] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    packed: Mapping[tuple[str, bool], Packed] = field(default_factory=dict)
    written: ir.Model | None = None
    steps: tuple[StepReport, ...] = ()
    layers: Layers = ()
    said: str = ""
    held: Mapping[str, float] = field(default_factory=dict)
    judged: tuple[object, float] | None = None
    known: dict[tuple[object, ...], tuple[object, QParams]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def truth(self) -> ir.Model:
        """The float model whose results are wanted."""
        return self.model if self.reference is None else self.reference

    def read_params(self, tensor: str, node: str) -> QParams | None:
        """With what this node alone reads the tensor, if so."""
        found = self.reads.get((tensor, node))
        return self.params[found] if isinstance(found, str) else found

    def noted(self, *notes: str) -> State:
        """With more notes, each once."""
        new = [note for note in dict.fromkeys(notes) if note not in self.notes]
        return replace(self, notes=(*self.notes, *new)) if new else self

    def spent(self, name: str, seconds: float) -> State:
        """With more time booked under a name."""
        return replace(self, seconds={**self.seconds, name: self.seconds.get(name, 0.0) + seconds})

    def same_as(self, other: State) -> bool:
        """Whether a step that has returned this state has left the other one as it was."""
        tables = ("model", "packed", *NUMBERS)
        return all(getattr(self, name) is getattr(other, name) for name in tables)


def held_out_count(count: int) -> int:
    """How many of the last samples judge the steps that learn from the others."""
    return max(1, round(count * _SHARE))


def held_from(count: int) -> int:
    """The number of the first of them."""
    return count - held_out_count(count)
