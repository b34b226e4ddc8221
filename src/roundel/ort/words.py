"""ONNX Runtime's extra options in the words of the classic config that Roundel translates."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from onnxruntime.quantization.calibrate import CalibrationMethod
from onnxruntime.quantization.quant_utils import QuantType, update_opset_version
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from roundel.errors import did_you_mean
from roundel.model.graph import opset_version
from roundel.quark.errors import QuarkConfigError, go_on
from roundel.recipe.settings import merge

# Of the same meaning in both.
_ALIKE = frozenset(
    {
        *("ActivationSymmetric", "WeightSymmetric", "ForceQuantizeNoInputCheck", "MatMulConstBOnly"),
        *("AddQDQPairToWeight", "OpTypesToExcludeOutputQuantization", "DedicatedQDQPair", "QuantizeBias"),
        *("QDQOpTypePerChannelSupportToAxis", "CalibTensorRangeSymmetric", "CalibMovingAverage"),
        *("CalibMovingAverageConstant", "EnableSubgraph", "UseQDQContribOps", "Recipe"),
    }
)
_SAID = {
    "CalibStridedMinMax": "extremes are kept sample by sample; strides change no range",
    "CalibMaxIntermediateOutputs": "calibration holds one sample at a time",
    "SmoothQuantFolding": "factors go into the layer before wherever there is one",
    "QDQDisableWeightAdjustForInt32Bias": "a weight's scale grows where its bias would not fit, always",
    "DefaultTensorType": "types of tensors are inferred, or float",
    "MinimumRealRange": "a range is as wide as its values; a tensor of zeros has the scale 1",
    "ActivationRestrictedAsymmetric": "a range that begins at zero has its zero point there anyhow",
    "extra.Sigmoid.nnapi": "a Sigmoid's range is that of its values",
}
_KEPT = {f"RemoveQDQConv{op}": False for op in ("Clip", "Relu", "LeakyRelu", "PRelu")}
_WIDE = frozenset({QuantType.QInt16, QuantType.QUInt16})
_NATIVE_16_BITS = 21
_NAMES = {"CalibPercentile": "Percentile"}


@dataclass(slots=True)
class Words:
    """What the options become.

    Attributes:
        options: extra options of the classic config.
        smooth: whether SmoothQuant is asked for.
        notes: what the reader should know.
    """

    options: dict[str, Any] = field(default_factory=dict)
    smooth: bool = False
    notes: list[str] = field(default_factory=list)


def translated(given: Mapping[str, Any], method: Any) -> Words:
    """The options of a call, and what follows from the calibration method.

    Args:
        given: extra_options.
        method: calibrate_method; minimum and maximum are the default there, and mean no wish.

    Raises:
        QuarkConfigError: an override of a tensor cannot be read.
    """
    contrib = bool(given.get("UseQDQContribOps"))
    placement = {"operators": "runtime", "domain": "com.microsoft" if contrib else "ai.onnx"}
    words = Words({**_KEPT, "SkipPreprocess": True, "AlignEltwiseQuantType": True})
    # Saturation does what an asymmetric tensor's Relu would; a symmetric one keeps its Relu.
    words.options["FoldRelu"] = not given.get("ActivationSymmetric")
    for key, value in given.items():
        if value is None:  # the original's own default
            continue
        if key == "TensorQuantOverrides":
            words.options[key] = dict(_overrides(value, words.notes))
        elif key == "QDQKeepRemovableActivations":
            words.options["FoldRelu"] = words.options["FoldRelu"] and not value
        elif key == "SmoothQuant":
            words.smooth = bool(value)
        elif key == "SmoothQuantAlpha":
            words.options["SmoothAlpha"] = value
        elif key in _ALIKE:
            words.options[key] = value
        elif key in _NAMES:
            words.options[_NAMES[key]] = value
        elif key in _SAID:
            words.notes += [f"{key}: {_SAID[key]}"] if value not in (None, False) else []
        else:
            hint = did_you_mean(str(key), (*_ALIKE, *_SAID, *_NAMES, "TensorQuantOverrides", "SmoothQuant"))
            go_on(QuarkConfigError(f"There is no extra option '{key}': it does nothing.", hint=hint))
    recipe: dict[str, Any] = {"placement": placement}
    if method is CalibrationMethod.MinMax and not given.get("CalibMovingAverage"):
        recipe["calibration"] = {"method": "mse"}
        words.notes.append(
            "calibrate_method MinMax: each range is the one of least error inside minimum and maximum; "
            "extra_options={'Recipe': {'calibration': {'method': 'minmax'}}} keeps the extremes"
        )
    words.options["Recipe"] = merge(recipe, dict(given.get("Recipe") or {}))
    return words


def _overrides(given: Mapping[str, Any], notes: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Overrides without `convert`: a tensor has one type here, the wider of those that its readers want."""
    for name, entries in given.items():
        entry = dict(entries[0]) if isinstance(entries, Sequence) and len(entries) == 1 else None
        other = entry.pop("convert", None) if entry is not None else None
        if entry is None or other is None:
            yield name, entries
            continue
        kinds = [entry.get("quant_type"), other.get("quant_type")]
        wide = [kind for kind in kinds if kind in _WIDE]
        if wide:
            entry["quant_type"] = wide[0]
        notes.append(f"TensorQuantOverrides['{name}']: one type for all its readers, the wider one")
        yield name, [entry]


def operator_types(given: Iterable[str] | None, model: ir.Model) -> list[str]:
    """The types to quantize: those that are given, or all of the model's that ONNX Runtime quantizes."""
    present = {node.op_type for node in model.graph}
    return list(given or sorted({*QLinearOpsRegistry, *QDQRegistry} & present))


def pairs_of_wide_types(
    kinds: Iterable[Any], overrides: Mapping[str, Any], model: ir.Model
) -> dict[str, Any]:
    """Recipe values for Q/DQ pairs where any tensor has 16 bits, which the standard has since opset 21.

    ONNX Runtime raises the opset, since 1.24 or so; before, it took its own operators for all pairs.
    """
    told = (entry.get("quant_type") for entries in overrides.values() for entry in entries)
    if not {*kinds, *told} & _WIDE or opset_version(model) >= _NATIVE_16_BITS:
        return {}
    raises = "activation_type" in inspect.signature(update_opset_version).parameters
    if raises:
        return {"output": {"opset": _NATIVE_16_BITS}}
    return {"placement": {"domain": "com.microsoft"}}
