"""ModelQuantizer and its functional forms, on a small network and in ONNX Runtime."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from helpers import activations, assert_sound, initializers, ops, run, weights
from roundel.errors import RoundelError
from roundel.quark import (
    A8W8_QCONFIG,
    AdaRoundConfig,
    CachedDataReader,
    CalibrationMethod,
    CLEConfig,
    Config,
    DataType,
    ExtendedQuantFormat,
    ExtendedQuantType,
    GPTQConfig,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    PathDataReader,
    PowerOfTwoMethod,
    QConfig,
    QLayerConfig,
    QuantFormat,
    QuantizationConfig,
    QuantType,
    RandomDataReader,
    UInt8Spec,
    VitisQuantFormat,
    VitisQuantType,
    XInt8Spec,
    dump_model,
    get_default_config,
    parse_data_type,
    quantize_dynamic,
    quantize_static,
)
from roundel.quark.presets import config_names
from script_cases import SHAPE, Reader

pytestmark = pytest.mark.usefixtures("capsys")


def quantized(model: Any, preset: str = "A8W8", data: Any = None, **settings: Any) -> onnx.ModelProto:
    config = get_default_config(preset)
    options = settings.pop("extra_options", {})
    for name, value in settings.items():
        setattr(config, name, value)
    config.extra_options.update(options)
    result = ModelQuantizer(Config(config)).quantize_model(model, None, Reader() if data is None else data)
    assert result is not None
    return result


def stored(model: onnx.ModelProto) -> dict[str, str]:
    return {name: found.dtype for name, found in activations(model).items()}


def test_a_file_is_written_and_nothing_returned(path: Path, reader: Reader, tmp_path: Path, model) -> None:
    out = tmp_path / "out.onnx"
    config = Config(global_quant_config=get_default_config("XINT8"))
    assert ModelQuantizer(config).quantize_model(str(path), str(out), reader) is None
    assert_sound(model, onnx.load(out))
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["recipe"]["name"] == "xint8"


def test_without_an_output_the_model_comes_back(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    result = quantized(model)
    assert model.SerializeToString() == before
    assert_sound(model, result)
    got, wanted = (run(each, Reader(1).get_next())[0] for each in (result, model))
    assert np.linalg.norm(got - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("preset", "activation", "domain"),
    [
        ("A8W8", "int8", "com.microsoft"),
        ("A16W8", "int16", "com.microsoft"),
        ("XINT8", "uint8", ""),
        ("U8S8_AAWS", "uint8", ""),
        ("S16S8_ASWS", "int16", "com.microsoft"),
        ("U16S8_AAWS", "uint16", "com.microsoft"),
    ],
)
def test_presets_write_the_types_and_domains_of_the_documents(
    preset: str, activation: str, domain: str, model
) -> None:
    result = quantized(model, preset)
    found = activations(result)
    assert {(s.dtype, s.domain) for s in found.values()} == {(activation, domain)}
    assert weights(result)["l"].dtype == "int8"


@pytest.mark.parametrize("preset", [name for name in config_names() if "_ADA" not in name])
def test_every_preset_gives_a_model_that_runs(preset: str, model) -> None:
    config = get_default_config(preset)
    config.print_summary = False
    config.include_fast_ft = False
    config.extra_options.pop("FastFinetune", None)
    result = ModelQuantizer(Config(config)).quantize_model(model, None, Reader(2))
    sample = Reader(1).get_next()
    expected, got = run(model, sample)[0], run(result, sample)[0]
    coarse = preset.startswith(("MX4", "MXFP"))  # three bits of precision and fewer
    assert np.linalg.norm(got - expected) < (0.6 if coarse else 0.15) * np.linalg.norm(expected)


def test_the_config_stays_as_it_was(path: Path, reader: Reader) -> None:
    config = Config(get_default_config("A8W8"))
    before = copy.deepcopy(config)
    quantizer = ModelQuantizer(config)
    quantizer.quantize_model(path, None, reader)
    assert config == before
    assert quantizer.config is config
    newer = A8W8_QCONFIG
    same = copy.deepcopy(newer)
    ModelQuantizer(newer).quantize_model(path, None, Reader())
    assert newer == same


def test_the_operator_format(model, tmp_path: Path) -> None:
    made = quantized(model, "U8S8_AAWS", quant_format=QuantFormat.QOperator)
    assert {"QLinearConv", "QLinearAdd", "QGemm"} <= set(ops(made))
    plain = quantized(model, "U8S8_AAWS")
    x = Reader(1).get_next()
    step = max(float(found.scale) for found in activations(plain).values())
    np.testing.assert_allclose(run(made, x)[0], run(plain, x)[0], atol=2 * step)
    config, out = get_default_config("U8S8_AAWS"), tmp_path / "operators.onnx"
    config.quant_format = QuantFormat.QOperator
    assert ModelQuantizer(Config(config)).quantize_model(model, out, Reader()) is None
    assert onnx.load(out).graph.node == made.graph.node


def test_floats_learn_where_there_is_data(model, tmp_path: Path) -> None:
    """Without data, biases stay; with it, they are corrected; equalization is tried where it is asked for."""
    config = QuantizationConfig(
        quant_format=ExtendedQuantFormat.QDQ,
        activation_type=ExtendedQuantType.QBFloat16,
        weight_type=ExtendedQuantType.QBFloat16,
    )
    quantizer = ModelQuantizer(Config(config))
    assert quantizer.quantize_model(model) is not None
    assert quantizer.quantize_model(model, tmp_path / "bf16.onnx", Reader()) is None
    record = json.loads((tmp_path / "bf16.json").read_text())
    assert "equalization" in [step["step"] for step in record["improvements"]]


def test_gptq_where_there_are_convolutions(model) -> None:
    layers = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    made = ModelQuantizer(QConfig(layers, algo_config=[GPTQConfig()])).quantize_model(model, None, Reader())
    assert {found.dtype for found in weights(made).values()} == {"int8"}
    assert len(weights(made)) == 3
    assert stored(made) == {}


def test_a_missing_model_is_a_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found:
        ModelQuantizer(Config(get_default_config("A8W8"))).quantize_model(tmp_path / "none.onnx")
    assert isinstance(found.value, RoundelError)


def test_no_data_is_a_value_error_with_advice(model) -> None:
    with pytest.raises(ValueError, match="no calibration data") as found:
        ModelQuantizer(Config(get_default_config("A8W8"))).quantize_model(model)
    assert "UseRandomData" in str(found.value)


def test_something_else_than_a_config_is_refused() -> None:
    with pytest.raises(ValueError, match="not a config"):
        ModelQuantizer(get_default_config("A8W8"))  # type: ignore[arg-type]


def test_random_data_where_it_is_asked_for(model) -> None:
    config = get_default_config("A8W8")
    config.extra_options["UseRandomData"] = True
    config.extra_options["RandomDataReaderInputDataRange"] = {"x": [0, 5]}
    result = ModelQuantizer(Config(config)).quantize_model(model)
    assert float(activations(result)["x"].scale) == pytest.approx(5 / 127, rel=0.1)


def test_a_folder_of_arrays(model, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    source = Reader()
    while (sample := source.get_next()) is not None:
        np.save(folder / f"{len(list(folder.iterdir()))}.npy", sample["x"])
    config = Config(get_default_config("A8W8"))
    given = ModelQuantizer(config).quantize_model(model, calibration_data_path=str(folder))
    assert given == quantized(model)


def test_excluded_nodes_stay_float_even_where_preparation_rewrote_them(model) -> None:
    result = quantized(model, nodes_to_exclude=["norm", "^.*head.*"])
    assert "l" in initializers(result)
    assert "x" not in stored(result), "the batch norm was folded into the stem, which is excluded with it"


def test_a_node_that_is_not_there_is_warned_about(model, caplog, monkeypatch) -> None:
    assert quantized(model, nodes_to_exclude=["haed"]) == quantized(model)
    assert "no node 'haed'" in caplog.text
    with pytest.raises(ValueError, match="None of the nodes"):
        quantized(model, nodes_to_quantize=["haed"])
    with pytest.raises(ValueError, match="no node 'blok'"):
        quantized(model, subgraphs_to_exclude=[(["blok"], ["sum"])])
    monkeypatch.setenv("ROUNDEL_QUARK_STRICT", "1")
    with pytest.raises(ValueError, match="no node 'haed'") as found:
        quantized(model, nodes_to_exclude=["haed"])
    assert "head" in str(found.value)


def test_channels_last_from_data_with_channels_first(model, tmp_path: Path) -> None:
    """The data stay as the float model takes them: from a reader, a folder, and random ones."""
    images = tmp_path / "images"
    images.mkdir()
    for index, sample in enumerate(iter(Reader().get_next, None)):
        np.save(images / f"{index}.npy", sample["x"])
    made = quantized(
        model, convert_nchw_to_nhwc=True, extra_options={"EvalMetrics": True, "EvalDataReader": Reader(2)}
    )
    assert [d.dim_value for d in made.graph.input[0].type.tensor_type.shape.dim] == [1, 8, 8, 3]
    config = get_default_config("A8W8")
    config.convert_nchw_to_nhwc = True
    of_folder = ModelQuantizer(Config(config)).quantize_model(model, calibration_data_path=str(images))
    assert of_folder == made
    config.extra_options["UseRandomData"] = True
    assert ModelQuantizer(Config(config)).quantize_model(model) is not None
    plain = quantized(model)
    x = Reader(1).get_next()["x"]
    first, last = run(plain, {"x": x})[0], run(made, {"x": x.transpose(0, 2, 3, 1)})[0]
    np.testing.assert_array_equal(first, last)


def test_excluded_subgraphs_and_borders(model) -> None:
    middle = quantized(model, subgraphs_to_exclude=[(["block"], ["sum"])])
    assert {"k", "l"} & set(initializers(middle)) == {"k"}
    assert {"k", "l"} & set(initializers(quantized(model, output_nodes=["sum"]))) == {"l"}
    late = quantized(model, input_nodes=["block"])
    assert {"k", "l"} & set(initializers(late)) == set()
    assert "w_quantized" not in initializers(late)


def test_chosen_nodes_and_types(model) -> None:
    assert set(weights(quantized(model, nodes_to_quantize=["head"]))) == {"l"}
    only = quantized(model, op_types_to_quantize=["Gemm", "BatchNormalization"])
    assert set(weights(only)) == {"l"}


def test_overrides_of_single_tensors(model) -> None:
    options = {"TensorQuantOverrides": {"a": [{"quant_type": QuantType.QInt16}]}}
    result = quantized(model, extra_options=options)
    assert stored(result)["a"] == "int16"
    assert stored(result)["x"] == "int8"


def test_vitis_names_of_older_releases(model) -> None:
    config = QuantizationConfig(
        calibrate_method=PowerOfTwoMethod.NonOverflow,
        quant_format=VitisQuantFormat.QDQ,
        activation_type=VitisQuantType.QInt16,
        weight_type=VitisQuantType.QInt8,
        extra_options={"ActivationSymmetric": True},
    )
    result = ModelQuantizer(Config(config)).quantize_model(model, None, Reader())
    scales = [float(s.scale) for s in activations(result).values()]
    assert all(np.log2(scale) == round(np.log2(scale)) for scale in scales)
    assert set(stored(result).values()) == {"int16"}


def test_a_stated_method_is_obeyed_and_a_name_means_the_format(model) -> None:
    written = QuantizationConfig(
        calibrate_method=CalibrationMethod.MinMax,
        quant_format=ExtendedQuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": True, "ForceQuantizeNoInputCheck": True},
    )
    largest = max(float(np.abs(Reader(1).get_next()["x"]).max()) for _ in range(1))
    stated = ModelQuantizer(Config(written)).quantize_model(model, None, Reader())
    named = quantized(model, extra_options={"Recipe": {"improve": {"ranges": False}}})
    written.extra_options["Recipe"] = {"improve": {"ranges": False}}
    stated = ModelQuantizer(Config(written)).quantize_model(model, None, Reader())
    assert float(activations(stated)["x"].scale) * 127 >= largest
    assert float(activations(named)["x"].scale) < float(activations(stated)["x"].scale)


def test_the_newer_config(model) -> None:
    config = QConfig(
        global_config=QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
        specific_layer_config={QLayerConfig(output_tensors=Int16Spec()): ["sum"]},
        layer_type_config={None: ["GlobalAveragePool"]},
        exclude=["head", (["stem"], ["relu"])],
        algo_config=[CLEConfig(cle_steps=3)],
        CalibDataSize=5,
    )
    assert "Int8(symmetric" in str(config)
    result = ModelQuantizer(config).quantize_model(model, None, Reader())
    assert stored(result)["a"] == "int16"
    assert {"l", "w"} & set(weights(result)) == set()


def test_the_newer_config_survives_writing_it_down() -> None:
    config = QConfig(
        QLayerConfig(activation=XInt8Spec(), weight=XInt8Spec()),
        algo_config=[AdaRoundConfig(num_iterations=7)],
        exclude=["a"],
        extra_options={"CalibDataSize": 3},
    )
    words = json.loads(json.dumps(config.to_dict()))
    assert QConfig.from_dict(words) == config
    assert words["algo_config"] == [{"name": "adaround", "num_iterations": 7}]


# What Quark 0.13 writes down: `QConfig(…).to_dict()`.
_SPEC = {
    "symmetric": True,
    "scale_type": "ScaleType.Float32",
    "calibration_method": "CalibMethod.Percentile",
    "quant_granularity": "QuantGranularity.Tensor",
    "data_type": "Int8",
}
WRITTEN = {
    "global_config": {"input_tensors": _SPEC, "weight": _SPEC},
    "specific_layer_config": [[{"input_tensors": {**_SPEC, "data_type": "Int16"}, "weight": _SPEC}, ["n1"]]],
    "layer_type_config": [[None, ["Conv"]]],
    "exclude": ["a"],
    "algo_config": [{"name": "adaround"}, {"name": "cle", "cle_steps": 2}],
    "use_external_data_format": True,
    "extra_options": {"Percentile": 99.0},
}


def test_a_config_that_the_reference_wrote_down() -> None:
    config = QConfig.from_dict(WRITTEN)
    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    assert config.global_config == layer
    assert [type(one).__name__ for one in config.algo_config] == ["AdaRoundConfig", "CLEConfig"]
    assert config.algo_config[1].cle_steps == 2
    assert config.to_dict() == WRITTEN, "and it reads what is written down here"


def test_layer_configs_from_dictionaries_as_others_write_them() -> None:
    """Olive's passes say `activation`, sometimes beside `input_tensors`, and the type alone."""
    short = {"data_type": "UInt8"}
    found = QLayerConfig.from_dict({"activation": short, "input_tensors": _SPEC, "weight": short})
    assert found.input_tensors == Int8Spec()
    assert found.weight == UInt8Spec()
    assert QLayerConfig.from_dict({"activation": _SPEC}).input_tensors == Int8Spec()
    assert isinstance(parse_data_type("BFloat16"), DataType)
    assert parse_data_type(None) is None
    for words in ({"weight": {"data_type": "Int9"}}, {"weight": {**_SPEC, "scale_type": "ScaleType.Float"}}):
        with pytest.raises(ValueError, match="There is no"):
            QLayerConfig.from_dict(words)


