"""Options about what is done beyond calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from roundel.errors import RoundelError
from roundel.improve.finetune import device_lacks
from roundel.numerics.metrics import DISTANCES, IN_DECIBELS
from roundel.quark import rows
from roundel.quark.errors import QuarkConfigError, go_on
from roundel.quark.request import Request
from roundel.quark.rows import Effect, computed, noted, refused, switched, to_field, unsupported
from roundel.quark.specs import QLayerConfig

_TUNE = "improve.finetune."
_BATCH = f"{_TUNE}batch_size"
_ALGORITHMS = ("adaround", "adaquant")
_ALGORITHM = rows.Kind(rows.one_of(*_ALGORITHMS).words, lambda v: str(v).lower() in _ALGORITHMS)
_NO_LOADER = "rows are kept in memory or mapped files; no loader stands in between."


def _lower(value: Any, request: Request) -> str:
    return str(value).lower()


def _samples_a_step(value: Any, request: Request) -> int:
    """Gradients of several batches are added up: that is one larger batch."""
    given = request.options["FastFinetune"]
    return int(given.get("BatchSize", 1) * given.get("NumBatches", 1))


def _device(key: str, option: str) -> rows.Option:
    """Scripts are written for other machines: what is not there is the CPU, with a note."""

    def work(value: Any, request: Request) -> Effect:
        asked = str(value).lower()
        device, _, others = asked.partition(",")
        try:
            lacks = device_lacks(option, device)
        except ImportError:  # torch itself is missing, which the run will say
            lacks = None
        except RoundelError as error:
            raise QuarkConfigError(error.what, where=key, observed=value, expected=error.expected) from error
        told = [f"{asked} is not there ({lacks}), so the CPU is used"] if lacks else []
        told += ["one device is used, the first that is named"] if others and not lacks else []
        note = f"{key}: {told[0]}" if told else None
        return Effect(recipe={f"{_TUNE}{option}": "cpu" if lacks else device}, note=note)

    return computed(key, "cpu", f"{_TUNE}{option}; the CPU, with a note, where it is not there", work)


FINETUNE = rows.by_key(
    to_field("OptimAlgorithm", "adaround", f"{_TUNE}algorithm", _ALGORITHM, to=_lower),
    _device("OptimDevice", "optim_device"),
    _device("InferDevice", "infer_device"),
    to_field("NumIterations", 1000, f"{_TUNE}iterations"),
    to_field("LearningRate", None, f"{_TUNE}learning_rate", rows.NUMBER),
    to_field("BatchSize", 1, _BATCH, to=_samples_a_step),
    to_field("NumBatches", 1, _BATCH, to=_samples_a_step),
    to_field("DataSize", None, f"{_TUNE}data_size", rows.COUNT),
    to_field("FixedSeed", 1705472343, f"{_TUNE}seed", rows.INTEGER),
    to_field("EarlyStop", False, f"{_TUNE}early_stop"),
    to_field("TargetOpType", None, f"{_TUNE}target_op_types", rows.TEXTS),
    to_field("UpdateBias", True, f"{_TUNE}update_bias"),
    to_field("RegParam", 0.01, f"{_TUNE}reg_param"),
    to_field("BetaRange", (20, 2), f"{_TUNE}beta_range", rows.PAIR),
    to_field("WarmStart", 0.2, f"{_TUNE}warm_start"),
    noted("LRAdjust", None, "one rate serves all layers; what they learn is judged.", rows.PAIR_OR_NOTHING),
    noted("SelectiveUpdate", False, "layers and the whole step are kept where errors fall."),
    noted("OutputQDQ", False, "the loss is that of the layer, before its output is rounded."),
    noted("DropRatio", 1.0, "layers learn from the inputs that they will really see."),
    noted("MemOptLevel", 1, "what does not fit into the memory that is free goes to files.", rows.INTEGER),
    noted("Parallel", False, "each layer sees the tuned layers before it."),
    noted("CacheDir", None, "mapped files lie in the temporary folder (TmpDir)."),
    noted("LogPeriod", 100, "progress is shown layer by layer.", rows.INTEGER),
    refused("RefModelPath", None, "the float model is the one that is quantized.", "Quantize that file."),
    refused("OutputIndex", 0, "all outputs count.", "Leave it at 0."),
    noted("DynamicBatch", False, "a layer learns from rows; the model's batch does not matter."),
    noted("NumWorkers", 1, _NO_LOADER, rows.INTEGER),
    noted("PinMemory", False, _NO_LOADER),
    noted("UseGDS", False, _NO_LOADER),
    noted("SelectMaxMemLayer", False, "memory is measured by what a layer's rows take."),
)

_ONE_TYPE = "a tensor has one type: that of the target layers that read it."
_ALL = "every layer of the target types is chosen, so nothing is measured."
_OWN = ("a recipe holds no functions.", "Use `roundel.auto(…, metric=function)`, or MetricDefault.")


def _target(value: Any, request: Request) -> Effect:
    layer = value if isinstance(value, QLayerConfig) else QLayerConfig()
    inputs, weight = layer.input_tensors, layer.weight
    if inputs is None or weight is None:
        raise QuarkConfigError(
            "Mixed precision takes one type for inputs and one for weights.",
            where="extra_options['AutoMixprecision']['TargetLayerConfig']",
            observed=value,
            expected="QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())",
        )
    moving, stored = (spec.kind.__name__.lower() for spec in (inputs, weight))
    return Effect(recipe={"mixed.type": moving, **({"mixed.weights": stored} if stored != moving else {})})


def _given(request: Request, key: str, default: Any) -> Any:
    return request.asked("AutoMixprecision", {}).get(key, default)


def _mixed_threshold(value: Any, request: Request) -> float | None:
    if value is None:
        why = "an analysis alone makes no model."
        raise unsupported(
            "MetricThreshold", value, why, "Run `roundel sensitivity MODEL --data …`, or give a threshold."
        )
    sign = -1 if _given(request, "MetricDefault", "l2") in IN_DECIBELS else 1
    return sign * value or None


def _of_search(key: str, default: Any, path: str, kind: rows.Kind | None = None) -> rows.Option:
    """A key that says something about the search, where there is one."""

    def work(value: Any, request: Request) -> Effect:
        if path == "verify.samples" and value < 1:
            return Effect()
        if _given(request, "MetricThreshold", 0) != 0:
            return Effect(recipe={path: value})
        return Effect() if value == default else Effect(note=f"{key}: {_ALL}")

    return computed(key, default, f"{path}, with a threshold", work, kind)


def _own(key: str) -> rows.Option:
    """A function of the script's own, which would choose layers; without a threshold, none are chosen."""

    def work(value: Any, request: Request) -> Effect:
        if value is None:
            return rows.NOTHING
        if _given(request, "MetricThreshold", 0) != 0:
            raise unsupported(key, value, *_OWN)
        return Effect(note=f"{key}: {_ALL}")

    return computed(key, None, "refused with a threshold: a recipe holds no functions", work, rows.ANY)


