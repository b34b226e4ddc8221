"""The keys of extra_options['FastFinetune'], one row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundel.quark.errors import QuarkConfigError, expected_names
from roundel.quark.request import Request
from roundel.quark.rows import (
    ANY,
    COUNT,
    INTEGER,
    NUMBER,
    SWITCH,
    TEXT,
    TEXTS,
    Effect,
    Kind,
    Option,
    Work,
    always,
    computed,
    refused,
    to_field,
)

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


def _device(name: str) -> Work:
    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe={_TUNE + name: str(value).lower()})

    return work


FINETUNE: Mapping[str, Option] = {
    row.key: row
    for row in (
        computed("OptimAlgorithm", "adaround", TEXT, f"{_TUNE}algorithm", _algorithm),
        computed("OptimDevice", "cpu", TEXT, f"{_TUNE}optim_device", _device("optim_device")),
        computed("InferDevice", "cpu", TEXT, f"{_TUNE}infer_device", _device("infer_device")),
        _field("NumIterations", 1000, COUNT, "iterations"),
        _field("LearningRate", None, NUMBER, "learning_rate"),
        _field("BatchSize", 1, COUNT, "batch_size"),
        _field("NumBatches", 1, COUNT, "num_batches"),
        _field("DataSize", None, COUNT, "data_size"),
        _field("FixedSeed", 1705472343, INTEGER, "seed"),
        _field("EarlyStop", False, SWITCH, "early_stop"),
        _field("LRAdjust", None, _PAIR, "lr_adjust"),
        _field("TargetOpType", None, TEXTS, "target_op_types"),
        _field("SelectiveUpdate", False, SWITCH, "selective_update"),
        _field("UpdateBias", True, SWITCH, "update_bias"),
        _field("OutputQDQ", False, SWITCH, "output_qdq"),
        _field("DropRatio", 1.0, NUMBER, "drop_ratio"),
        _field("RegParam", 0.01, NUMBER, "reg_param"),
        _field("BetaRange", (20, 2), _PAIR, "beta_range"),
        _field("WarmStart", 0.2, NUMBER, "warm_start"),
        _field("MemOptLevel", 1, INTEGER, "mem_opt_level"),
        _field("Parallel", False, SWITCH, "parallel"),
        always("CacheDir", None, ANY, "mapped files lie in the temporary folder (TmpDir)."),
        always("LogPeriod", 100, INTEGER, "progress is shown layer by layer."),
        refused(
            "RefModelPath",
            None,
            "the float model is the one that is quantized.",
            "Quantize the model that the file holds.",
        ),
        refused("OutputIndex", 0, "all outputs count.", "Leave it at 0.", INTEGER),
        always("DynamicBatch", False, SWITCH, "a layer learns from rows; the model's batch does not matter."),
        always("NumWorkers", 1, INTEGER, _NO_LOADER),
        always("PinMemory", False, SWITCH, _NO_LOADER),
        always("UseGDS", False, SWITCH, _NO_LOADER),
        always("SelectMaxMemLayer", False, SWITCH, "memory is measured by what a layer's rows take."),
    )
}
