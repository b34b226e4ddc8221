"""The NPUs and the number formats that their compilers take, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Format(enum.Enum):
    """A number format that a Ryzen AI compiler knows."""

    XINT8 = "xint8"
    A8W8 = "a8w8"
    A16W8 = "a16w8"
    BF16 = "bf16"

    @property
    def integer(self) -> bool:
        """Whether the integer compiler takes it, which reads Q/DQ pairs."""
        return self is not Format.BF16


class Compiler(enum.Enum):
    """The integer compiler of a device; AMD calls it `target`."""

    X1 = "X1"
    X2 = "X2"


@dataclass(frozen=True, slots=True)
class Device:
    """One generation of NPU.

    Attributes:
        name: the short name that AMD's documents use.
        processors: what it is sold in.
        compiler: the integer compiler that places operators.
        formats: what the device takes.
    """

    name: str
    processors: str
    compiler: Compiler
    formats: frozenset[Format]


_FIRST = frozenset({Format.XINT8})
_SECOND = frozenset(Format)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("phx", "Phoenix and Hawk Point: Ryzen 7040, 8040, 200", Compiler.X1, _FIRST),
            Device("stx", "Strix and Strix Halo: Ryzen AI 300, Max", Compiler.X2, _SECOND),
            Device("krk", "Krackan: Ryzen AI 300", Compiler.X2, _SECOND),
        )
    }
)

MINIMUM_CONVS = 2  # the integer compiler offloads nothing from a graph with fewer (minimum_num_of_conv)
RECOMMENDED_OPSET = 17
MINIMUM_OPSET = 11  # Resize does not compile below
NATIVE_16_BIT_OPSET = 21  # QuantizeLinear of the standard domain takes int16 from here on
PROTOBUF_BYTES = 2**31 - 1  # no protobuf file can be larger