def test_layer_configs_speak_of_nodes(model) -> None:
    config = QConfig(
        QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
        specific_layer_config={QLayerConfig(weight=Int16Spec()): ["^.*blo.*"]},
        layer_type_config={QLayerConfig(input_tensors=Int16Spec()): ["Gemm"]},
    )
    result = ModelQuantizer(config).quantize_model(model, None, Reader())
    assert weights(result)["k"].dtype == "int16"
    assert weights(result)["l"].dtype == "int8"
    assert stored(result)["f"] == "int16"
    wrong = {QLayerConfig(bias=Int8Spec()): ["head"]}
    other = QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), wrong)
    with pytest.raises(ValueError, match="bias"):
        ModelQuantizer(other).quantize_model(model, None, Reader())


def test_algorithms_beside_a_classic_config(model, monkeypatch) -> None:
    import roundel.quark.quantizer as room

    asked = []
    real = room.translate

    def spy(config, source, algorithms):
        asked.append(real(config, source, algorithms).recipe)
        return real(config, source)

    monkeypatch.setattr(room, "translate", spy)
    config = get_default_config("A8W8")
    ModelQuantizer(Config(config)).quantize_model(
        model, None, Reader(), algorithms=[AdaRoundConfig(num_iterations=5)]
    )
    assert asked[0].improve.finetune.iterations == 5
    assert asked[0].effort == "high"
    assert "FastFinetune" not in config.extra_options


