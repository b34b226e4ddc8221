"""What the fields of a config mean in a recipe, before its extra options have their say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from roundel.qdq.functions.blocks import ELEMENT_OF, WIDTHS
from roundel.quark import enums
from roundel.quark.config import QuantizationConfig, classic_key
from roundel.quark.errors import QuarkConfigError
from roundel.quark.presets import config_names, get_default_config
from roundel.recipe.load import load_preset
from roundel.recipe.settings import Prepare
from roundel.types import BlockType, QType

Words = Mapping[Any, str]

_ROUNDING = {0: "half_away", 1: "half_up", 2: "half_even"}
_ELEMENTS: Words = {element: block.value for block, element in ELEMENT_OF.items()}
_WIDTHS: Words = {width: block.value for block, width in WIDTHS.items() if block is not BlockType.BFP16}
_USUAL = {block.value: {"bit_width": width} for block, width in WIDTHS.items()}
_FIELDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    **{name: (name, int) for name in ("block_size", "axis", "bit_width")},
    **{name: (name, int) for name in ("sub_block_size", "sub_block_shift_bits")},
    "rounding_mode": ("rounding", _ROUNDING.__getitem__),
    "use_compiler_version_cpu_kernel": ("compiler", bool),
    "convert_to_bfloat_before_bfp": ("bfloat16_first", bool),
}


# AMD's two block operators: the option with its attributes, and the one of them that names the format.
_FAMILIES = {"bfp": "BFPAttributes", "mx": "MXAttributes"}
_NAMING = {"BFPAttributes": "bfp_method", "MXAttributes": "element_dtype"}
BLOCK_OPTIONS = tuple(_NAMING)


def _format(option: str, given: Mapping[str, Any]) -> str | None:
    if option == "MXAttributes":
        return _ELEMENTS.get(given.get("element_dtype", "int8"))
    if given.get("bfp_method", "to_bfp") == "to_bfp":
        return "bfp16"
    return _WIDTHS.get(given.get("bit_width", 16), "mx9")


def block_type(word: str, options: Mapping[str, Any]) -> str:
    """The recipe's block format for a family and its attributes; other types pass through.

    Raises:
        QuarkConfigError: there is no such format.
    """
    option = _FAMILIES.get(word)
    if option is None:
        return word
    given, where = options.get(option) or {}, f"extra_options['{option}']"
    found, asked = _format(option, given), given.get("element_dtype")
    if found is None:
        what = "There is no such block format."
        raise QuarkConfigError.unknown(what, asked, sorted(_ELEMENTS), where=where, observed=asked)
    return found


def block_values(option: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Recipe values for the attributes that do more than name the format.

    Raises:
        QuarkConfigError: an attribute or its value is unknown.
    """
    usual, where = _USUAL.get(_format(option, given) or "", {}), f"extra_options['{option}']"
    for name, value in given.items():
        if name == _NAMING[option] or usual.get(name) == value:
            continue
        if name not in _FIELDS:
            known = sorted((*_FIELDS, _NAMING[option]))
            raise QuarkConfigError.unknown(f"Block formats have no '{name}'.", name, known, where=where)
        path, made = _FIELDS[name]
        try:
            yield f"blocks.{path}", made(value)
        except (KeyError, ValueError, TypeError) as error:
            what = f"The block attribute '{name}' cannot be {value!r}."
            raise QuarkConfigError(what, where=where) from error


# The newer API's spellings of the classic fields; both are understood in extra_options.
FIELD_OPTIONS: Mapping[str, str] = {
    classic_key(name): name
    for name in (
        *("optimize_model", "convert_fp16_to_fp32", "convert_nchw_to_nhwc", "op_types_to_quantize"),
        *("nodes_to_quantize", "extra_op_types_to_quantize", "input_nodes", "output_nodes"),
        *("specific_tensor_precision", "enable_npu_cnn", "enable_npu_transformer", "execution_providers"),
        *("debug_mode", "print_summary", "ignore_warnings", "crypto_mode"),
    )
}

