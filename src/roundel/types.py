"""The vocabulary that all rooms share: small, frozen, and free of any graph."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FloatArray = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]
Arrays = dict[str, Array]
Sample = Arrays


def below(arrays: Mapping[str, Array], prefix: str) -> Arrays:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


class QType(enum.Enum):
    """An integer element type that a tensor can be stored in."""

    INT8 = "int8"
    UINT8 = "uint8"
    INT16 = "int16"
    UINT16 = "uint16"
    INT32 = "int32"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type."""
        return np.dtype(self.value)

    @property
    def bits(self) -> int:
        """Width in bits."""
        return self.dtype.itemsize * 8

    @property
    def signed(self) -> bool:
        """Whether negative codes exist."""
        return self.dtype.kind == "i"

    @property
    def qmin(self) -> int:
        """Smallest code."""
        return int(np.iinfo(self.dtype).min)

    @property
    def qmax(self) -> int:
        """Largest code."""
        return int(np.iinfo(self.dtype).max)


class FloatType(enum.Enum):
    """A short floating-point element type."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class BlockType(enum.Enum):
    """A format whose neighbouring elements share an exponent or a power-of-two scale."""

    BFP16 = "bfp16"
    MX4 = "mx4"
    MX6 = "mx6"
    MX9 = "mx9"
    MXFP8E5M2 = "mxfp8e5m2"
    MXFP8E4M3 = "mxfp8e4m3"
    MXFP6E3M2 = "mxfp6e3m2"
    MXFP6E2M3 = "mxfp6e2m3"
    MXFP4E2M1 = "mxfp4e2m1"
    MXINT8 = "mxint8"


class ScaleKind(enum.Enum):
    """Which numbers a scale may be."""

    FLOAT = "float"
    POWER_OF_TWO = "power_of_two"
    INT16 = "int16"  # M / 2**N with a 16-bit M


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the whole tensor."""

    def __str__(self) -> str:
        return "per tensor"


@dataclass(frozen=True, slots=True)
class PerChannel:
    """One scale for each index along an axis."""

    axis: int

    def __str__(self) -> str:
        return f"per channel (axis {self.axis})"


Granularity = PerTensor | PerChannel


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a tensor is to be stored in integers, before any scale is known."""

    qtype: QType
    symmetric: bool = True
    scale: ScaleKind = ScaleKind.FLOAT
    granularity: Granularity = PerTensor()
    reduce_range: bool = False

    def __str__(self) -> str:
        words = [self.qtype.value, "symmetric" if self.symmetric else "asymmetric"]
        if self.scale is not ScaleKind.FLOAT:
            words.append(f"{self.scale.value.replace('_', ' ')} scale")
        if self.granularity != PerTensor():
            words.append(str(self.granularity))
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class FloatScheme:
    """Stored as a short float; `scaled` first divides by a scale that brings the range to the type's best."""

    ftype: FloatType
    scaled: bool = False

    def __str__(self) -> str:
        return f"{self.ftype.value}, scaled" if self.scaled else self.ftype.value


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """Stored in blocks along an axis (negative: counted from the last), which carry their own scales."""

    block: BlockType
    axis: int = 1

    def __str__(self) -> str:
        return f"{self.block.value} along axis {self.axis}"


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """A weight matrix in few bits: each run of `size` inputs of an output has a scale of its own.

    Attributes:
        bits: of one code; codes count from 0.
        size: inputs that share a scale; the last run of an output may be shorter.
        symmetric: the middle code stands for zero; otherwise each run has a zero point, too.
        mirrored: a symmetric scale may be negative. There is one code more below the middle than above it;
            a negative scale turns the grid around where the largest weight is positive.
    """

    bits: int
    size: int
    symmetric: bool = True
    mirrored: bool = False

    @property
    def top(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """The code that stands for zero where the scheme is symmetric."""
        return int(2 ** (self.bits - 1))

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, {kind}, in blocks of {self.size}"


Storage = Scheme | FloatScheme | BlockScheme | PackedScheme


def needs_range(storage: Storage) -> bool:
    """Whether a scale must be found: short floats and blocks can do without."""
    return isinstance(storage, Scheme) or (isinstance(storage, FloatScheme) and storage.scaled)


@dataclass(frozen=True, slots=True, eq=False)
class QParams:
    """Scale and zero point of one tensor: 0-d arrays per tensor, 1-d along `axis` per channel."""

    scale: NDArray[np.float32]
    zero_point: NDArray[Any]
    qtype: QType
    axis: int | None = None

    def same_as(self, other: QParams) -> bool:
        """Bitwise equality."""
        return (
            self.qtype is other.qtype
            and self.axis == other.axis
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )


@dataclass(frozen=True, slots=True)
class Range:
    """The interval of real values that a tensor must be able to hold."""

    low: float
    high: float

    @property
    def absmax(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def union(self, other: Range) -> Range:
        """The smallest interval that holds both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A graph input as its feeder sees it: `None` or a string is a dimension left open."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}: {self.dtype} of any shape"
        dims = ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name}: {self.dtype} [{dims}]"


class Listener(Protocol):
    """Receives the run's steps; every method may be called from the run's own thread only."""

    def step(self, name: str, total: int | None = None) -> None:
        """A step begins; `total` is its number of units when it is known."""

    def advance(self, done: float) -> None:
        """`done` units of the current step are finished; a share of a unit counts."""

    def say(self, text: str) -> None:
        """A few words about what goes on now."""

    def close(self) -> None:
        """The run has ended, well or not."""


class Silent:
    """A listener that says nothing."""

    def step(self, name: str, total: int | None = None) -> None:
        """Nothing."""

    def advance(self, done: float) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[Listener]:
    """Whoever hears of a run, or nobody; told at the end of the block that the run has ended, well or not."""
    told = listener or Silent()
    try:
        yield told
    finally:
        told.close()