def test_dynamic_quantization_needs_no_data(path: Path, tmp_path: Path, model) -> None:
    out = tmp_path / "dynamic.onnx"
    assert quantize_dynamic(path, out, weight_type=QuantType.QUInt8) is None
    found = ops(onnx.load(out))
    assert "ConvInteger" in found
    by_config = Config(get_default_config("UINT8_DYNAMIC_QUANT"))
    assert ModelQuantizer(by_config).quantize_model(path) == onnx.load(out)


def test_the_functional_form(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "static.onnx"
    quantize_static(
        path,
        out,
        Reader(),
        quant_format=QuantFormat.QDQ,
        calibrate_method=PowerOfTwoMethod.MinMSE,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        enable_dpu=True,
        include_cle=True,
        extra_options={"ActivationSymmetric": True},
    )
    found = activations(onnx.load(out))
    assert {int(s.zero_point) for s in found.values()} == {128}
    assert all(np.log2(float(s.scale)) == round(np.log2(float(s.scale))) for s in found.values())
    with pytest.raises(ValueError, match="not known"):
        quantize_static(path, out, Reader(), enable_npu=True)


def test_ranges_are_kept_for_the_next_run(model, tmp_path: Path) -> None:
    kept = tmp_path / "ranges.npz"
    first = quantized(model, extra_options={"SaveAndRestore": str(kept)})
    assert kept.exists()
    assert quantized(model, extra_options={"SaveAndRestore": str(kept)}) == first


def test_what_is_printed(model, capsys) -> None:
    quantized(model, print_summary=False)
    assert capsys.readouterr().out == ""
    quantized(model, extra_options={"CalibWorkerNum": 3, "EvalMetrics": True, "EvalDataReader": Reader(3)})
    out = capsys.readouterr().out
    assert "note: CalibWorkerNum" in out
    assert "first output over 3 samples: cosine mean 0.9" in out
    quantized(model, print_summary=False, debug_mode=True)
    assert "weight of Conv" in capsys.readouterr().out


def test_temporary_files_go_where_they_are_told(model, tmp_path: Path) -> None:
    seen = []

    class Watching(Reader):
        def get_next(self) -> dict[str, Any] | None:
            seen.append(tempfile.gettempdir())
            return super().get_next()

    before = tempfile.gettempdir()
    quantized(model, data=Watching(2), extra_options={"TmpDir": str(tmp_path)})
    assert set(seen) == {str(tmp_path)}
    assert tempfile.gettempdir() == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"crypto_mode": True}, "does not encrypt"),
        ({"activation_type": ExtendedQuantType.QInt32}, "element type"),
        ({"calibrate_method": "MinMax"}, "calibration method is unknown"),
    ],
)
def test_settings_that_cannot_be_obeyed(settings: dict[str, Any], words: str, model) -> None:
    with pytest.raises(ValueError, match=words):
        quantized(model, **settings)


