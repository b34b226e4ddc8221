"""The newer API's algorithm configs: plain records that stand for the classic options of the same meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from roundel.quark.config import Settings, classic_key, readable

_TUNED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "InstanceNormalization", "LayerNormalization")
_MIXED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(eq=False, repr=False)
class AlgoConfig(Settings):
    """One algorithm: the classic flags that it stands for, and its options."""

    flags: ClassVar[Mapping[str, Any]] = {}
    inside: ClassVar[str | None] = None  # the classic option that holds the keys

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, in values that JSON keeps."""
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items()}
        return {"name": type(self).__name__, **plain}

    @classmethod
    def from_dict(cls, words: Mapping[str, Any]) -> AlgoConfig:
        """The config that `to_dict` wrote down."""
        return cls(**{key: value for key, value in words.items() if key != "name"})

    def get_options(self) -> dict[str, Any]:
        """The same in the classic API's extra_options."""
        options = {classic_key(name): value for name, value in vars(self).items()}
        return {self.inside: options} if self.inside else options

    def __repr__(self) -> str:
        usual = {row.name: row.default for row in dataclasses.fields(self)}
        changed = {name: value for name, value in vars(self).items() if value != usual[name]}
        return f"{type(self).__name__}({', '.join(f'{n}={readable(v)}' for n, v in changed.items())})"


@dataclass(eq=False, repr=False)
class SmoothQuantConfig(AlgoConfig):
    """Moves the difficulty of activations into the weights."""

    flags: ClassVar[Mapping[str, Any]] = {"include_sq": True}

    alpha: float = 0.5


@dataclass(eq=False, repr=False)
class CLEConfig(AlgoConfig):
    """Cross-layer equalization."""

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

    def get_options(self) -> dict[str, Any]:
        """The same in the classic API's extra_options."""
        return {"BiasCorrection": True}


@dataclass(eq=False, repr=False)
class GPTQConfig(AlgoConfig):
    """Rounding that compensates the error of one weight with the next."""

    inside: ClassVar[str | None] = "GPTQParams"

    bits: int = 8
    block_size: int = 128
    group_size: int = -1
    perc_damp: float = 0.01
    act_order: bool = False
    per_channel: bool = False
    mse: bool = False
    weight_symmetric: bool = True

    def get_options(self) -> dict[str, Any]:
        """The same in the classic API's extra_options."""
        return {"UseGPTQ": True, **super().get_options()}


@dataclass(eq=False, repr=False)
class QuarotConfig(AlgoConfig):
    """Rotations that spread outliers."""

    flags: ClassVar[Mapping[str, Any]] = {"include_rotation": True}

    r_matrix_dim: int = 4096
    use_random_had: bool = False
    r_config_path: str | None = None


@dataclass(eq=False, repr=False)
class _Finetune(AlgoConfig):
    flags: ClassVar[Mapping[str, Any]] = {"include_fast_ft": True}
    inside: ClassVar[str | None] = "FastFinetune"
    algorithm: ClassVar[str]

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
        return {"FastFinetune": {"OptimAlgorithm": self.algorithm, **options}}


@dataclass(eq=False, repr=False)
class AdaRoundConfig(_Finetune):
    """Learned rounding."""

    algorithm: ClassVar[str] = "adaround"


@dataclass(eq=False, repr=False)
class AdaQuantConfig(_Finetune):
    """Learned weights."""

    algorithm: ClassVar[str] = "adaquant"

    num_iterations: int = 3000
    learning_rate: float = 1e-5


@dataclass(eq=False, repr=False)
class AutoMixprecisionConfig(AlgoConfig):
    """Another precision for the layers that can bear it, or need it."""

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


KINDS: dict[str, type[AlgoConfig]] = {
    kind.__name__: kind
    for kind in (
        *(SmoothQuantConfig, CLEConfig, BiasCorrectionConfig, GPTQConfig, QuarotConfig),
        *(AdaRoundConfig, AdaQuantConfig, AutoMixprecisionConfig),
    )
}
