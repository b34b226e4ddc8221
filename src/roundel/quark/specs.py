"""The newer API's words for one tensor and one layer: specs, data types, QLayerConfig."""

from __future__ import annotations

from typing import Any, ClassVar

from roundel.qdq.functions.blocks import WIDTHS
from roundel.quark.config import Settings, readable
from roundel.quark.enums import CalibMethod, ExtendedQuantType, QuantGranularity, ScaleType
from roundel.quark.errors import QuarkConfigError, named
from roundel.types import BlockType


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


_PLAIN = ("Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Float16", "BFloat16")


def _data_type(name: str, quant_type: ExtendedQuantType, block: str | None = None) -> type[DataType]:
    return type(name, (DataType,), {"quant_type": quant_type, "block": block, "__doc__": f"{name}."})


def _of_block(block: BlockType) -> type[DataType]:
    family = ExtendedQuantType.QBFP if block in WIDTHS else ExtendedQuantType.QMX
    return _data_type(block.name.replace("MXINT", "MXInt"), family, block.value)


DATA_TYPES: dict[str, type[DataType]] = {
    **{name: _data_type(name, ExtendedQuantType[f"Q{name}"]) for name in _PLAIN},
    **{kind.__name__: kind for kind in map(_of_block, BlockType)},
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


def _spec(name: str, stored_as: type[DataType], method: CalibMethod, scale: ScaleType) -> type[_Spec]:
    defaults = (not name.startswith("UInt"), scale, method)
    return type(name, (_Spec,), {"stored_as": stored_as, "defaults": defaults, "__doc__": f"{name}."})


def _usual(kind: type[DataType]) -> type[_Spec]:
    """Integers have ranges, which are cut where that helps; other types have none."""
    whole = "Int" in kind.__name__ and kind.block is None
    method = CalibMethod.Percentile if whole else CalibMethod.MinMax
    return _spec(f"{kind.__name__}Spec", kind, method, ScaleType.Float32)


SPECS: dict[str, type[_Spec]] = {
    **{spec.__name__: spec for spec in map(_usual, DATA_TYPES.values())},
    "XInt8Spec": _spec("XInt8Spec", DATA_TYPES["Int8"], CalibMethod.MinMSE, ScaleType.PowerOf2),
}


def __getattr__(name: str) -> Any:
    """A data type or a spec by its name."""
    if name in SPECS:
        return SPECS[name]
    if name in DATA_TYPES:
        return DATA_TYPES[name]
    raise AttributeError(name)


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
