"""What a look at the layers' sensitivity finds."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


class Kind(enum.Enum):
    """Ways to make a layer cost less."""

    A16W8 = "A16W8"
    PER_CHANNEL = "per-channel"
    FINETUNE = "fine-tune"
    EXCLUDE = "exclude"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to make it cost less.

    Attributes:
        kind: which.
        option: the words for it on the command line of `roundel quantize`.
        why: it should help.
        override: the entry of the recipe's `overrides`, where it is one.
    """

    kind: Kind
    option: str
    why: str
    override: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What quantizing one layer alone costs at the outputs.

    Attributes:
        name: of its first node.
        op: that node's operator.
        nodes: of the layer.
        activations: error power over signal power with only its activations rounded.
        weights: with only its constants rounded.
        share: of the costs of all layers.
        left: the same, less what 16-bit activations of the layers above it in the ranking take away.
        won_back: share of the quantized model's error power that is gone when the first remedy is applied to
            this layer and all above it (at most, where it is about weights: their error is taken away
            whole); None where that was not measured.
        remedies: what would help, best first; empty for layers that cost little.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    activations: float
    weights: float
    share: float
    left: float = 0.0
    won_back: float | None = None
    remedies: tuple[Remedy, ...] = ()

    @property
    def cost(self) -> float:
        """Both together."""
        return self.activations + self.weights

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        tree = asdict(self)
        tree["remedies"] = [remedy.to_dict() for remedy in self.remedies]
        return {**tree, "cost": self.cost, "sqnr_db": decibels(self.cost)}


@dataclass(frozen=True, slots=True)
class Head:
    """A detection head: what turns the last layers' results into boxes and scores.

    Attributes:
        signs: what gave it away.
        nodes: quantized nodes of it.
        option: the words that keep all of it in float.
        share: of the costs of all layers.
    """

    signs: tuple[str, ...]
    nodes: tuple[str, ...]
    option: str
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The ranking.

    Attributes:
        model: file name.
        recipe: by name.
        samples: how many each layer was measured with.
        sqnr_db: of the whole quantized model on the samples of the check.
        layers: the most costly first, by what is left of their costs.
        together: options that apply the first remedies of the worst layers at once.
        head: a detection head, where there is one.
        seconds: the whole took.
        notes: what a careful reader wants to know.
    """

    model: str
    recipe: str
    samples: int
    sqnr_db: float | None
    layers: tuple[LayerCost, ...]
    together: str | None
    head: Head | None
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[LayerCost, ...]:
        """The layers for which something is proposed."""
        return tuple(layer for layer in self.layers if layer.remedies)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tree = asdict(self)
        return {**tree, "layers": [layer.to_dict() for layer in self.layers]}


def decibels(power: float) -> float | None:
    """SQNR of an error of this relative power; None without any."""
    return -10 * math.log10(power) if power > 0 else None
