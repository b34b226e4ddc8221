"""The plan as a value: for every tensor what it becomes, and why."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from roundel.types import Range, Scheme, Storage


class Role(enum.Enum):
    """The part a tensor plays."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    BIAS = "bias"


@dataclass(frozen=True, slots=True)
class Observed:
    """The range comes from data: the calibration samples, or a constant's own values."""

    def __str__(self) -> str:
        return "observed"


@dataclass(frozen=True, slots=True)
class Fixed:
    """The range is known beforehand."""

    range: Range

    def __str__(self) -> str:
        return f"fixed [{self.range.low:g}, {self.range.high:g}]"


@dataclass(frozen=True, slots=True)
class Shared:
    """One scale for a group: the range that holds all of `leaders`."""

    leaders: tuple[str, ...]

    def __str__(self) -> str:
        return "shared with " + ", ".join(self.leaders)


@dataclass(frozen=True, slots=True)
class Derived:
    """A bias: scale = input scale x weight scale x factor, repeated for each group of a ConvTranspose."""

    input: str
    weight: str
    factor: float = 1.0
    repeats: int = 1

    def __str__(self) -> str:
        return f"derived from {self.input} x {self.weight}"


@dataclass(frozen=True, slots=True)
class Unscaled:
    """No range is needed: the type holds the values as they are."""

    def __str__(self) -> str:
        return "no scale"


Source = Observed | Fixed | Shared | Derived | Unscaled


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What one tensor becomes."""

    name: str
    role: Role
    scheme: Storage
    source: Source
    decided_by: str
    reason: str

    @property
    def integer(self) -> Scheme:
        """The scheme of a tensor that is known to be stored in integers."""
        if not isinstance(self.scheme, Scheme):
            raise TypeError(f"'{self.name}' is stored as {self.scheme}, not in integers")
        return self.scheme


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Whether a node is quantized, and why not when it is not."""

    name: str
    op: str
    quantized: bool
    reason: str


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """The whole decision, before any scale is known.

    Args:
        tensors: quantized tensors in graph order.
        kept_float: float32 tensors that were considered and left alone, with the reason.
        nodes: every node of the main graph.
        folded: names of Relu/Clip nodes that the quantizer's saturation replaces.
        watched: further tensors whose ranges are measured, for plans that may take this one's place.
    """

    tensors: Mapping[str, TensorPlan]
    kept_float: Mapping[str, str]
    nodes: Mapping[str, NodePlan]
    folded: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()

    def in_integers(self, name: str | None) -> bool:
        """Whether a tensor is stored in integers."""
        tensor = self.tensors.get(str(name))
        return tensor is not None and isinstance(tensor.scheme, Scheme)

    def leaders(self, name: str) -> tuple[str, ...]:
        """The tensors whose statistics give this tensor its range."""
        source = self.tensors[name].source
        return source.leaders if isinstance(source, Shared) else (name,)

    def observed_activations(self) -> tuple[str, ...]:
        """Tensors whose ranges must be measured, each once, in graph order."""
        needed: dict[str, None] = {}
        for name, tensor in self.tensors.items():
            if tensor.role is not Role.ACTIVATION or isinstance(tensor.source, Fixed | Unscaled):
                continue
            for leader in self.leaders(name):
                led = self.tensors.get(leader)
                if led is None or (led.role is Role.ACTIVATION and not isinstance(led.source, Fixed)):
                    needed[leader] = None
        return tuple(dict.fromkeys((*needed, *self.watched)))