def test_readers(model, tmp_path: Path) -> None:
    random = RandomDataReader(model, input_data_range={"x": [2, 3]})
    sample = random.get_next()
    assert sample["x"].shape == SHAPE
    assert 2 <= sample["x"].min() <= sample["x"].max() < 3
    assert random.get_next() is None
    random.reset_iter()
    assert np.array_equal(random.get_next()["x"], sample["x"])
    cached = CachedDataReader(Reader(5), data_size=2, convert_nchw_to_nhwc=True, quantize_fp16=True)
    assert len(cached) == 2
    first = cached.get_next()["x"]
    assert first.shape == (1, 8, 8, 3)
    assert first.dtype == np.float16
    np.save(tmp_path / "a.npy", sample["x"])
    assert np.array_equal(PathDataReader(model, str(tmp_path)).get_next()["x"], sample["x"])


def test_dumping_every_tensor(model, tmp_path: Path) -> None:
    result = quantized(model)
    folder = tmp_path / "dump"
    dump_model(result, Reader(1), dump_float=True, output_dir=str(folder))
    codes = np.fromfile(folder / "x.bin", np.int8)
    scale = float(activations(result)["x"].scale)
    given = Reader(1).get_next()["x"].reshape(-1)
    assert np.allclose(codes * scale, np.clip(given, -128 * scale, 127 * scale), atol=scale / 2 + 1e-6)
    assert np.loadtxt(folder / "x.txt").tolist() == codes.tolist()
    assert (folder / "y_float.bin").exists()
