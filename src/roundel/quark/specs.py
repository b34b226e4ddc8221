"""The newer API's words for one tensor and one layer: specs, data types, QLayerConfig."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from roundel.qdq.functions.blocks import WIDTHS
from roundel.quark.config import Settings, classic_key, readable
from roundel.quark.enums import CalibMethod, ExtendedQuantType, QuantGranularity, ScaleType
from roundel.quark.errors import QuarkConfigError, go_on, named
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


def parse_data_type(dtype_name: str | None) -> DataType | None:
    """The data type of that name, as an object.

    Raises:
        QuarkConfigError: there is none.
    """
    return None if dtype_name is None else named("data type", dtype_name, DATA_TYPES)()


_WORDS: Mapping[str, type[enum.Enum]] = {
    "scale_type": ScaleType,
    "calibration_method": CalibMethod,
    "quant_granularity": QuantGranularity,
}


def _word(name: str, value: Any) -> Any:
    """A member of the enumeration for this field, from 'ScaleType.Float32' or 'Float32'."""
    kind = _WORDS.get(name)
    if kind is None or isinstance(value, kind):
        return value
    return named(name, str(value).removeprefix(f"{kind.__name__}."), kind.__members__)


@dataclass(eq=False, repr=False)
class QTensorConfig(Settings):
    """How one kind of tensor is stored and calibrated."""

    symmetric: bool
    scale_type: ScaleType
    calibration_method: CalibMethod
    quant_granularity: QuantGranularity
    data_type: Any

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
        words = {row.name: getattr(self, row.name) for row in dataclasses.fields(self)}
        plain = {name: str(word) if isinstance(word, enum.Enum) else word for name, word in words.items()}
        return {**plain, "data_type": self.kind.__name__}

    @staticmethod
    def from_dict(words: dict[str, Any]) -> QTensorConfig:
        """The spec that `to_dict` wrote down; what it leaves out is as usual for the type.

        Raises:
            QuarkConfigError: it has no data type, or a word is unknown.
        """
        given = words.get("data_type")
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        kind = named("data type", name, DATA_TYPES, "data_type")
        found = {"quant_granularity": QuantGranularity.Tensor, **SPECS[f"{name}Spec"].usual}
        for word, value in words.items():
            named("setting of a spec", word, {**found, "data_type": kind})
            found[word] = _word(word, value)
        return QTensorConfig(**{**found, "data_type": kind})

    def __str__(self) -> str:
        words = ["symmetric" if self.symmetric else "asymmetric", f"{self.scale_type.name} scale"]
        words += [f"per {self.quant_granularity.name.lower()}", self.calibration_method.name]
        return f"{self.kind.__name__}({', '.join(words)})"


@dataclass(eq=False, repr=False)
class _Spec(QTensorConfig):
    """A QTensorConfig with defaults; one subclass for each type."""

    usual: ClassVar[Mapping[str, Any]]

    symmetric: Any = None
    scale_type: Any = None
    calibration_method: Any = None
    quant_granularity: QuantGranularity = QuantGranularity.Tensor
    data_type: Any = None

    def __post_init__(self) -> None:
        for name, value in self.usual.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


def _spec(name: str, stored_as: type[DataType], method: CalibMethod, scale: ScaleType) -> type[_Spec]:
    usual = {"symmetric": not name.startswith("UInt"), "scale_type": scale, "calibration_method": method}
    return type(name, (_Spec,), {"usual": {**usual, "data_type": stored_as}, "__doc__": f"{name}."})


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
    found = SPECS.get(name) or DATA_TYPES.get(name)
    if found is None:
        raise AttributeError(name)
    return found


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
        if None not in (input_tensors, activation) and input_tensors != activation:
            go_on(
                QuarkConfigError(
                    "Both `activation` and `input_tensors` are given, and they differ: the latter counts.",
                    hint="`activation` is the old name of `input_tensors`: keep the latter.",
                )
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
        return {slot: spec.to_dict() for slot in _SLOTS if (spec := getattr(self, slot)) is not None}

    @staticmethod
    def from_dict(words: dict[str, Any]) -> QLayerConfig:
        """The layer config that `to_dict` wrote down."""
        found = {slot: words.get(slot) for slot in (*_SLOTS, "activation")}
        if found["input_tensors"] is not None:
            found["activation"] = None  # the old name beside the new one
        return QLayerConfig(
            **{slot: QTensorConfig.from_dict(spec) for slot, spec in found.items() if spec is not None}
        )

    def __str__(self) -> str:
        rows = [f"{slot}={readable(getattr(self, slot))}" for slot in _SLOTS if getattr(self, slot)]
        return f"QLayerConfig({', '.join(rows)})"


_TUNED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "InstanceNormalization", "LayerNormalization")
_MIXED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.to_dict() if isinstance(value, Settings) else value


def _read(value: Any) -> Any:
    """A layer config out of its dictionary; other values stay."""
    if isinstance(value, Mapping) and value.keys() & {*_SLOTS, "activation"}:
        return QLayerConfig.from_dict(dict(value))
    return value


@dataclass(eq=False, repr=False)
class AlgoConfig(Settings):
    """One algorithm: the classic flags that it stands for, and its options."""

    name: ClassVar[str]  # in a dictionary
    flags: ClassVar[Mapping[str, Any]] = {}
    switches: ClassVar[Mapping[str, Any]] = {}  # options that it stands for itself
    inside: ClassVar[str | None] = None  # the classic option that holds the keys

    def to_dict(self) -> dict[str, Any]:
        """The name and what differs from the default, in values that JSON keeps."""
        usual = {row.name: row.default for row in dataclasses.fields(self)}
        changed = {key: value for key, value in vars(self).items() if value != usual.get(key, value)}
        changed |= {key: value for key, value in vars(self).items() if isinstance(value, Settings)}
        return {"name": self.name, **{key: _plain(value) for key, value in changed.items()}}

    @classmethod
    def from_dict(cls, words: Mapping[str, Any]) -> AlgoConfig:
        """The config that `to_dict` wrote down; what it leaves out is at its default.

        Raises:
            QuarkConfigError: a word is unknown.
        """
        fields = {row.name: row for row in dataclasses.fields(cls)}
        for word in words:
            named(f"setting of {cls.__name__}", word, {**fields, "name": None})
        return cls(**{key: _read(value) for key, value in words.items() if key != "name"})

    def get_options(self) -> dict[str, Any]:
        """The same in the classic API's extra_options."""
        options = {classic_key(name): value for name, value in vars(self).items()}
        return {**self.switches, **({self.inside: options} if self.inside else options)}

    def __repr__(self) -> str:
        usual = {row.name: row.default for row in dataclasses.fields(self)}
        changed = {name: value for name, value in vars(self).items() if value != usual[name]}
        return f"{type(self).__name__}({', '.join(f'{n}={readable(v)}' for n, v in changed.items())})"