MIXED = rows.by_key(
    computed("TargetLayerConfig", None, "mixed.type, mixed.weights", _target),
    to_field("TargetOpType", None, "mixed.op_types", rows.TEXTS),
    to_field("MetricThreshold", 0, "mixed.threshold", rows.NUMBER_OR_NONE, to=_mixed_threshold),
    _of_search("MetricDefault", "l2", "mixed.metric", rows.one_of(*DISTANCES)),
    _of_search("MetricOptimizeObject", "speed", "mixed.goal", rows.one_of("speed", "quality")),
    _of_search("MetricOutputIndex", 0, "mixed.output"),
    to_field("IncludeLayers", None, "mixed.include", rows.TEXTS),
    to_field("ExcludeLayers", None, "mixed.exclude", rows.TEXTS),
    _of_search("DataSize", 0, "verify.samples"),
    refused("SubgraphJson", None, "layers are tried one by one.", "Name them in IncludeLayers."),
    _own("MetricDistanceFn"),
    _own("MetricEvaluateFn"),
    noted("SensitivityCacheFile", None, "errors are measured anew in each run."),
    noted("WorkerNum", 1, "one model is tried at a time.", rows.INTEGER),
    noted("DualQuantNodes", False, _ONE_TYPE),
    noted("NoInputQDQShared", False, _ONE_TYPE),
    noted("SharedParamMode", "propagate", "a shared weight has one type for all its readers.", rows.ANY),
)


def nested_effects(key: str, table: rows.Table, given: Mapping[str, Any], request: Request) -> Effect:
    """What the keys of a nested table do together, in the order of the rows.

    Raises:
        QuarkConfigError: a value is wrong.
    """
    for word in given:
        if word not in table:
            what, where = f"There is no option '{word}': it does nothing.", f"extra_options['{key}']"
            go_on(QuarkConfigError.unknown(what, word, sorted(table), where=where))
    effects = [row.effect(given[word], request) for word, row in table.items() if word in given]
    recipe = {path: value for effect in effects for path, value in effect.recipe.items()}
    notes = [effect.note for effect in effects if effect.note]
    return Effect(recipe=recipe, note="; ".join(notes) or None)


_EQUALIZE = "improve.equalize."
_MOST_STEPS = 20
_USUAL_CHANGES = (2e-7, 1.9e-7)


def _finetune(value: Any, request: Request) -> Effect:
    found = nested_effects("FastFinetune", FINETUNE, value, request)
    if request.config.include_fast_ft:
        return found
    note = "FastFinetune is given, so the model is fine-tuned, although include_fast_ft is not set"
    return replace(found, note=f"{found.note}; {note}" if found.note else note)


