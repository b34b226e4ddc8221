"""The keys of extra_options['AutoMixprecision'], one row each.

At its default threshold the documents' search promotes every layer of the target types, which is what a mixed
recipe says without searching. Any other threshold asks for the search itself, which a recipe has as well;
there, limits in dB are given as the ratio (30), not as its negative (-30).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundel.numerics.distances import DISTANCES, IN_DECIBELS
from roundel.quark.errors import QuarkConfigError
from roundel.quark.request import Request
from roundel.quark.rows import (
    ANY,
    INTEGER,
    SWITCH,
    TEXTS,
    Effect,
    Kind,
    Option,
    always,
    computed,
    refusal,
    refused,
    to_field,
)
from roundel.quark.specs import QLayerConfig

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


def _threshold(value: Any, request: Request) -> Effect:
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
        computed("MetricThreshold", 0, _NUMBER, "mixed.threshold; None is refused", _threshold),
        _of_search("MetricDefault", "l2", _METRIC, "mixed.metric"),
        _of_search("MetricOptimizeObject", "speed", _GOAL, "mixed.goal"),
        _of_search("MetricOutputIndex", 0, INTEGER, "mixed.output"),
        to_field("IncludeLayers", None, TEXTS, "mixed.include"),
        to_field("ExcludeLayers", None, TEXTS, "mixed.exclude"),
        computed("DataSize", 0, INTEGER, "verify.samples, with a threshold", _samples),
        refused("SubgraphJson", None, "layers are tried one by one.", "Name them in IncludeLayers."),
        refused("MetricDistanceFn", None, _OWN, "Use `roundel.auto(…, metric=function)`, or MetricDefault."),
        refused("MetricEvaluateFn", None, _OWN, "Use `roundel.auto(…, metric=function)`, or MetricDefault."),
        always("SensitivityCacheFile", None, ANY, "errors are measured anew in each run."),
        always("WorkerNum", 1, INTEGER, "one model is tried at a time."),
        always("DualQuantNodes", False, SWITCH, _ONE_TYPE),
        always("NoInputQDQShared", False, SWITCH, _ONE_TYPE),
        always("SharedParamMode", "propagate", ANY, "a shared weight has one type for all its readers."),
    )
}
