"""The devices and AMD's operator table as data."""

from __future__ import annotations

from roundel.targets.npu import (
    DEVICES,
    EXCEPTIONS,
    Compiler,
    Format,
    exception_for,
    listed_formats,
    operator_table,
    refusal,
)


def test_table_is_whole() -> None:
    assert len(operator_table()) == 104  # 105 rows, of which two are Upsample
    assert listed_formats("Conv") == frozenset(Format) - {Format.FLOAT}  # float runs as BF16
    assert listed_formats("ConvTranspose") == frozenset({Format.A8W8, Format.A16W8, Format.BF16})
    assert listed_formats("Sigmoid") == frozenset({Format.A8W8, Format.A16W8, Format.BF16})
    assert listed_formats("NoSuchOperator") == frozenset()


def test_exceptions_contradict_the_table_and_say_why() -> None:
    for entry in EXCEPTIONS:
        assert entry.evidence
        for kind in entry.formats:
            assert (kind in listed_formats(entry.op)) is not entry.runs


def test_exceptions_depend_on_the_compiler() -> None:
    assert exception_for("ReduceMean", Format.XINT8, Compiler.X2) is not None
    assert exception_for("ReduceMean", Format.XINT8, Compiler.X1) is None


def test_first_npu_has_measured_rows() -> None:
    for op in ("HardSigmoid", "ConvTranspose", "Clip"):  # the table leaves them out, or the second NPU does
        assert refusal(op, Format.XINT8, Compiler.X1) is None
    for op in ("MatMul", "LayerNormalization", "InstanceNormalization", "ReduceMax"):
        assert Format.XINT8 in listed_formats(op)
        assert refusal(op, Format.XINT8, Compiler.X1)
    assert refusal("HardSigmoid", Format.XINT8, Compiler.X2)


def test_devices() -> None:
    assert set(DEVICES) == {"phx", "hpt", "stx", "stx-halo", "krk"}
    assert DEVICES["phx"].formats == frozenset({Format.XINT8})
    assert DEVICES["krk"].formats == frozenset(Format)