def _steps(value: int, request: Request) -> int | None:
    """-1 means until nothing changes; 1, the default, leaves Roundel its own number."""
    return None if value == 1 else _MOST_STEPS if value < 1 else value


def _threshold(value: float, request: Request) -> float | None:
    return None if value in _USUAL_CHANGES else value


def _bias_correction(value: Any, request: Request) -> Effect:
    """Biases are fitted where rounding is chosen, layer by layer; those of short floats and blocks apart."""
    whole = request.integer_activations and request.integer_weights
    return Effect(recipe={"effort": request.effort, "improve.rounding": whole} if value else {})


def _details(key: str, switch: str, table: rows.Table) -> rows.Option:
    """A nested table that counts where a switch is on."""

    def work(value: Any, request: Request) -> Effect:
        found = nested_effects(key, table, value, request)
        return found if request.asked(switch) else Effect(note=f"{key} counts only with {switch}=True")

    return computed(key, {}, "weight_only.*", work)


def _gptq_group(value: Any, request: Request) -> Effect:
    if value == -1:
        return Effect(note="GroupSize -1: weights share scales in groups of 128, not in whole channels")
    return Effect(recipe={"weight_only.group_size": value})


GPTQ = rows.by_key(
    to_field("Bits", 8, "weight_only.bits"),
    computed("GroupSize", -1, "weight_only.group_size", _gptq_group),
    to_field("WeightSymmetric", True, "weight_only.symmetric"),
    to_field("PercDamp", 0.01, "weight_only.percdamp"),
    to_field("ActOrder", False, "weight_only.act_order"),
    to_field("MSE", False, "weight_only.range", to=lambda value, _: "mse" if value else "minmax"),
    noted("PerChannel", False, "groups are finer than channels."),
    noted("BlockSize", 128, "the equations of a layer are solved as a whole.", rows.INTEGER),
)


def _few_bits_algorithm(value: str, request: Request) -> Effect:
    words = {"DEFAULT": "round", "GPTQ": "gptq", "HQQ": "round"}
    if value not in words:
        why = "weights are rounded to the nearest code or by GPTQ."
        raise unsupported("MatMulNBitsParams", value, why, "Use 'DEFAULT', 'GPTQ' or 'HQQ'.")
    note = "Algorithm HQQ: scale and zero point of each group are searched by squared error"
    hqq = {"weight_only.symmetric": False, "weight_only.range": "mse"} if value == "HQQ" else {}
    return Effect({"weight_only.algorithm": words[value], **hqq}, note=note if hqq else None)


FEW_BITS = rows.by_key(
    to_field("GroupSize", 128, "weight_only.group_size"),
    to_field("Symmetric", True, "weight_only.symmetric"),
    to_field("Bits", 4, "weight_only.bits"),
    to_field("AccuracyLevel", 0, "weight_only.accuracy_level"),
    computed("Algorithm", "DEFAULT", "weight_only.algorithm", _few_bits_algorithm, rows.TEXT),
)


_FOUND = "the residual stream and its size are found in the graph."
_ANY_SIZE = (
    "channels of any size are balanced, relative to the largest of their layer.",
    "Leave it out, or set include_cle=False.",
)
_GPTQ_FIELDS = {"weight_only.algorithm": "gptq", "weight_only.format": "qdq"}

ALGORITHMS = (
    computed("FastFinetune", {}, "improve.finetune.*", _finetune),
    to_field("CLESteps", 1, f"{_EQUALIZE}steps", rows.INTEGER, to=_steps),
    noted("CLEBalanceMethod", "max", "channels are balanced by their largest values.", rows.TEXT),
    refused("CLEWeightThreshold", 0.5, *_ANY_SIZE),
    to_field("CLEScaleAppendBias", True, f"{_EQUALIZE}append_bias"),
    noted("CLEScaleUseThreshold", True, "ranges are relative, so no threshold is needed."),
    to_field("CLETotalLayerDiffThreshold", 2e-7, f"{_EQUALIZE}threshold", to=_threshold),
    computed("BiasCorrection", False, "improve.rounding", _bias_correction),
    # Weights of MatMul and Gemm in few bits, rounded by GPTQ; activations stay float.
    switched("UseGPTQ", False, "mode, weight_only.algorithm", _GPTQ_FIELDS),
    _details("GPTQParams", "UseGPTQ", GPTQ),
    to_field("SmoothAlpha", 0.5, "improve.smooth.alpha"),
    noted("RMatrixDim", 4096, _FOUND),
    noted("RConfigPath", None, _FOUND, rows.PATH),
    noted("UseRandomHad", False, "the signs of the matrix are random, by a seed."),
    switched("UseMatMulNBits", False, "mode", {"mode": "weight_only"}),
    _details("MatMulNBitsParams", "UseMatMulNBits", FEW_BITS),
    computed("AutoMixprecision", {}, "mixed.*", partial(nested_effects, "AutoMixprecision", MIXED)),
)