# Method: how ranges are chosen, which numbers a scale may be, and whether |x| is cut as a whole.
_METHODS: Mapping[Any, tuple[str, str, bool]] = {
    enums.CalibrationMethod.MinMax: ("minmax", "float", True),
    enums.CalibrationMethod.Entropy: ("entropy", "float", False),
    enums.CalibrationMethod.Percentile: ("percentile", "float", True),
    enums.CalibrationMethod.Distribution: ("distribution", "float", True),
    enums.LayerWiseMethod.LayerWisePercentile: ("layerwise_percentile", "float", True),
    enums.PowerOfTwoMethod.NonOverflow: ("minmax", "power_of_two", True),
    enums.PowerOfTwoMethod.MinMSE: ("mse", "power_of_two", True),
    enums.Int16Method.MinMax: ("minmax", "int16", True),
    enums.ExtendedCalibrationMethod.MinMSE: ("mse", "float", True),
}
_OLD_BLOCK_FORMATS = {
    enums.VitisQuantFormat.BFPFixNeuron: enums.ExtendedQuantType.QBFP,
    enums.VitisQuantFormat.MXFixNeuron: enums.ExtendedQuantType.QMX,
}
INTEGERS = frozenset(kind.value for kind in QType)
_FLOATS = frozenset({"bfloat16", "float16"})


def normalised(config: QuantizationConfig) -> QuantizationConfig:
    """A copy in which every setting stands in one place: fields in fields, options in options."""
    options = dict(config.extra_options or {})
    lifted = {name: options.pop(key) for key, name in FIELD_OPTIONS.items() if key in options}
    result = replace(config, **lifted, extra_options=options)
    if result.enable_dpu:
        result = replace(result, enable_npu_cnn=True, enable_dpu=False)
    if result.quant_format in _OLD_BLOCK_FORMATS:
        kind = _OLD_BLOCK_FORMATS[result.quant_format]
        result = replace(result, activation_type=kind, weight_type=kind)
    if isinstance(result.quant_format, enums.VitisQuantFormat):
        result = replace(result, quant_format=enums.ExtendedQuantFormat.QDQ)
    return result


@dataclass(frozen=True)
class Request:
    """A normalised config, and what follows from its fields."""

    config: QuantizationConfig

    @property
    def options(self) -> Mapping[str, Any]:
        """The extra options."""
        return self.config.extra_options

    def asked(self, key: str, default: Any = False) -> Any:
        """The value of an option."""
        value = self.options.get(key)
        return default if value is None else value

    @cached_property
    def method(self) -> tuple[str, str, bool]:
        """Calibration method, scale, and whether ranges are cut symmetrically."""
        found = _METHODS.get(self.config.calibrate_method)
        if found is None:
            raise QuarkConfigError(
                "The calibration method is unknown.",
                where="calibrate_method",
                observed=self.config.calibrate_method,
                expected=", ".join(f"{type(m).__name__}.{m.name}" for m in _METHODS),
            )
        return found

    @property
    def scale(self) -> str:
        """Which numbers scales may be."""
        return "int16" if self.asked("Int16Scale") else self.method[1]

    @cached_property
    def activation(self) -> str:
        """The activations' element type in the recipe's words."""
        return block_type(enums.recipe_type(self.config.activation_type, "activation_type"), self.options)

    @cached_property
    def weight(self) -> str:
        """The weights' element type in the recipe's words."""
        return block_type(enums.recipe_type(self.config.weight_type, "weight_type"), self.options)

    @property
    def integer_activations(self) -> bool:
        """Whether activations are integers."""
        return self.activation in INTEGERS

    @property
    def integer_weights(self) -> bool:
        """Whether weights are integers."""
        return self.weight in INTEGERS

    @property
    def short_floats(self) -> bool:
        """Whether any tensor is stored as bfloat16 or float16."""
        return bool({self.activation, self.weight} & _FLOATS)

    @property
    def block_activations(self) -> bool:
        """Whether activations are stored in blocks."""
        return self.activation not in INTEGERS | _FLOATS

    @property
    def blocks(self) -> bool:
        """Whether any tensor is stored in blocks."""
        return self.block_activations or self.weight not in INTEGERS | _FLOATS

    @property
    def few_bits(self) -> bool:
        """Weights of MatMul in few bits, everything else in float."""
        return bool(self.asked("UseMatMulNBits") or self.asked("UseGPTQ"))

    @property
    def extended(self) -> bool:
        """The extended format: com.microsoft Q/DQ nodes and the longer operator list."""
        forms = enums.ExtendedQuantFormat | enums.VitisQuantFormat
        # Overrides of single tensors have always asked for it, too.
        return isinstance(self.config.quant_format, forms) or bool(self.options.get("TensorQuantOverrides"))

    @property
    def npu(self) -> bool:
        """The NPU's 8-bit engine: power-of-two scales, shift limits, its own arithmetic."""
        return self.config.enable_npu_cnn and not self.extended and self.scale == "power_of_two"

    @property
    def tuned(self) -> bool:
        """Whether the model is fine-tuned; options for it are enough to ask for it."""
        return self.config.include_fast_ft or "FastFinetune" in self.options

    @property
    def effort(self) -> str:
        """Accuracy by default; short floats and blocks get along without data, too (`without_data`)."""
        return "high" if self.tuned else "fast"

    @property
    def equalizes(self) -> bool:
        """Whether equalization is asked for: a preset for floats that was named has not, though it is on."""
        return self.config.include_cle and (self.integer_weights or self.config.preset is None)

    @property
    def casts(self) -> bool:
        """Whether bfloat16 tensors are written as Cast pairs."""
        return bool(self.asked("BF16QDQToCast") or self.asked("EnableVaimlBF16"))


