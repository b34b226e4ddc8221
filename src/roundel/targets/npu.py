"""AMD's operator table for the NPU, and where its own logs show something else.

The table (`npu_operators.json`, from AMD's documentation of Ryzen AI 1.8) is advice: it leaves out operators
that are known to run. The exceptions below say what shows it. For the first NPU (compiler X1) there are
measurements, one row for each operator in `x1.py`; the rest was not tried on an NPU.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from roundel.errors import RecipeError, did_you_mean
from roundel.targets.x1 import X1_ROWS

USUAL_DEVICE = "stx"  # whose split is predicted where none was named


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
        like: the device whose measurements or logs stand for it, where it has none of its own.
    """

    name: str
    processors: str
    compiler: Compiler
    formats: frozenset[Format]
    more_options: tuple[tuple[str, str], ...] = ()
    like: str | None = None

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
            Device("hpt", "Hawk Point: Ryzen 8040, 200", Compiler.X1, _FIRST, _FIRST_OPTIONS, like="phx"),
            Device("stx", "Strix: Ryzen AI 300", Compiler.X2, _SECOND),
            Device("stx-halo", "Strix Halo: Ryzen AI Max", Compiler.X2, _SECOND, like="stx"),
            Device("krk", "Krackan: Ryzen AI 300", Compiler.X2, _SECOND, like="stx"),
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


@dataclass(frozen=True, slots=True)
class TableException:
    """One operator whose place differs from what the table says.

    Attributes:
        op: operator type.
        formats: where the exception holds.
        runs: whether the NPU takes it.
        evidence: what shows it.
        compilers: the compilers concerned.
    """

    op: str
    formats: frozenset[Format]
    runs: bool
    evidence: str
    compilers: frozenset[Compiler] = frozenset(Compiler)


_BF16 = frozenset({Format.BF16})
_XINT8 = frozenset({Format.XINT8})
_A16W8 = frozenset({Format.A16W8})
_X2 = frozenset({Compiler.X2})

EXCEPTIONS: tuple[TableException, ...] = (
    TableException("Relu", _BF16, True, "a BF16 ResNet runs wholly on the NPU"),
    TableException("Clip", _BF16, True, "a bounded Relu, which the table omits as well [inference]"),
    TableException("LeakyRelu", _BF16, True, "a kind of Relu, which the table omits as well [inference]"),
    TableException("Softmax", _BF16, True, "AMD's BF16 transformer examples contain it [inference]"),
    TableException("LayerNormalization", _BF16, True, "AMD's BF16 transformers contain it [inference]"),
    TableException("HardSigmoid", _A16W8, True, "mobilenet_v3 in A16W8 runs wholly on the NPU"),
    TableException("HardSwish", _A16W8, True, "mobilenet_v3 in A16W8 runs wholly on the NPU"),
    TableException("ReduceMean", _XINT8, False, "shufflenet_v2's mean ran on the CPU [inference]", _X2),
)


@cache
def operator_table() -> Mapping[str, frozenset[Format]]:
    """The formats in which AMD's table lists each operator."""
    text = (resources.files(__package__) / "npu_operators.json").read_text(encoding="utf-8")
    rows: dict[str, str] = json.loads(text)["operators"]
    return MappingProxyType({op: frozenset(Format(word) for word in row.split()) for op, row in rows.items()})


def refusal(op: str, kind: Format, compiler: Compiler) -> str | None:
    """Why the NPU does not take the operator in this format; None where it does."""
    row = X1_ROWS.get(op) if compiler is Compiler.X1 else None
    if row is not None:
        return None if row.runs else row.seen
    known = exception_for(op, kind, compiler)
    if known is not None:
        return None if known.runs else known.evidence
    return None if kind in listed_formats(op) else f"AMD's table does not list {op} for {kind.value}"


def exception_for(op: str, kind: Format, compiler: Compiler) -> TableException | None:
    """What is known beyond the table, or None."""
    for entry in EXCEPTIONS:
        if entry.op == op and kind in entry.formats and compiler in entry.compilers:
            return entry
    return None


def listed_formats(op: str) -> frozenset[Format]:
    """The formats in which the table lists the operator; none for an operator that it does not know."""
    return operator_table().get(op, frozenset())
