"""The keys of extra_options['AutoMixprecision'], one row each.

At its default threshold the documents' search promotes every layer of the target types, which is what a mixed
recipe says without searching. Any other threshold asks for the search itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundel.quark.errors import QuarkConfigError
from roundel.quark.request import Request
from roundel.quark.rows import (
    ANY,
    INTEGER,
    SWITCH,
    TEXTS,
    Effect,
    Option,
    always,
    computed,
    refused,
    to_field,
)
from roundel.quark.specs import QLayerConfig

_ALL = "every layer of the target types is chosen, so nothing is measured."
_ONE_TYPE = "a tensor has one type: that of the target layers that read it."
_INSTEAD = "Leave it out to choose all layers, or give single tensors their types with TensorQuantOverrides."


def _target(value: Any, request: Request) -> Effect:
    inputs = value.input_tensors if isinstance(value, QLayerConfig) else None
    weight = value.weight if isinstance(value, QLayerConfig) else None
    if inputs is None or weight is None or inputs.kind is not weight.kind:
        raise QuarkConfigError(
            "Mixed precision takes one type for inputs and weights.",
            where="extra_options['AutoMixprecision']['TargetLayerConfig']",
            observed=value,
            expected="QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())",
        )
    return Effect(recipe={"mixed.type": inputs.kind.__name__.lower()})


MIXED: Mapping[str, Option] = {
    row.key: row
    for row in (
        computed("TargetLayerConfig", None, ANY, "mixed.type", _target),
        to_field("TargetOpType", None, TEXTS, "mixed.op_types"),
        refused("MetricThreshold", 0, "no search chooses layers by their error yet.", _INSTEAD),
        refused("SubgraphJson", None, "layers are chosen by their type.", _INSTEAD),
        refused("IncludeLayers", None, "layers are chosen by their type.", _INSTEAD),
        refused("ExcludeLayers", None, "layers are chosen by their type.", _INSTEAD),
        always("DataSize", 0, INTEGER, _ALL),
        always("MetricOutputIndex", 0, INTEGER, _ALL),
        always("MetricDistanceFn", None, ANY, _ALL),
        always("MetricEvaluateFn", None, ANY, _ALL),
        always("MetricDefault", "l2", ANY, _ALL),
        always("MetricOptimizeObject", "speed", ANY, _ALL),
        always("SensitivityCacheFile", None, ANY, _ALL),
        always("WorkerNum", 1, INTEGER, _ALL),
        always("DualQuantNodes", False, SWITCH, _ONE_TYPE),
        always("NoInputQDQShared", False, SWITCH, _ONE_TYPE),
        always("SharedParamMode", "propagate", ANY, "a shared weight has one type for all its readers."),
    )
}
