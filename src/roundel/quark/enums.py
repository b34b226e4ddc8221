"""The words that a config is written in: types, formats and calibration methods."""

from __future__ import annotations

import enum
from typing import Any

from onnx import TensorProto
from onnxruntime.quantization.calibrate import CalibrationMethod as CalibrationMethod
from onnxruntime.quantization.quant_utils import QuantFormat as QuantFormat
from onnxruntime.quantization.quant_utils import QuantType as QuantType

from roundel.quark.errors import QuarkConfigError


class _Named(enum.Enum):
    """An enumeration that prints as its name and can be made from it."""

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_string(cls, name: str) -> _Named:
        """The member of that name.

        Raises:
            QuarkConfigError: there is none; it is a ValueError, too.
        """
        if name not in cls.__members__:
            what = f"{cls.__name__} has no '{name}'."
            raise QuarkConfigError.unknown(what, name, sorted(cls.__members__))
        return cls[name]


class PowerOfTwoMethod(enum.Enum):
    """Calibration for scales that are powers of two."""

    NonOverflow = 0
    MinMSE = 1


class Int16Method(enum.Enum):
    """Calibration for scales of the form M / 2**N."""

    MinMax = 0


class LayerWiseMethod(enum.Enum):
    """Calibration that tries several percentiles for each tensor."""

    LayerWisePercentile = 0


class ExtendedCalibrationMethod(enum.Enum):
    """Ways to choose a weight's range beside minimum and maximum."""

    MinMSE = 0


class ExtendedQuantType(_Named):
    """Element types beside ONNX Runtime's own."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    QBFP = 9
    QMX = 10

    @property
    def tensor_type(self) -> int:
        """The ONNX element type; block formats have none."""
        return int(getattr(TensorProto, self.name[1:].upper(), TensorProto.UNDEFINED))


VitisQuantType = ExtendedQuantType  # the name in older releases


class ExtendedQuantFormat(_Named):
    """File formats for the extended types."""

    QOperator = 0
    QDQ = 1


class VitisQuantFormat(_Named):
    """Formats of older releases; all of them are Q/DQ files today."""

    QDQ = 2
    FixNeuron = 3
    BFPFixNeuron = 4
    MXFixNeuron = 5


class CalibMethod(enum.Enum):
    """Calibration methods of the newer API."""

    MinMax = 0
    MinMSE = 1
    Percentile = 2
    Entropy = 3
    LayerwisePercentile = 4
    Distribution = 5


class ScaleType(enum.Enum):
    """Which numbers a scale may be."""

    Float32 = 0
    PowerOf2 = 1
    Int16 = 2


class QuantGranularity(enum.Enum):
    """How many scales a tensor has."""

    Tensor = 0
    Channel = 1
    Group = 2


# By name, so that ONNX Runtime's QuantType and the enumeration above mean the same.
_ELEMENT_TYPES = {
    f"Q{word}": word.lower()
    for word in ("Int8", "UInt8", "Int16", "UInt16", "Float16", "BFloat16", "BFP", "MX")
}


def recipe_type(kind: object, where: str) -> str:
    """The recipe's word for a type; 'bfp' and 'mx' stand for a family that the attributes narrow down.

    Raises:
        QuarkConfigError: no such type can be written.
    """
    name = getattr(kind, "name", None)
    found = _ELEMENT_TYPES.get(str(name)) if isinstance(kind, enum.Enum) else None
    if found is None:
        raise QuarkConfigError(
            "The element type cannot be used.",
            where=where,
            observed=kind,
            expected=", ".join(_ELEMENT_TYPES),
            hint="Biases are stored in 32 bits by themselves; other tensors have 8 or 16.",
        )
    return found


def get_tensor_type_from_qType(quant_type: Any) -> int:  # noqa: N802 - the name that scripts import
    """The ONNX element type of any of the type enumerations."""
    return int(quant_type.tensor_type)