_UNSIGNED = frozenset({"uint8", "uint16"})
ALIGNED = ("align_concat", "align_pool", "align_pad", "align_slice")
LIMITS = (
    *("adjust_shift_cut", "adjust_shift_bias", "adjust_shift_read", "adjust_shift_write"),
    *("adjust_hard_sigmoid", "adjust_shift_swish"),
)
_ENGINE = (
    *LIMITS,
    *("leaky_relu", "sigmoid_to_hard_sigmoid", "hard_sigmoid", "average_pool", "reduce_mean"),
)
_CONVERSIONS = (
    *("split_to_slice", "batch_norm_to_conv"),
    *("reduce_mean_to_global_average_pool", "split_large_pools"),
)


# Nothing of the NPU's is needed where only MatMul changes.
_KEPT_AS_IS = ("decompose_hard_swish", "explicit_conv_attributes", "unshare_biases")
# Presets of the documents that stand for a format, and the preset that shows how its ranges are best chosen.
_OWN_RANGES = {"A8W8": "a8w8", "A16W8": "a16w8", "INT8_CNN_DEFAULT": "a8w8"}
# What counts where activations are measured at run time.
_GRAPH = frozenset({"output.opset", *(f"prepare.{name}" for name in Prepare.model_fields)})
_RUN_TIME = {"weights.symmetric", "weights.type", "placement.matmul_const_only", "selection.all_op_types"}


def counts(path: str, request: Request) -> bool:
    """Whether a recipe value means anything in the config's mode."""
    if request.config.use_dynamic_quant:
        return path in _GRAPH | _RUN_TIME
    if request.few_bits:
        return path in _GRAPH or path.split(".")[0] in ("mode", "weight_only", "data")
    return True


def base_values(request: Request) -> dict[str, Any]:
    """Recipe values by dotted name; later ones win."""
    parts = [_numbers, _calibration, _placement, _preparation, _steps]
    if request.config.use_dynamic_quant:
        parts = [_dynamic]
    elif request.few_bits:
        parts = [_few_bits]
    return dict(pair for part in (_identity, *parts) for pair in part(request))


Values = Iterator[tuple[str, Any]]


def _identity(request: Request) -> Values:
    yield "name", (request.config.preset or "quark script").casefold()
    yield "output.external_data", request.config.use_external_data_format


def _numbers(request: Request) -> Values:
    config = request.config
    yield "activations.type", request.activation
    yield "weights.type", request.weight
    if request.integer_activations:
        yield "activations.symmetric", request.asked("ActivationSymmetric", False)
        yield "activations.scale", request.scale
    if request.integer_weights:
        yield "weights.scale", request.scale
        yield from _integer_weights(request)
    elif config.per_channel or config.reduce_range:
        raise QuarkConfigError(
            "per_channel and reduce_range are about integers.",
            observed=f"weights in {request.weight}",
            hint="Leave both at False for this type.",
        )
    if request.integer_activations and request.integer_weights:
        yield "bias.type", "int8" if request.npu else "int32"
    else:
        yield "bias.type", "weights"


