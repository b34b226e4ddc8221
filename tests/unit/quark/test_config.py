"""Configs and presets: fresh copies, readable, with errors that help."""

from __future__ import annotations

import copy

import pytest

from roundel.quark import (
    A8W8_CONFIG,
    DEFAULT_ADAROUND_PARAMS,
    INT8_CNN_ACCURATE_CONFIG,
    XINT8_QCONFIG,
    AutoSearch,
    Config,
    DefaultConfigMapping,
    ExtendedQuantType,
    Int8Spec,
    QConfig,
    QLayerConfig,
    QuantizationConfig,
    QuantType,
    UInt8Spec,
    get_default_config,
    get_default_config_mapping,
    get_tensor_type_from_qType,
)
from roundel.quark.errors import STRICT, QuarkConfigError
from roundel.quark.presets import config_names
from roundel.quark.qconfig import QCONFIG_NAMES, qconfig_preset
from roundel.quark.translate import translate


def test_all_names_of_the_documents() -> None:
    assert len(config_names()) == 65
    assert set(DefaultConfigMapping) == set(get_default_config_mapping()) == set(config_names())


@pytest.mark.parametrize("name", config_names())
def test_every_preset_means_a_recipe(name: str) -> None:
    assert translate(get_default_config(name)).recipe.mode in ("static", "dynamic", "weight_only")


@pytest.mark.parametrize("name", QCONFIG_NAMES)
def test_every_newer_preset_means_a_recipe(name: str) -> None:
    config = qconfig_preset(name)
    assert config is not None
    translate(config)
    assert QConfig.from_dict(config.to_dict()) == config


def test_a_preset_is_a_copy() -> None:
    config = get_default_config("A8W8")
    config.extra_options["Percentile"] = 99.0
    config.nodes_to_exclude.append("a")
    assert "Percentile" not in get_default_config("A8W8").extra_options
    assert get_default_config("A8W8").nodes_to_exclude == []
    INT8_CNN_ACCURATE_CONFIG.extra_options["FastFinetune"]["NumIterations"] = 1
    assert DEFAULT_ADAROUND_PARAMS["NumIterations"] == 1000
    assert copy.deepcopy(A8W8_CONFIG) == get_default_config("A8W8")
    assert QConfig.get_default_config("A8W8") == Config(get_default_config("A8W8"))


def test_an_unknown_preset_suggests_another() -> None:
    with pytest.raises(ValueError, match="no preset 'A8W'") as found:
        get_default_config("A8W")
    assert "A8W8" in str(found.value)


def test_a_misspelt_setting_is_warned_about(caplog, monkeypatch) -> None:
    config = get_default_config("A8W8")
    config.include_cls = False
    assert "no setting 'include_cls'" in caplog.text
    assert "include_cle" in caplog.text
    assert translate(config).recipe == translate(get_default_config("A8W8")).recipe
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(ValueError, match="include_cle"):
        config.include_cls = True
    with pytest.raises(TypeError):
        QuantizationConfig(include_fastft=True)  # type: ignore[call-arg]


def test_printing_is_readable() -> None:
    text = f"{Config(global_quant_config=get_default_config('XINT8_ADAROUND'))}"
    assert "calibrate_method = PowerOfTwoMethod.MinMSE" in text
    assert "'NumIterations': 1000," in text
    assert "object at 0x" not in text
    assert text.count("\n") > 10
    assert "input_nodes" not in text, "defaults are left out"
    assert "Int8(symmetric, PowerOf2 scale, per tensor, MinMSE)" in repr(XINT8_QCONFIG)


def test_old_and_new_names_of_a_layer_config(caplog) -> None:
    spec = Int8Spec()
    assert QLayerConfig(activation=spec).input_tensors is spec
    assert QLayerConfig(activation=spec, input_tensors=spec).input_tensors is spec
    assert caplog.text == ""
    both = QLayerConfig(activation=spec, input_tensors=UInt8Spec())
    assert both.input_tensors == UInt8Spec()
    assert "they differ" in caplog.text
    with pytest.raises(ValueError, match="needs specs"):
        translate(QConfig(QLayerConfig(weight=spec)))


def test_types_by_name() -> None:
    assert ExtendedQuantType.from_string("QBFloat16") is ExtendedQuantType.QBFloat16
    assert get_tensor_type_from_qType(ExtendedQuantType.QInt16) == get_tensor_type_from_qType(
        QuantType.QInt16
    )
    with pytest.raises(ValueError, match="has no 'QInt9'"):
        ExtendedQuantType.from_string("QInt9")


def test_what_is_not_there_explains_itself() -> None:
    with pytest.raises(QuarkConfigError, match="no search of the first kind"):
        AutoSearch("model.onnx", None)
