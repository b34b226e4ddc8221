"""How far the NPU's shifters go, in positions (position p means scale 2**-p)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

_ANY = 1 << 10


@dataclass(frozen=True, slots=True)
class Site:
    """A node that shifts, with the names of the stored tensors around it.

    Attributes:
        kind: which of the NPU's units computes it.
        node: its name.
        inputs: what it reads, without weight and bias.
        output: what holds its result.
        weight: of a layer.
        bias: of a layer, where it has a scale of its own.
        leaky: whether a LeakyRelu follows the layer.
        swish: whether the product multiplies a tensor by its own gate.
    """

    kind: Literal["layer", "add", "mul", "hard_sigmoid"]
    node: str
    inputs: tuple[str, ...]
    output: str
    weight: str | None = None
    bias: str | None = None
    leaky: bool = False
    swish: bool = False


Positions = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Limit:
    """low <= sum of sign x position <= high; the terms stand in the order in which they give way."""

    rule: str
    terms: tuple[tuple[str, int], ...]
    low: int
    high: int

    def value(self, position: Positions) -> int:
        """The sum."""
        return sum(sign * position(name) for name, sign in self.terms)


@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that does not hold: the quantity, its allowed range, and where."""

    rule: str
    node: str
    value: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class ShiftLimits:
    """Ranges, both ends included.

    Attributes:
        read: how far apart the inputs of an Add or Sub may lie.
        add_write: lowest input position minus output position of an Add or Sub.
        mul_write: sum of input positions minus output position of a Mul.
        cut: weight + input - output position of a layer.
        bias_high: the most that weight + input - bias position may be.
        accumulator: bits of the accumulator; with the cut they bound how far left a bias may reach.
        hard_sigmoid_input: input position of a HardSigmoid.
        hard_sigmoid_output: the least output position of a HardSigmoid.
        hard_sigmoid_reach: the most that its output position may exceed its input position by.
        swish: sum of input positions minus output position of a Mul with its own gate.
    """

    read: int = 7
    add_write: tuple[int, int] = (-7, 25)
    mul_write: tuple[int, int] = (0, 32)
    cut: tuple[int, int] = (0, 16)
    bias_high: int = 15
    accumulator: int = 24
    hard_sigmoid_input: tuple[int, int] = (0, 15)
    hard_sigmoid_output: int = 7
    hard_sigmoid_reach: int = 14
    swish: tuple[int, int] = (0, 15)

    def at(self, site: Site, position: Positions) -> Iterator[Limit]:
        """What must hold at a node, in the order of repair."""
        match site.kind:
            case "add":
                ranked = sorted(site.inputs, key=position)
                lowest, highest = ranked[0], ranked[-1]
                yield Limit("shift_read", ((highest, 1), (lowest, -1)), 0, self.read)
                yield Limit("shift_write", ((lowest, 1), (site.output, -1)), *self.add_write)
            case "mul":
                finest_first = sorted(site.inputs, key=position, reverse=True)
                terms = (*((name, 1) for name in finest_first), (site.output, -1))
                yield Limit("shift_write", terms, *self.mul_write)
                if site.swish:
                    yield Limit("shift_swish", terms, *self.swish)
            case "hard_sigmoid":
                given, made = site.inputs[0], site.output
                yield Limit("hard_sigmoid input", ((given, 1),), *self.hard_sigmoid_input)
                yield Limit("hard_sigmoid output", ((made, 1),), self.hard_sigmoid_output, _ANY)
                reach = self.hard_sigmoid_reach
                yield Limit("hard_sigmoid reach", ((made, 1), (given, -1)), -_ANY, reach)
            case "layer":
                yield from self._layer(site, position)

    def _layer(self, site: Site, position: Positions) -> Iterator[Limit]:
        assert site.weight is not None
        accumulator = ((site.weight, 1), (site.inputs[0], 1))
        cut = Limit("shift_cut", (*accumulator, (site.output, -1)), *self.cut)
        yield cut
        if site.bias is not None:
            low = 0 if site.leaky else min(0, -(self.accumulator - (8 + cut.value(position))))
            yield Limit("shift_bias", (*accumulator, (site.bias, -1)), low, self.bias_high)

    def breaches(self, site: Site, position: Positions, asked: frozenset[str]) -> Iterator[Breach]:
        """Those of the limits asked for that do not hold."""
        for limit in self.at(site, position):
            value = limit.value(position)
            if family(limit) in asked and not limit.low <= value <= limit.high:
                yield Breach(limit.rule, site.node, value, limit.low, limit.high)


def family(limit: Limit) -> str:
    """The recipe's word for the limit: its field is `npu.adjust_FAMILY`."""
    return limit.rule.partition(" ")[0]


FAMILIES = frozenset({"shift_read", "shift_write", "shift_cut", "shift_bias", "hard_sigmoid", "shift_swish"})
XINT8_LIMITS = ShiftLimits()