def _integer_weights(request: Request) -> Values:
    yield "weights.symmetric", request.asked("WeightSymmetric", request.weight not in _UNSIGNED)
    yield "weights.per_channel", request.config.per_channel
    yield "weights.reduce_range", request.config.reduce_range


def _calibration(request: Request) -> Values:
    if request.integer_weights:
        # A weight's range is chosen by error unless nothing may be cut off.
        keeps_all = request.config.calibrate_method is enums.PowerOfTwoMethod.NonOverflow
        yield "weights.method", "minmax" if keeps_all else "mse"
    if not request.integer_activations and not request.asked("ActivationScaled"):
        return
    method, _, cut = request.method
    yield "calibration.method", method
    yield "calibration.symmetric_range", cut
    yield from _chosen_by_name(request)


def _chosen_by_name(request: Request) -> Values:
    """Ranges as Roundel's own preset chooses them, for a preset that was asked for by name.

    A name stands for a format. Somebody who writes CalibrationMethod.MinMax into a config gets that.
    """
    config = request.config
    stem = str(config.preset).removesuffix("_ADAROUND").removesuffix("_ADAQUANT")
    if stem not in _OWN_RANGES or config.preset not in config_names() or request.asked("CalibMovingAverage"):
        return
    if get_default_config(config.preset).calibrate_method is config.calibrate_method:
        ranges = load_preset(_OWN_RANGES[stem]).calibration.model_dump(exclude_defaults=True)
        yield from ((f"calibration.{name}", value) for name, value in ranges.items())


def _placement(request: Request) -> Values:
    config = request.config
    whole = config.enable_npu_cnn or request.extended
    if config.enable_npu_transformer:
        yield "placement.operators", "matmul"
        yield "placement.matmul_const_only", True
    else:
        yield "placement.operators", "extended" if whole else "standard"
    if request.integer_activations or request.integer_weights:
        yield "placement.domain", "com.microsoft" if request.extended else "ai.onnx"
    # The plain formats leave out a Relu that saturation replaces; the extended one only when told to.
    if request.integer_activations and not request.extended and not config.enable_npu_transformer:
        yield "placement.fold_relu", not request.asked("ActivationSymmetric", False)
    yield "placement.quantize_passthrough_inputs", False
    if request.block_activations:
        yield "placement.fuse_activations", False
    if request.npu:
        yield from ((f"placement.{name}", True) for name in ALIGNED)
        yield from ((f"npu.{name}", True) for name in _ENGINE)


def _preparation(request: Request) -> Values:
    config = request.config
    hardware = config.enable_npu_cnn or config.enable_npu_transformer
    if hardware or (request.extended and not request.casts):
        yield from ((f"prepare.{name}", True) for name in _CONVERSIONS)
    if request.npu:
        yield "prepare.unshare_weights", True
    yield "prepare.fold_batch_norm", config.optimize_model or request.asked("SimplifyModel", True)
    yield "prepare.decompose_hard_swish", config.optimize_model
    yield "prepare.nchw_to_nhwc", config.convert_nchw_to_nhwc


def _steps(request: Request) -> Values:
    """Accuracy by default: ranges, rounding and biases by error, equalization where the config has it."""
    integers = request.integer_weights
    yield "effort", request.effort
    for part in ("front_end", "detection_head", "delicate", "carriers"):
        yield f"improve.{part}", not request.integer_activations  # the same placement
    if request.integer_activations:
        yield "improve.goal", 0.0  # and the same types
    yield "improve.rounding", integers and request.integer_activations
    yield "improve.ranges", request.integer_activations
    yield "improve.equalize.enabled", request.equalizes
    yield "improve.smooth.enabled", request.config.include_sq
    yield "improve.smooth.insert", request.config.include_sq
    yield "improve.rotate.enabled", request.config.include_rotation
    if request.tuned:
        yield "improve.finetune.algorithm", "adaround" if integers else "adaquant"


def _few_bits(request: Request) -> Values:
    yield "mode", "weight_only"
    yield "weight_only.bits", 4 if request.asked("UseMatMulNBits") else 8
    yield from ((f"prepare.{name}", False) for name in _KEPT_AS_IS)


def _dynamic(request: Request) -> Values:
    yield "mode", "dynamic"
    yield "weights.type", request.weight
    yield from _integer_weights(request)
    yield "selection.op_types", ("Conv", "Gemm", "MatMul")
    yield "placement.matmul_const_only", True
