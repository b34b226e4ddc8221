"""The newer API's words for one tensor and one layer: specs, data types, QLayerConfig."""

from __future__ import annotations

from typing import Any, ClassVar

from roundel.quark.config import Settings, readable
from roundel.quark.enums import CalibMethod, ExtendedQuantType, QuantGranularity, ScaleType
from roundel.quark.errors import QuarkConfigError, named


class DataType:
    """An element type; used as a class, never as an object with state."""

    quant_type: ClassVar[ExtendedQuantType]
    block: ClassVar[str | None] = None

    @property
    def map_onnx_format(self) -> ExtendedQuantType:
        """The classic API's word for it."""
        return self.quant_type

    @property
    def onnx_proto_dtype(self) -> int:
        """The ONNX element type."""
        return self.quant_type.tensor_type


def _data_type(name: str, quant_type: ExtendedQuantType, block: str | None = None) -> type[DataType]:
    return type(name, (DataType,), {"quant_type": quant_type, "block": block, "__doc__": f"{name}."})


Int8 = _data_type("Int8", ExtendedQuantType.QInt8)
UInt8 = _data_type("UInt8", ExtendedQuantType.QUInt8)
Int16 = _data_type("Int16", ExtendedQuantType.QInt16)
UInt16 = _data_type("UInt16", ExtendedQuantType.QUInt16)
Int32 = _data_type("Int32", ExtendedQuantType.QInt32)
UInt32 = _data_type("UInt32", ExtendedQuantType.QUInt32)
Float16 = _data_type("Float16", ExtendedQuantType.QFloat16)
BFloat16 = _data_type("BFloat16", ExtendedQuantType.QBFloat16)
BFP16 = _data_type("BFP16", ExtendedQuantType.QBFP, "bfp16")
MX4 = _data_type("MX4", ExtendedQuantType.QBFP, "mx4")
MX6 = _data_type("MX6", ExtendedQuantType.QBFP, "mx6")
MX9 = _data_type("MX9", ExtendedQuantType.QBFP, "mx9")
MXFP4E2M1 = _data_type("MXFP4E2M1", ExtendedQuantType.QMX, "mxfp4e2m1")
MXFP6E3M2 = _data_type("MXFP6E3M2", ExtendedQuantType.QMX, "mxfp6e3m2")
MXFP6E2M3 = _data_type("MXFP6E2M3", ExtendedQuantType.QMX, "mxfp6e2m3")
MXFP8E5M2 = _data_type("MXFP8E5M2", ExtendedQuantType.QMX, "mxfp8e5m2")
MXFP8E4M3 = _data_type("MXFP8E4M3", ExtendedQuantType.QMX, "mxfp8e4m3")
MXInt8 = _data_type("MXInt8", ExtendedQuantType.QMX, "mxint8")

DATA_TYPES: dict[str, type[DataType]] = {
    kind.__name__: kind
    for kind in (
        *(Int8, UInt8, Int16, UInt16, Int32, UInt32, Float16, BFloat16, BFP16, MX4, MX6, MX9),
        *(MXFP4E2M1, MXFP6E3M2, MXFP6E2M3, MXFP8E5M2, MXFP8E4M3, MXInt8),
    )
}


class QTensorConfig(Settings):
    """How one kind of tensor is stored and calibrated."""

    def __init__(
        self,
        symmetric: bool,
        scale_type: ScaleType,
        calibration_method: CalibMethod,
        quant_granularity: QuantGranularity,
        data_type: Any,
    ) -> None:
        self.symmetric = symmetric
        self.scale_type = scale_type
        self.calibration_method = calibration_method
        self.quant_granularity = quant_granularity
        self.data_type = data_type

    def set_symmetric(self, symmetric: bool) -> None:
        """Change the symmetry."""
        self.symmetric = symmetric

    def set_scale_type(self, scale_type: ScaleType) -> None:
        """Change which numbers a scale may be."""
        self.scale_type = scale_type

    def set_calibration_method(self, calibration_method: CalibMethod) -> None:
        """Change how ranges are chosen."""
        self.calibration_method = calibration_method

    def set_quant_granularity(self, quant_granularity: QuantGranularity) -> None:
        """Change how many scales there are."""
        self.quant_granularity = quant_granularity

    def set_data_type(self, data_type: Any) -> None:
        """Change the element type."""
        self.data_type = data_type

    @property
    def kind(self) -> type[DataType]:
        """The element type as a class, whichever way it was given."""
        return self.data_type if isinstance(self.data_type, type) else type(self.data_type)

    def to_dict(self) -> dict[str, Any]:
        """Plain words that `from_dict` reads back to an equal spec."""
        return {
            "symmetric": self.symmetric,
            "scale_type": self.scale_type.name,
            "calibration_method": self.calibration_method.name,
            "quant_granularity": self.quant_granularity.name,
            "data_type": self.kind.__name__,
        }

    @staticmethod
    def from_dict(words: dict[str, Any]) -> QTensorConfig:
        """The spec that `to_dict` wrote down."""
        return QTensorConfig(
            words["symmetric"],
            ScaleType[words["scale_type"]],
            CalibMethod[words["calibration_method"]],
            QuantGranularity[words["quant_granularity"]],
            named("data type", words["data_type"], DATA_TYPES),
        )

    def __str__(self) -> str:
        words = ["symmetric" if self.symmetric else "asymmetric", f"{self.scale_type.name} scale"]
        words += [f"per {self.quant_granularity.name.lower()}", self.calibration_method.name]
        return f"{self.kind.__name__}({', '.join(words)})"


