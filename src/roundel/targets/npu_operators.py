"""AMD's operator table for the NPU, and where its own logs show something else.

The table (`npu_operators.json`, from AMD's documentation of Ryzen AI 1.8) is advice: it leaves out operators
that are known to run. The exceptions below say what shows it. Nothing here was tried on an NPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from roundel.targets.devices import Compiler, Format


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
_X1 = frozenset({Compiler.X1})
_X2 = frozenset({Compiler.X2})

EXCEPTIONS: tuple[TableException, ...] = (
    TableException("Relu", _BF16, True, "a BF16 ResNet runs wholly on the NPU"),
    TableException("Clip", _BF16, True, "a bounded Relu, which the table omits as well [inference]"),
    TableException("LeakyRelu", _BF16, True, "a kind of Relu, which the table omits as well [inference]"),
    TableException("Softmax", _BF16, True, "AMD's BF16 transformer examples contain it [inference]"),
    TableException("LayerNormalization", _BF16, True, "AMD's BF16 transformers contain it [inference]"),
    TableException("HardSigmoid", _A16W8, True, "mobilenet_v3 in A16W8 runs wholly on the NPU"),
    TableException("HardSwish", _A16W8, True, "mobilenet_v3 in A16W8 runs wholly on the NPU"),
    TableException("HardSigmoid", _XINT8, True, "the first NPU's own sigmoid [inference]", _X1),
    TableException("Sigmoid", _XINT8, True, "written as the first NPU's HardSigmoid [inference]", _X1),
    TableException("ReduceMean", _XINT8, False, "shufflenet_v2's mean ran on the CPU [inference]", _X2),
)


@cache
def operator_table() -> Mapping[str, frozenset[Format]]:
    """The formats in which AMD's table lists each operator."""
    text = (resources.files(__package__) / "npu_operators.json").read_text(encoding="utf-8")
    rows: dict[str, str] = json.loads(text)["operators"]
    return MappingProxyType({op: frozenset(Format(word) for word in row.split()) for op, row in rows.items()})


def exception_for(op: str, kind: Format, compiler: Compiler) -> TableException | None:
    """What is known beyond the table, or None."""
    for entry in EXCEPTIONS:
        if entry.op == op and kind in entry.formats and compiler in entry.compilers:
            return entry
    return None


def listed_formats(op: str) -> frozenset[Format]:
    """The formats in which the table lists the operator; none for an operator that it does not know."""
    return operator_table().get(op, frozenset())
