"""The NPUs and the number formats that their compilers take, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from roundel.errors import RecipeError, did_you_mean


class Format(enum.Enum):
    """A number format that a Ryzen AI compiler tells apart: AMD's name for it, and the preset's."""

    XINT8 = "xint8"
    A8W8 = "a8w8"
    A16W8 = "a16w8"
    BF16 = "bf16"
    FLOAT = "float"  # float32, which the BF16 compiler converts by itself; no preset, no row in AMD's table

    @property
    def integer(self) -> bool:
        """Whether the integer compiler takes it, which reads Q/DQ pairs; the other one is for BF16."""
        return self not in (Format.BF16, Format.FLOAT)


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
        more_options: provider options for an integer model, beside `target`.
    """

    name: str
    processors: str
    compiler: Compiler
    formats: frozenset[Format]
    more_options: tuple[tuple[str, str], ...] = ()

    @property
    def integer_options(self) -> dict[str, str]:
        """Options of the VitisAI execution provider for an integer model."""
        return {"target": self.compiler.value, **dict(self.more_options)}

    @property
    def needs_xclbin(self) -> bool:
        """Whether the session must be told which NPU binary to load."""
        return "xclbin" in self.integer_options


_FIRST = frozenset({Format.XINT8})
_SECOND = frozenset(Format)
_FIRST_OPTIONS = (
    ("xclbin", "${RYZEN_AI_INSTALLATION_PATH}/voe-4.0-win_amd64/xclbins/phoenix/4x4.xclbin"),
    # Since Ryzen AI 1.7 the provider rounds half to even unless told otherwise; XDNA 1 needs the older way.
    ("xlnx_enable_py3_round", "0"),
)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("phx", "Phoenix: Ryzen 7040", Compiler.X1, _FIRST, _FIRST_OPTIONS),
            Device("hpt", "Hawk Point: Ryzen 8040, 200", Compiler.X1, _FIRST, _FIRST_OPTIONS),
            Device("stx", "Strix: Ryzen AI 300", Compiler.X2, _SECOND),
            Device("stx-halo", "Strix Halo: Ryzen AI Max", Compiler.X2, _SECOND),
            Device("krk", "Krackan: Ryzen AI 300", Compiler.X2, _SECOND),
        )
    }
)

MINIMUM_CONVS = 2  # the integer compiler offloads nothing from a graph with fewer (minimum_num_of_conv)
RECOMMENDED_OPSET = 17
MINIMUM_OPSET = 11  # Resize does not compile below
NATIVE_16_BIT_OPSET = 21  # QuantizeLinear of the standard domain takes int16 from here on
PROTOBUF_BYTES = 2**31 - 1  # no protobuf file can be larger


def device_named(name: str) -> Device:
    """The device, or an error that names those there are."""
    device = DEVICES.get(name.strip().casefold().replace("_", "-"))
    if device is None:
        raise RecipeError(
            f"There is no device '{name}'.",
            where="--device",
            expected=", ".join(f"{d.name} ({d.processors})" for d in DEVICES.values()),
            hint=did_you_mean(name, DEVICES),
        )
    return device
