"""Every option is translated, or refused with a reason; each translated one changes plan, model or run."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType

from helpers import build, node, normal
from roundel.quark import algorithms
from roundel.quark.algorithms import FEW_BITS, GPTQ, MIXED
from roundel.quark.algorithms import FINETUNE as TUNING
from roundel.quark.config import QuantizationConfig
from roundel.quark.errors import STRICT, QuarkConfigError
from roundel.quark.presets import get_default_config
from roundel.quark.qconfig import QConfig
from roundel.quark.request import FIELD_OPTIONS
from roundel.quark.specs import (
    AdaRoundConfig,
    AutoMixprecisionConfig,
    BFloat16Spec,
    CLEConfig,
    Int8Spec,
    Int16Spec,
    QLayerConfig,
)
from roundel.quark.translate import OPTIONS, Translation, translate

sys.path.insert(0, str(Path(__file__).parent))
from option_cases import CASES, EIGHT, FIELDS, FINETUNE, WEIGHT_METHODS, Case

# Nothing but the default is taken; anything else says what to do instead.
REFUSED: dict[str, Any] = {
    "ShapeShifterYaml": "a8w8",
    "PreprocessYAML": "p.yaml",
    "SimplifyModelOptions": {"skip": 1},
    "EnableSubgraph": True,
    "NodesWithMixedPrecision": {"a": 1},
    "EnableDualQuantNodePairs": True,
    "QDQOpTypePerChannelSupportToAxis": {"MatMul": 0},
    "NumQuantizedBins": 64,
    "CalibPassthroughOpTypes": ["Reshape"],
    "SaveTensorHistFig": True,
    "CLEWeightThreshold": 0.1,
    "UserCustomOpLibPath": "my.so",
    "EncryptionAlgorithm": "AES-256",
}
# Roundel does so anyhow, or decides itself; the reader is told.
TOLD: dict[str, Any] = {
    "RemoveInputInit": False,
    "NumBins": 1024,
    "LWPUseHistogram": False,
    "MinMSEModeFloatScale": "All",
    "CalibOptimizeMem": False,
    "CalibWorkerNum": 4,
    "AdjustBiasScale": False,
    "CLEBalanceMethod": "mean",
    "QuantizeFP16": True,
    "UseUnsignedReLU": True,
    "UseQDQVitisCustomOps": False,
    "AdjustWeightScaleForInt32Bias": True,
    "UseFP32Scale": True,
    "AlignTranspose": True,
    "AlignReshape": True,
    "MaxLoopNum": 9,
    "CLEScaleUseThreshold": False,
    "RMatrixDim": 512,
    "RConfigPath": "r1.json",
    "UseRandomHad": True,
    "FillAllValueInfo": True,
}


def model() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Exp", ["r"], ["e"], name="exp"),
        node("Conv", ["e", "k"], ["y"], name="conv2"),
    ]
    constants = {"w": normal(4, 3, 3, 3), "b": normal(4, seed=1), "k": normal(2, 4, 1, 1, seed=2)}
    return build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)


def config(case: Case, **options: Any) -> QuantizationConfig:
    made = get_default_config(case.preset)
    for name, value in case.fields.items():
        setattr(made, name, value)
    made.extra_options.update({**case.options, **options})
    return made


def seen(told: Translation) -> tuple[Any, ...]:
    """What decides the model and the run."""
    recipe = told.recipe.model_dump(exclude={"name", "title"})
    return recipe, {key: value for key, value in told.run.items() if value not in (None, {}, [])}


def test_every_option_has_a_case() -> None:
    assert set(OPTIONS) == {*CASES, *REFUSED, *TOLD}


@pytest.mark.parametrize("key", CASES)
def test_a_translated_option_changes_something(key: str) -> None:
    case = CASES[key]
    without = config(case)
    without.extra_options.pop(key, None)
    given = config(case, **{key: case.value})
    before, after = translate(without, model()), translate(given, model())
    if key in ("AddQDQPairToWeight", "EvalDataReader"):
        return _special(key, before, after)
    assert seen(before) != seen(after)
    return None


def _special(key: str, before: Translation, after: Translation) -> None:
    if key == "AddQDQPairToWeight":  # short floats have such a pair anyhow, integers are refused
        assert seen(before) == seen(after)
        with pytest.raises(QuarkConfigError, match="a quarter of the size"):
            translate(config(Case(True), AddQDQPairToWeight=True))
    else:
        assert after.run["evaluation_data"] == []


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_option_says_why_and_what_instead(key: str) -> None:
    with pytest.raises(QuarkConfigError) as found:
        translate(config(Case(None), **{key: REFUSED[key]}))
    error = found.value
    assert key in str(error)
    assert error.hint, "no alternative"
    translate(config(Case(None), **{key: OPTIONS[key].default}))  # the default asks for nothing


@pytest.mark.parametrize("key", TOLD)
def test_an_option_that_changes_nothing_is_answered(key: str) -> None:
    told = translate(config(Case(None), **{key: TOLD[key]}))
    assert any(note.startswith(f"{key}:") for note in told.notes), told.notes


def test_an_unknown_option_is_warned_about_and_an_error_when_strict(caplog, monkeypatch) -> None:
    told = translate(config(Case(None), ActivationSymetric=True), model())
    assert seen(told) == seen(translate(config(Case(None)), model()))
    assert "no extra option 'ActivationSymetric'" in caplog.text
    assert "Did you mean 'ActivationSymmetric'" in caplog.text
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(QuarkConfigError, match="no extra option 'ActivationSymetric'") as found:
        translate(config(Case(None), ActivationSymetric=True))
    assert "ActivationSymmetric" in str(found.value)
    assert isinstance(found.value, ValueError)


@pytest.mark.parametrize(
    ("key", "value"),
    [("ActivationSymmetric", 1), ("Percentile", "99"), ("CalibDataSize", 0), ("Scenario", "other")],
)
def test_a_value_of_the_wrong_kind_raises(key: str, value: Any) -> None:
    with pytest.raises(QuarkConfigError, match="wrong kind") as found:
        translate(config(Case(None), **{key: value}))
    assert key in str(found.value)


def test_every_key_of_the_nested_tables_has_a_case() -> None:
    quiet = {row.key for row in TUNING.values() if row.becomes.startswith(("refused", "always"))}
    assert set(TUNING) - quiet == set(FINETUNE)
    words = set(AdaRoundConfig().get_options()["FastFinetune"])
    assert words == set(TUNING), "the newer API and the classic option know the same words"


def test_an_override_of_a_tensor_that_is_not_there_is_passed_over(caplog) -> None:
    entry = [{"quant_type": QuantType.QInt16}]
    told = translate(config(Case(None), TensorQuantOverrides={"r": entry, "rr": entry}), model())
    assert [override.tensors for override in told.recipe.overrides] == [("r",)]
    assert "No tensor 'rr'" in caplog.text


@pytest.mark.parametrize("key", ["OptimDevice", "InferDevice"])
def test_a_device_that_is_not_there_is_the_cpu_with_a_note(key: str, monkeypatch) -> None:
    monkeypatch.setattr(algorithms, "device_lacks", lambda option, name: "none here" if "9" in name else None)
    told = translate(config(Case(None), FastFinetune={key: "cuda:9"}))
    tuning = told.recipe.improve.finetune
    assert (tuning.optim_device, tuning.infer_device) == ("cpu", "cpu")
    assert any(note.startswith(f"{key}: cuda:9 is not there (none here)") for note in told.notes)
    there = translate(config(Case(None), FastFinetune={key: "cuda:0,1"}))
    tuning = there.recipe.improve.finetune
    assert "cuda:0" in (tuning.optim_device, tuning.infer_device)
    assert any("the first that is named" in note for note in there.notes)


def test_a_device_of_no_kind_raises() -> None:
    with pytest.raises(QuarkConfigError, match="Unknown device"):
        translate(config(Case(None), FastFinetune={"OptimDevice": "tpu"}))


@pytest.mark.parametrize("key", FINETUNE)
def test_a_tuning_option_changes_the_recipe(key: str, monkeypatch) -> None:
    monkeypatch.setattr(algorithms, "device_lacks", lambda option, name: None)
    before = translate(config(Case(None), FastFinetune={}))
    after = translate(config(Case(None), FastFinetune={key: FINETUNE[key]}))
    changed = after.recipe.improve.finetune
    assert changed != before.recipe.improve.finetune


@pytest.mark.parametrize(
    ("option", "key"),
    [("FastFinetune", "NumIteration"), ("GPTQParams", "Bit"), ("MatMulNBitsParams", "Group")],
)
def test_an_unknown_nested_key_is_warned_about(option: str, key: str, caplog, monkeypatch) -> None:
    case = Case(None, "MATMUL_NBITS" if option == "MatMulNBitsParams" else "A8W8")
    translate(config(case, **{option: {key: 1}}))
    assert f"no option '{key}'" in caplog.text
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(QuarkConfigError, match=f"no option '{key}'") as found:
        translate(config(case, **{option: {key: 1}}))
    assert "Did you mean" in str(found.value)


def test_gptq_and_few_bit_settings() -> None:
    given = {
        "Bits": 4,
        "GroupSize": 32,
        "WeightSymmetric": False,
        "PercDamp": 0.1,
        "ActOrder": True,
        "MSE": True,
    }
    assert set(given) == {key for key, row in GPTQ.items() if not row.becomes.startswith("always")}
    found = translate(config(Case(None), UseGPTQ=True, GPTQParams=given)).recipe
    assert found.mode == "weight_only"
    told = found.weight_only
    assert (told.bits, told.group_size, told.symmetric, told.percdamp, told.act_order, told.range) == (
        *(4, 32, False, 0.1, True, "mse"),
    )
    assert translate(config(Case(None), UseGPTQ=True)).recipe.weight_only.bits == 8
    alone = translate(config(Case(None), GPTQParams=given))
    assert "GPTQParams counts only with UseGPTQ=True" in alone.notes
    few = {"Algorithm": "GPTQ", "GroupSize": 32, "Symmetric": False, "Bits": 8, "AccuracyLevel": 4}
    assert set(FEW_BITS) == set(few)
    told = translate(config(Case(None, "MATMUL_NBITS"), MatMulNBitsParams=few)).recipe.weight_only
    assert (told.algorithm, told.group_size, told.symmetric, told.bits, told.accuracy_level) == (
        "gptq",
        32,
        False,
        8,
        4,
    )
    with pytest.raises(QuarkConfigError, match="by GPTQ"):
        translate(config(Case(None, "MATMUL_NBITS"), MatMulNBitsParams={"Algorithm": "RTN"}))


def test_mixed_precision_without_a_search() -> None:
    words = set(AutoMixprecisionConfig(EIGHT).get_options()["AutoMixprecision"])
    assert words == set(MIXED), "the newer API and the classic option know the same words"
    target = {"TargetLayerConfig": EIGHT, "TargetOpType": ["Conv"]}
    recipe = translate(config(Case(None, "S16S8_ASWS"), AutoMixprecision=target)).recipe
    assert (recipe.mixed.type, recipe.mixed.op_types) == ("int8", ("Conv",))
    told = translate(config(Case(None, "S16S8_ASWS"), AutoMixprecision={**target, "MetricDefault": "kl"}))
    assert told.recipe.mixed.metric == "l2"
    assert any("nothing is measured" in note for note in told.notes)
    with pytest.raises(QuarkConfigError, match="one type"):
        translate(config(Case(None), AutoMixprecision={"TargetLayerConfig": [EIGHT]}))
    flagged = config(Case(None))
    flagged.include_auto_mp = True
    with pytest.raises(QuarkConfigError, match="which other type"):
        translate(flagged)


def test_mixed_precision_with_a_search() -> None:
    wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec())
    target = {
        "TargetLayerConfig": wide,
        "MetricThreshold": -30,
        "MetricDefault": "sqnr",
        "MetricOptimizeObject": "quality",
        "MetricOutputIndex": 1,
        "IncludeLayers": ["conv"],
        "ExcludeLayers": ["conv2"],
        "DataSize": 5,
    }
    recipe = translate(config(Case(None, "S8S8_AAWS"), AutoMixprecision=target)).recipe
    mixed = recipe.mixed
    assert (mixed.type, mixed.weights) == ("int16", "int8")
    assert (mixed.threshold, mixed.metric, mixed.goal, mixed.output) == (30, "sqnr", "quality", 1)
    assert (mixed.include, mixed.exclude) == (("conv",), ("conv2",))
    assert recipe.verify.samples == 5
    for key, value in (("MetricThreshold", None), ("MetricDistanceFn", max), ("SubgraphJson", "s.json")):
        with pytest.raises(QuarkConfigError, match="does not do"):
            translate(config(Case(None, "S8S8_AAWS"), AutoMixprecision={**target, key: value}))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_config_changes_something(name: str) -> None:
    case = FIELDS[name]
    before, after = config(case), config(case)
    setattr(after, name, case.value)
    assert seen(translate(before, model())) != seen(translate(after, model()))


def test_no_field_is_left_without_a_case() -> None:
    about_the_run = {
        *("quant_format", "execution_providers", "convert_fp16_to_fp32", "include_auto_mp", "debug_mode"),
        *("crypto_mode", "print_summary", "ignore_warnings", "log_severity_level", "extra_options", "preset"),
    }
    assert set(QuantizationConfig.__dataclass_fields__) == {*FIELDS, *about_the_run}


@pytest.mark.parametrize("key", FIELD_OPTIONS)
def test_a_field_may_also_be_given_as_an_option(key: str) -> None:
    name = FIELD_OPTIONS[key]
    if name not in FIELDS:
        return
    case = FIELDS[name]
    as_field, as_option = config(case), config(case, **{key: case.value})
    setattr(as_field, name, case.value)
    assert seen(translate(as_field, model())) == seen(translate(as_option, model()))


@pytest.mark.parametrize("method", WEIGHT_METHODS)
def test_weights_have_a_method_of_their_own(method: Any) -> None:
    recipe = translate(config(Case(None), WeightCalibrateMethod=method)).recipe
    assert recipe.weights.method == ("minmax" if "MinMax" in str(method) else "mse")


def test_the_config_is_not_changed() -> None:
    given = config(Case(None), FastFinetune={"NumIterations": 3}, TensorQuantOverrides={})
    before = copy.deepcopy(given)
    translate(given, model())
    assert given == before


def test_what_means_nothing_for_a_type_is_said() -> None:
    told = translate(config(Case(None, "BF16"), ActivationSymmetric=True, AlignConcat=True))
    assert {
        "ActivationSymmetric means nothing for bfloat16",
        "AlignConcat means nothing for bfloat16",
    } <= set(told.notes)


def test_a_given_scale_becomes_the_range_that_has_it() -> None:
    entry = {"quant_type": CASES["TensorQuantOverrides"].value["r"][0]["quant_type"]}
    made = config(Case(None), TensorQuantOverrides={"r": [{**entry, "scale": 0.5, "zero_point": 0}]})
    (override,) = translate(made, model()).recipe.overrides
    assert override.range == (-32767 * 0.5, 32767 * 0.5)
    assert np.isclose(override.range[1] / 32767, 0.5)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([{"quant_typ": 1}], "no 'quant_typ'"),
        ([{"rmin": 0.0}], "half of a pair"),
        ([{"axis": 0}, {"axis": 0}], "lists its channels"),
        ({}, "another form"),
        ([{"reduce_range": True}], "cannot say 'reduce_range'"),
    ],
)
def test_overrides_of_another_form_raise(entry: Any, words: str) -> None:
    with pytest.raises(QuarkConfigError, match=words):
        translate(config(Case(None), TensorQuantOverrides={"c": entry}))


def test_equalization_without_integer_weights_is_tried_where_it_is_asked_for() -> None:
    def equalized(told: Translation) -> bool:
        return told.recipe.improve.equalize.enabled

    stored = QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec())
    assert equalized(translate(QConfig(stored), algorithms=[CLEConfig()]))
    assert not equalized(translate(QConfig(stored)))
    assert not equalized(translate(get_default_config("BF16")))  # it is a default there, not a wish


def test_floats_learn_from_data_and_get_along_without() -> None:
    told = translate(get_default_config("BF16"))
    assert told.recipe.effort == "fast"
    alone = told.without_data()
    assert alone.recipe.effort == "none"
    assert any(note.startswith("no calibration data") for note in alone.notes)


@pytest.mark.parametrize(("asked", "taken"), [(13, 17), (19, 19), (23, 21)])
def test_any_opset_is_answered(asked: int, taken: int) -> None:
    told = translate(config(Case(None), ConvertOpsetVersion=asked))
    assert told.recipe.output.opset == taken
    assert any(note.startswith("ConvertOpsetVersion") for note in told.notes) == (asked != taken)


def test_values_that_scripts_leave_empty() -> None:
    assert not translate(config(Case(None), CopyBiasInit=None)).recipe.prepare.unshare_biases
    assert translate(config(Case(None), FastFinetune={"LRAdjust": ()})).recipe.effort == "high"
    kept = translate(config(Case(None), SaveAndRestore=True))
    assert kept.run["statistics"].endswith(".npz")
    assert any(note.startswith("SaveAndRestore") for note in kept.notes)
    assert "statistics" not in translate(config(Case(None), SaveAndRestore=False)).run


def test_gptq_beside_convolutions_stores_all_weights_in_eight_bits() -> None:
    told = translate(config(Case(None), UseGPTQ=True), model())
    assert (told.recipe.mode, told.recipe.placement.weights_only) == ("static", True)
    assert any(note.startswith("UseGPTQ") for note in told.notes)
    chosen = translate(config(Case(None), UseGPTQ=True, GPTQParams={"Bits": 4}), model())
    assert (chosen.recipe.mode, chosen.recipe.weight_only.bits) == ("weight_only", 4)


def test_half_quadratic_quantization_searches_each_group() -> None:
    told = translate(config(Case(None, "MATMUL_NBITS"), MatMulNBitsParams={"Algorithm": "HQQ", "Bits": 4}))
    assert (told.recipe.weight_only.range, told.recipe.weight_only.symmetric) == ("mse", False)
    assert any("HQQ" in note for note in told.notes)


@pytest.mark.parametrize("key", ["MetricEvaluateFn", "MetricDistanceFn"])
def test_a_metric_of_the_script_s_own_counts_with_a_threshold(key: str) -> None:
    given = {"TargetLayerConfig": EIGHT, key: max}
    told = translate(config(Case(None, "A16W8"), AutoMixprecision=given))
    assert any(note.startswith(key) for note in told.notes)
    with pytest.raises(QuarkConfigError, match="holds no functions"):
        translate(config(Case(None, "A16W8"), AutoMixprecision={**given, "MetricThreshold": 1.0}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("LRAdjust", (1.0, 0.2)),
        ("SelectiveUpdate", True),
        ("OutputQDQ", True),
        ("DropRatio", 0.5),
        ("MemOptLevel", 2),
        ("Parallel", True),
    ],
)
def test_tuning_options_that_are_only_told(key: str, value: Any) -> None:
    plain = translate(config(Case(None), FastFinetune={}))
    told = translate(config(Case(None), FastFinetune={key: value}))
    assert told.recipe == plain.recipe
    assert any(f"{key}: " in note for note in told.notes)


def test_batches_whose_gradients_are_added_up_are_one_batch() -> None:
    told = translate(config(Case(None), FastFinetune={"BatchSize": 3, "NumBatches": 4}))
    assert told.recipe.improve.finetune.batch_size == 12
