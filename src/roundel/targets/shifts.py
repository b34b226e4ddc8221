"""The reach of the NPU's shifters, in positions (position p means scale 2**-p)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShiftLimits:
    """Ranges, both ends included.

    Attributes:
        read: how far apart the inputs of an Add may lie.
        add_write: lowest input position minus output position of an Add.
        mul_write: sum of input positions minus output position of a Mul.
        cut: weight + input - output position of a Conv or Gemm.
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

    def bias(self, cut: int, *, leaky: bool) -> tuple[int, int]:
        """Allowed weight + input - bias position, given the layer's cut."""
        low = 0 if leaky else min(0, -(self.accumulator - (8 + cut)))
        return low, self.bias_high


XINT8_LIMITS = ShiftLimits()
