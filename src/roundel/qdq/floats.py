"""One tensor in bfloat16 or float16: AMD's quantize and dequantize operators, or plain casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.numerics.short_floats import bits, largest
from roundel.qdq.chain import Chain
from roundel.qdq.pairs import QUARK, Names, constant
from roundel.types import FloatType

_FLOAT32_MAX = float(np.finfo(np.float32).max)
ONNX_TYPES = {FloatType.BFLOAT16: ir.DataType.BFLOAT16, FloatType.FLOAT16: ir.DataType.FLOAT16}


@dataclass(frozen=True, slots=True, eq=False)
class FloatCell:
    """How one tensor gets into its type and back.

    Attributes:
        graph: takes the constants.
        names: hands out free ones.
        base: the tensor's name.
        ftype: the type.
        factor: the tensor's scale; None where it is stored as it is.
        form: pair or cast.
        ends: scale and zero point of a pair; the scale alone of a scaled cast.
    """

    graph: ir.Graph
    names: Names
    base: str
    ftype: FloatType
    factor: NDArray[np.float32] | None
    form: Literal["pair", "cast"]
    ends: tuple[ir.Value, ...]

    @staticmethod
    def make(
        graph: ir.Graph,
        names: Names,
        base: str,
        ftype: FloatType,
        factor: NDArray[np.float32] | None,
        form: Literal["pair", "cast"],
    ) -> FloatCell:
        """With the constants that its nodes share."""
        numbers: list[tuple[str, NDArray[Any]]] = []
        if factor is not None or form == "pair":
            numbers.append(("scale", np.asarray(1.0, np.float32) if factor is None else factor))
        if form == "pair":
            numbers.append(("zero_point", np.zeros((), ONNX_TYPES[ftype].numpy())))
        ends = tuple(constant(graph, names(f"{base}_{word}"), number) for word, number in numbers)
        return FloatCell(graph, names, base, ftype, factor, form, ends)

    def there_and_back(self, value: ir.Value, out: str, *, clip: bool, suffix: str = "") -> list[ir.Node]:
        """From float32 to the value that the type holds, again in float32, in a tensor named `out`."""
        chain = Chain(value, self.names, self.base, suffix)
        short = ONNX_TYPES[self.ftype]
        if clip:
            chain.add("Clip", *self._bounds())
        if self.form == "pair":
            chain.add("ExtendedQuantizeLinear", *self.ends, label="QuantizeLinear", domain=QUARK, dtype=short)
        else:
            if self.ends:
                chain.add("Div", *self.ends)
            chain.add("Cast", label="QuantizeLinear", dtype=short, attributes=_to(short))
        self._back(chain)
        return chain.end(out)

    def stored(self, array: NDArray[Any], out: str) -> list[ir.Node]:
        """A constant whose 16 bits are in the file, read into a tensor named `out`."""
        content = array if self.factor is None else array / self.factor
        short = bits(content, self.ftype).view(ONNX_TYPES[self.ftype].numpy())
        codes = constant(self.graph, self.names(f"{self.base}_quantized"), short)
        chain = Chain(codes, self.names, self.base)
        self._back(chain)
        return chain.end(out)

    def _back(self, chain: Chain) -> None:
        if self.form == "pair":
            chain.add("ExtendedDequantizeLinear", *self.ends, label="DequantizeLinear", domain=QUARK)
            return
        chain.add("Cast", label="DequantizeLinear", attributes=_to(ir.DataType.FLOAT))
        if self.ends:
            chain.add("Mul", *self.ends)

    def _bounds(self) -> tuple[ir.Value, ir.Value]:
        """The finite range of the type, in units of the tensor."""
        top = largest(self.ftype) * (1.0 if self.factor is None else float(self.factor))
        bound = np.asarray(min(top, _FLOAT32_MAX), np.float32)
        low = constant(self.graph, self.names(f"{self.base}_lowest"), -bound)
        return low, constant(self.graph, self.names(f"{self.base}_highest"), bound)


def _to(dtype: ir.DataType) -> tuple[ir.Attr, ...]:
    return (ir.AttrInt64("to", dtype.value),)
