"""The classic config: a plain record of what a script asks for. Nothing here is ever changed by a run."""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roundel.errors import did_you_mean
from roundel.quark.enums import CalibrationMethod, QuantFormat, QuantType
from roundel.quark.errors import QuarkConfigError, go_on

_ALWAYS_SHOWN = ("calibrate_method", "quant_format", "activation_type", "weight_type")


class Settings(ABC):
    """What scripts write down: compared by what it says, hashed as an object, since it may be changed."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """In plain words."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.to_dict() == other.to_dict()

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return str(self)


@dataclass
class QuantizationConfig:
    """How to quantize: the fields, names and defaults of the classic API.

    `preset` is the name that `get_default_config` was asked for, None for a config written by hand.
    """

    calibrate_method: Any = CalibrationMethod.MinMax
    quant_format: Any = QuantFormat.QDQ
    activation_type: Any = QuantType.QInt8
    weight_type: Any = QuantType.QInt8
    input_nodes: list[str] = field(default_factory=list)
    output_nodes: list[str] = field(default_factory=list)
    op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_quantize: list[str] = field(default_factory=list)
    extra_op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    subgraphs_to_exclude: list[Any] = field(default_factory=list)
    specific_tensor_precision: bool = False
    execution_providers: list[str] = field(default_factory=lambda: ["CPUExecutionProvider"])
    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_dynamic_quant: bool = False
    use_external_data_format: bool = False
    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False
    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = True
    include_auto_mp: bool = False
    include_fast_ft: bool = False
    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False
    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: int | None = None
    extra_options: dict[str, Any] = field(default_factory=dict)
    enable_dpu: bool = field(default=False, kw_only=True)
    preset: str | None = field(default=None, kw_only=True, compare=False)

    def __setattr__(self, name: str, value: object) -> None:
        # A misspelt setting is kept and never read.
        if name not in self.__dataclass_fields__:
            what = f"QuantizationConfig has no setting '{name}': it does nothing."
            go_on(QuarkConfigError(what, hint=did_you_mean(name, self.__dataclass_fields__)))
        object.__setattr__(self, name, value)

    def __str__(self) -> str:
        usual = QuantizationConfig()
        rows = [(row.name, getattr(self, row.name)) for row in dataclasses.fields(self)]
        told = [row for row in rows if row[0] in _ALWAYS_SHOWN or row[1] != getattr(usual, row[0])]
        lines = [f"  {name} = {readable(value, 2)}" for name, value in told]
        return "\n".join(["QuantizationConfig(", *lines, "  # all else at its default", ")"])

    __repr__ = __str__


@dataclass
class Config:
    """A classic config as `ModelQuantizer` takes it."""

    global_quant_config: QuantizationConfig

    def __str__(self) -> str:
        return str(self.global_quant_config)

    __repr__ = __str__


_CAPITALS = frozenset({"cle", "fp16", "fp32", "gds", "lr", "mse", "nchw", "nhwc", "npu", "qdq"})


def classic_key(field: str) -> str:
    """The key of a field in extra_options: 'lr_adjust' is 'LRAdjust'."""
    if field == "alpha":
        return "SmoothAlpha"
    return "".join(part.upper() if part in _CAPITALS else part.capitalize() for part in field.split("_"))


def readable(value: object, indent: int = 0) -> str:
    """A value as one would write it: members by name, nested options one to a line."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        pad = " " * (indent + 2)
        rows = [f"{pad}{readable(key)}: {readable(inner, indent + 2)}," for key, inner in value.items()]
        return "\n".join(["{", *rows, " " * indent + "}"])
    if isinstance(value, list | tuple):
        inner = ", ".join(readable(item, indent) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    return repr(value)
