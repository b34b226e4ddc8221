"""Options about what is done beyond calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roundel.numerics.metrics import DISTANCES, IN_DECIBELS
from roundel.quark.errors import QuarkConfigError, expected_names
from roundel.quark.request import Request
from roundel.quark.rows import (
    ANY,
    COUNT,
    INTEGER,
    NOTHING,
    NUMBER,
    PATH,
    SWITCH,
    TABLE,
    TEXT,
    TEXTS,
    Effect,
    Kind,
    Option,
    always,
    computed,
    refusal,
    refused_option,
    switched,
    to_field,
    to_word,
)
from roundel.quark.specs import QLayerConfig

_TUNE = "improve.finetune."
_ALGORITHMS = ("adaround", "adaquant")
_PAIR = Kind("a pair of numbers", lambda v: isinstance(v, list | tuple) and len(v) == 2)
_NO_LOADER = "rows are kept in memory or mapped files; no loader stands in between."


def _field(key: str, default: Any, kind: Kind, name: str) -> Option:
    return to_field(key, default, kind, _TUNE + name)


def _algorithm(value: Any, request: Request) -> Effect:
    if str(value).lower() not in _ALGORITHMS:
        raise QuarkConfigError(
            "There is no such fine-tuning.",
            where="extra_options['FastFinetune']['OptimAlgorithm']",
            observed=value,
            **expected_names(str(value), _ALGORITHMS),
        )
    return Effect(recipe={f"{_TUNE}algorithm": str(value).lower()})


def _device(key: str, name: str) -> Option:
    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe={_TUNE + name: str(value).lower()})

    return computed(key, "cpu", TEXT, _TUNE + name, work)


_BATCH = f"{_TUNE}batch_size"


def _samples_a_step(value: Any, request: Request) -> Effect:
    """Gradients of several batches are added up: that is one larger batch."""
    given = request.config.extra_options["FastFinetune"]
    return Effect(recipe={_BATCH: given.get("BatchSize", 1) * given.get("NumBatches", 1)})


FINETUNE: Mapping[str, Option] = {
    row.key: row
    for row in (
        computed("OptimAlgorithm", "adaround", TEXT, f"{_TUNE}algorithm", _algorithm),
        _device("OptimDevice", "optim_device"),
        _device("InferDevice", "infer_device"),
        _field("NumIterations", 1000, COUNT, "iterations"),
        _field("LearningRate", None, NUMBER, "learning_rate"),
        computed("BatchSize", 1, COUNT, _BATCH, _samples_a_step),
        computed("NumBatches", 1, COUNT, f"{_BATCH}, times BatchSize", _samples_a_step),
        _field("DataSize", None, COUNT, "data_size"),
        _field("FixedSeed", 1705472343, INTEGER, "seed"),
        _field("EarlyStop", False, SWITCH, "early_stop"),
        _field("TargetOpType", None, TEXTS, "target_op_types"),
        _field("UpdateBias", True, SWITCH, "update_bias"),
        _field("RegParam", 0.01, NUMBER, "reg_param"),
        _field("BetaRange", (20, 2), _PAIR, "beta_range"),
        _field("WarmStart", 0.2, NUMBER, "warm_start"),
        always("LRAdjust", None, _PAIR, "one rate serves all layers; what they learn is judged."),
        always("SelectiveUpdate", False, SWITCH, "layers and the whole step are kept where errors fall."),
        always("OutputQDQ", False, SWITCH, "the loss is that of the layer, before its output is rounded."),
        always("DropRatio", 1.0, NUMBER, "layers learn from the inputs that they will really see."),
        always("MemOptLevel", 1, INTEGER, "what does not fit into the memory that is free goes to files."),
        always("Parallel", False, SWITCH, "each layer sees the tuned layers before it."),
        always("CacheDir", None, ANY, "mapped files lie in the temporary folder (TmpDir)."),
        always("LogPeriod", 100, INTEGER, "progress is shown layer by layer."),
        refused_option(
            "RefModelPath",
            None,
            "the float model is the one that is quantized.",
            "Quantize the model that the file holds.",
        ),
        refused_option("OutputIndex", 0, "all outputs count.", "Leave it at 0.", INTEGER),
        always("DynamicBatch", False, SWITCH, "a layer learns from rows; the model's batch does not matter."),
        always("NumWorkers", 1, INTEGER, _NO_LOADER),
        always("PinMemory", False, SWITCH, _NO_LOADER),
        always("UseGDS", False, SWITCH, _NO_LOADER),
        always("SelectMaxMemLayer", False, SWITCH, "memory is measured by what a layer's rows take."),
    )
}


_KEY = "AutoMixprecision"
_ONE_TYPE = "a tensor has one type: that of the target layers that read it."
_ALL = "every layer of the target types is chosen, so nothing is measured."
_OWN = "a recipe holds no functions."
_NUMBER = Kind(
    "a number or None", lambda v: v is None or (isinstance(v, int | float) and not isinstance(v, bool))
)
_METRIC = Kind(" or ".join(map(repr, DISTANCES)), lambda v: isinstance(v, str) and v in DISTANCES)
_GOAL = Kind("'speed' or 'quality'", lambda v: v in ("speed", "quality"))


def _target(value: Any, request: Request) -> Effect:
    inputs = value.input_tensors if isinstance(value, QLayerConfig) else None
    weight = value.weight if isinstance(value, QLayerConfig) else None
    if inputs is None or weight is None:
        raise QuarkConfigError(
            "Mixed precision takes one type for inputs and one for weights.",
            where=f"extra_options['{_KEY}']['TargetLayerConfig']",
            observed=value,
            expected="QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())",
        )
    moving, stored = (spec.kind.__name__.lower() for spec in (inputs, weight))
    return Effect(recipe={"mixed.type": moving, **({"mixed.weights": stored} if stored != moving else {})})


def _given(request: Request, key: str, default: Any) -> Any:
    return dict(request.config.extra_options.get(_KEY) or {}).get(key, default)


def _searched(request: Request) -> bool:
    return bool(_given(request, "MetricThreshold", 0) != 0)


def _mixed_threshold(value: Any, request: Request) -> Effect:
    if value is None:
        raise refusal(
            "MetricThreshold",
            value,
            "an analysis alone makes no model.",
            "Run `roundel sensitivity MODEL --data …`, or give a threshold.",
        )
    if value == 0:
        return Effect()
    sign = -1 if _given(request, "MetricDefault", "l2") in IN_DECIBELS else 1
    return Effect(recipe={"mixed.threshold": sign * value})


def _of_search(key: str, default: Any, kind: Kind, path: str) -> Option:
    """A key that says something about the search, where there is one."""

    def work(value: Any, request: Request) -> Effect:
        if _searched(request):
            return Effect(recipe={path: value})
        return Effect() if value == default else Effect(note=f"{key}: {_ALL}")

    return computed(key, default, kind, f"{path}, with a threshold", work)


def _samples(value: Any, request: Request) -> Effect:
    if value < 1:
        return Effect()
    return (
        Effect(recipe={"verify.samples": value}) if _searched(request) else Effect(note=f"DataSize: {_ALL}")
    )


MIXED: Mapping[str, Option] = {
    row.key: row
    for row in (
        computed("TargetLayerConfig", None, ANY, "mixed.type, mixed.weights", _target),
        to_field("TargetOpType", None, TEXTS, "mixed.op_types"),
        computed("MetricThreshold", 0, _NUMBER, "mixed.threshold; None is refused", _mixed_threshold),
        _of_search("MetricDefault", "l2", _METRIC, "mixed.metric"),
        _of_search("MetricOptimizeObject", "speed", _GOAL, "mixed.goal"),
        _of_search("MetricOutputIndex", 0, INTEGER, "mixed.output"),
        to_field("IncludeLayers", None, TEXTS, "mixed.include"),
        to_field("ExcludeLayers", None, TEXTS, "mixed.exclude"),
        computed("DataSize", 0, INTEGER, "verify.samples, with a threshold", _samples),
        refused_option("SubgraphJson", None, "layers are tried one by one.", "Name them in IncludeLayers."),
        refused_option(
            "MetricDistanceFn", None, _OWN, "Use `roundel.auto(…, metric=function)`, or MetricDefault."
        ),
        refused_option(
            "MetricEvaluateFn", None, _OWN, "Use `roundel.auto(…, metric=function)`, or MetricDefault."
        ),
        always("SensitivityCacheFile", None, ANY, "errors are measured anew in each run."),
        always("WorkerNum", 1, INTEGER, "one model is tried at a time."),
        always("DualQuantNodes", False, SWITCH, _ONE_TYPE),
        always("NoInputQDQShared", False, SWITCH, _ONE_TYPE),
        always("SharedParamMode", "propagate", ANY, "a shared weight has one type for all its readers."),
    )
}


def nested_effects(
    key: str, rows: Mapping[str, Option], given: Mapping[str, Any], request: Request
) -> Effect:
    """What the keys of a nested table do together, in the order of the rows.

    Raises:
        QuarkConfigError: a key is unknown, or its value wrong.
    """
    for word in given:
        if word not in rows:
            raise QuarkConfigError(
                f"There is no option '{word}' in '{key}'.",
                where=f"extra_options['{key}']",
                **expected_names(str(word), rows),
            )
    effects = [row.effect(given[word], request) for word, row in rows.items() if word in given]
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


def _steps(value: Any, request: Request) -> Effect:
    """-1 means until nothing changes; 1, the default, leaves Roundel its own number."""
    if value == 1:
        return NOTHING
    return Effect(recipe={f"{_EQUALIZE}steps": _MOST_STEPS if value < 1 else value})


def _threshold(value: Any, request: Request) -> Effect:
    return NOTHING if value in _USUAL_CHANGES else Effect(recipe={f"{_EQUALIZE}threshold": value})


def _bias_correction(value: Any, request: Request) -> Effect:
    """Biases are fitted where rounding is chosen, layer by layer; those of short floats and blocks apart."""
    whole = request.integer_activations and request.integer_weights
    return Effect(recipe={"effort": request.effort, "improve.rounding": whole} if value else {})


def _details(key: str, switch: str, rows: Mapping[str, Option]) -> Option:
    """A nested table that counts where a switch is on."""

    def work(value: Any, request: Request) -> Effect:
        found = nested_effects(key, rows, value, request)
        return found if request.asked(switch) else Effect(note=f"{key} counts only with {switch}=True")

    return computed(key, {}, TABLE, "weight_only.*", work)


def _gptq_group(value: Any, request: Request) -> Effect:
    if value == -1:
        return Effect(note="GroupSize -1: weights share scales in groups of 128, not in whole channels")
    return Effect(recipe={"weight_only.group_size": value})


def _gptq_range(value: Any, request: Request) -> Effect:
    return Effect(recipe={"weight_only.range": "mse" if value else "minmax"})


_SOLVED = "the equations of a layer are solved as a whole."
GPTQ = {
    row.key: row
    for row in (
        to_field("Bits", 8, COUNT, "weight_only.bits"),
        computed("GroupSize", -1, INTEGER, "weight_only.group_size", _gptq_group),
        to_field("WeightSymmetric", True, SWITCH, "weight_only.symmetric"),
        to_field("PercDamp", 0.01, NUMBER, "weight_only.percdamp"),
        to_field("ActOrder", False, SWITCH, "weight_only.act_order"),
        computed("MSE", False, SWITCH, "weight_only.range", _gptq_range),
        always("PerChannel", False, SWITCH, "groups are finer than channels."),
        always("BlockSize", 128, INTEGER, _SOLVED),
    )
}


def _few_bits_algorithm(value: Any, request: Request) -> Effect:
    words = {"DEFAULT": "round", "GPTQ": "gptq"}
    if value not in words:
        why = "weights are rounded to the nearest code or by GPTQ."
        raise refusal("MatMulNBitsParams", value, why, "Use 'DEFAULT' or 'GPTQ'.")
    return Effect(recipe={"weight_only.algorithm": words[value]})


FEW_BITS = {
    row.key: row
    for row in (
        computed("Algorithm", "DEFAULT", TEXT, "weight_only.algorithm", _few_bits_algorithm),
        to_field("GroupSize", 128, COUNT, "weight_only.group_size"),
        to_field("Symmetric", True, SWITCH, "weight_only.symmetric"),
        to_field("Bits", 4, COUNT, "weight_only.bits"),
        to_field("AccuracyLevel", 0, INTEGER, "weight_only.accuracy_level"),
    )
}


def _mixed(value: Any, request: Request) -> Effect:
    return nested_effects("AutoMixprecision", MIXED, value, request)


_FOUND = "the residual stream and its size are found in the graph."

ALGORITHMS: tuple[Option, ...] = (
    computed("FastFinetune", {}, TABLE, "improve.finetune.*", _finetune),
    computed("CLESteps", 1, INTEGER, "improve.equalize.steps", _steps),
    to_word("CLEBalanceMethod", "max", "improve.equalize.enabled", {"max": True}),
    refused_option(
        "CLEWeightThreshold",
        0.5,
        "channels of any size are balanced, relative to the largest of their layer.",
        "Leave it out, or set include_cle=False.",
        NUMBER,
    ),
    to_field("CLEScaleAppendBias", True, SWITCH, "improve.equalize.append_bias"),
    always("CLEScaleUseThreshold", True, SWITCH, "ranges are relative, so no threshold is needed."),
    computed("CLETotalLayerDiffThreshold", 2e-7, NUMBER, "improve.equalize.threshold", _threshold),
    computed("BiasCorrection", False, SWITCH, "improve.rounding", _bias_correction),
    # Weights of MatMul and Gemm in few bits, rounded by GPTQ; activations stay float.
    switched(
        "UseGPTQ",
        False,
        "mode, weight_only.algorithm",
        {"weight_only.algorithm": "gptq", "weight_only.format": "qdq"},
    ),
    _details("GPTQParams", "UseGPTQ", GPTQ),
    to_field("SmoothAlpha", 0.5, NUMBER, "improve.smooth.alpha"),
    always("RMatrixDim", 4096, COUNT, _FOUND),
    always("RConfigPath", None, PATH, _FOUND),
    always("UseRandomHad", False, SWITCH, "the signs of the matrix are random, by a seed."),
    switched("UseMatMulNBits", False, "mode", {"mode": "weight_only"}),
    _details("MatMulNBitsParams", "UseMatMulNBits", FEW_BITS),
    computed("AutoMixprecision", {}, TABLE, "mixed.*", _mixed),
)