@dataclass(eq=False, repr=False)
class SmoothQuantConfig(AlgoConfig):
    """Moves the difficulty of activations into the weights."""

    name: ClassVar[str] = "smooth_quant"
    flags: ClassVar[Mapping[str, Any]] = {"include_sq": True}

    alpha: float = 0.5


@dataclass(eq=False, repr=False)
class CLEConfig(AlgoConfig):
    """Cross-layer equalization."""

    name: ClassVar[str] = "cle"
    flags: ClassVar[Mapping[str, Any]] = {"include_cle": True}

    cle_balance_method: str = "max"
    cle_steps: int = 1
    cle_weight_threshold: float = 0.5
    cle_scale_append_bias: bool = True
    cle_scale_use_threshold: bool = True
    cle_total_layer_diff_threshold: float = 1.9e-7


@dataclass(eq=False, repr=False)
class BiasCorrectionConfig(AlgoConfig):
    """Biases that make up for what rounding moved."""

    name: ClassVar[str] = "bias_correction"
    switches: ClassVar[Mapping[str, Any]] = {"BiasCorrection": True}


@dataclass(eq=False, repr=False)
class GPTQConfig(AlgoConfig):
    """Rounding that compensates the error of one weight with the next."""

    name: ClassVar[str] = "gptq"
    switches: ClassVar[Mapping[str, Any]] = {"UseGPTQ": True}
    inside: ClassVar[str | None] = "GPTQParams"

    bits: int = 8
    block_size: int = 128
    group_size: int = -1
    perc_damp: float = 0.01
    act_order: bool = False
    per_channel: bool = False
    mse: bool = False
    weight_symmetric: bool = True