class _Spec(QTensorConfig):
    """A QTensorConfig with defaults; one subclass for each type."""

    defaults: ClassVar[tuple[bool, ScaleType, CalibMethod]]
    stored_as: ClassVar[type[DataType]]

    def __init__(
        self,
        symmetric: bool | None = None,
        scale_type: ScaleType | None = None,
        calibration_method: CalibMethod | None = None,
        quant_granularity: QuantGranularity = QuantGranularity.Tensor,
        data_type: Any = None,
    ) -> None:
        usual, scale, method = self.defaults
        super().__init__(
            usual if symmetric is None else symmetric,
            scale if scale_type is None else scale_type,
            method if calibration_method is None else calibration_method,
            quant_granularity,
            self.stored_as if data_type is None else data_type,
        )


_SIGNED = (True, ScaleType.Float32, CalibMethod.Percentile)
_UNSIGNED = (False, ScaleType.Float32, CalibMethod.Percentile)
_NO_RANGE = (True, ScaleType.Float32, CalibMethod.MinMax)


def _spec(
    name: str, stored_as: type[DataType], defaults: tuple[bool, ScaleType, CalibMethod] = _NO_RANGE
) -> type[_Spec]:
    return type(name, (_Spec,), {"stored_as": stored_as, "defaults": defaults, "__doc__": f"{name}."})


Int8Spec = _spec("Int8Spec", Int8, _SIGNED)
UInt8Spec = _spec("UInt8Spec", UInt8, _UNSIGNED)
XInt8Spec = _spec("XInt8Spec", Int8, (True, ScaleType.PowerOf2, CalibMethod.MinMSE))
Int16Spec = _spec("Int16Spec", Int16, _SIGNED)
UInt16Spec = _spec("UInt16Spec", UInt16, _UNSIGNED)
Int32Spec = _spec("Int32Spec", Int32, _SIGNED)
UInt32Spec = _spec("UInt32Spec", UInt32, _UNSIGNED)
Float16Spec = _spec("Float16Spec", Float16)
BFloat16Spec = _spec("BFloat16Spec", BFloat16)
BFP16Spec = _spec("BFP16Spec", BFP16)
MX4Spec = _spec("MX4Spec", MX4)
MX6Spec = _spec("MX6Spec", MX6)
MX9Spec = _spec("MX9Spec", MX9)
MXFP4E2M1Spec = _spec("MXFP4E2M1Spec", MXFP4E2M1)
MXFP6E3M2Spec = _spec("MXFP6E3M2Spec", MXFP6E3M2)
MXFP6E2M3Spec = _spec("MXFP6E2M3Spec", MXFP6E2M3)
MXFP8E5M2Spec = _spec("MXFP8E5M2Spec", MXFP8E5M2)
MXFP8E4M3Spec = _spec("MXFP8E4M3Spec", MXFP8E4M3)
MXInt8Spec = _spec("MXInt8Spec", MXInt8)

_SLOTS = ("input_tensors", "weight", "bias", "output_tensors")


class QLayerConfig(Settings):
    """Specs for the tensors around one layer; `activation` is the old name of `input_tensors`."""

    def __init__(
        self,
        input_tensors: QTensorConfig | None = None,
        activation: QTensorConfig | None = None,
        weight: QTensorConfig | None = None,
        bias: QTensorConfig | None = None,
        output_tensors: QTensorConfig | None = None,
    ) -> None:
        if input_tensors is not None and activation is not None:
            raise QuarkConfigError(
                "Both `activation` and `input_tensors` are given.",
                hint="`activation` is the old name of `input_tensors`: keep the latter.",
            )
        self.input_tensors = activation if input_tensors is None else input_tensors
        self.weight = weight
        self.bias = bias
        self.output_tensors = output_tensors

    @property
    def activation(self) -> QTensorConfig | None:
        """The old name of `input_tensors`."""
        return self.input_tensors

    @activation.setter
    def activation(self, spec: QTensorConfig | None) -> None:
        self.input_tensors = spec

    def to_dict(self) -> dict[str, Any]:
        """Plain words that `from_dict` reads back to an equal config."""
        return {slot: None if (spec := getattr(self, slot)) is None else spec.to_dict() for slot in _SLOTS}

    @staticmethod
    def from_dict(words: dict[str, Any]) -> QLayerConfig:
        """The layer config that `to_dict` wrote down."""
        found = {slot: words.get(slot) for slot in (*_SLOTS, "activation")}
        return QLayerConfig(
            **{slot: QTensorConfig.from_dict(spec) for slot, spec in found.items() if spec is not None}
        )

    def __str__(self) -> str:
        rows = [f"{slot}={readable(getattr(self, slot))}" for slot in _SLOTS if getattr(self, slot)]
        return f"QLayerConfig({', '.join(rows)})"