@dataclass(eq=False, repr=False)
class QuarotConfig(AlgoConfig):
    """Rotations that spread outliers."""

    name: ClassVar[str] = "quarot"
    flags: ClassVar[Mapping[str, Any]] = {"include_rotation": True}

    r_matrix_dim: int = 4096
    use_random_had: bool = False
    r_config_path: str | None = None


@dataclass(eq=False, repr=False)
class _Finetune(AlgoConfig):
    flags: ClassVar[Mapping[str, Any]] = {"include_fast_ft": True}
    inside: ClassVar[str | None] = "FastFinetune"

    optim_device: str = "cpu"
    infer_device: str = "cpu"
    fixed_seed: int = 1705472343
    data_size: int = 1_000_000_000
    batch_size: int = 1
    num_batches: int = 1
    num_iterations: int = 1000
    learning_rate: float = 0.1
    early_stop: bool = False
    output_index: int = 0
    lr_adjust: tuple[float, float] | None = None
    target_op_type: Any = _TUNED
    selective_update: bool = False
    update_bias: bool = False
    output_qdq: bool = False
    drop_ratio: float = 1.0
    mem_opt_level: int = 1
    cache_dir: str | None = None
    log_period: int = 100
    ref_model_path: str | None = None
    dynamic_batch: bool = False
    parallel: bool = False
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20, 2)
    warm_start: float = 0.2
    select_max_mem_layer: bool = False
    num_workers: int = 1
    pin_memory: bool = False
    use_gds: bool = False

    def get_options(self) -> dict[str, Any]:
        """The same in the classic API's extra_options."""
        options = super().get_options()["FastFinetune"]
        return {"FastFinetune": {"OptimAlgorithm": self.name, **options}}


@dataclass(eq=False, repr=False)
class AdaRoundConfig(_Finetune):
    """Learned rounding."""

    name: ClassVar[str] = "adaround"


@dataclass(eq=False, repr=False)
class AdaQuantConfig(_Finetune):
    """Learned weights."""

    name: ClassVar[str] = "adaquant"

    num_iterations: int = 3000
    learning_rate: float = 1e-5


@dataclass(eq=False, repr=False)
class AutoMixprecisionConfig(AlgoConfig):
    """Another precision for the layers that can bear it, or need it."""

    name: ClassVar[str] = "auto_mixprecision"
    flags: ClassVar[Mapping[str, Any]] = {"include_auto_mp": True}
    inside: ClassVar[str | None] = "AutoMixprecision"

    target_layer_config: Any
    target_op_type: Any = _MIXED
    subgraph_json: Any = None
    include_layers: list[str] | None = None
    exclude_layers: list[str] | None = None
    data_size: int = 0
    metric_output_index: int = 0
    metric_distance_fn: Any = None
    metric_evaluate_fn: Any = None
    metric_default: str = "l2"
    metric_threshold: float | None = 0
    metric_optimize_object: str = "speed"
    sensitivity_cache_file: Any = None
    worker_num: int = 1
    dual_quant_nodes: bool = False
    no_input_qdq_shared: bool = False
    shared_param_mode: str = "propagate"


TUNERS: dict[str, type[AlgoConfig]] = {"adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
KINDS: dict[str, type[AlgoConfig]] = {
    kind.__name__: kind
    for kind in (
        *(SmoothQuantConfig, CLEConfig, BiasCorrectionConfig, GPTQConfig, QuarotConfig),
        *(AdaRoundConfig, AdaQuantConfig, AutoMixprecisionConfig),
    )
}
BY_NAME: dict[str, type[AlgoConfig]] = {**KINDS, **{kind.name: kind for kind in KINDS.values()}}
