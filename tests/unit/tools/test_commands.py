"""The tools on the command line: each under the names and in the order that the documents use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from roundel.errors import OutputError, RecipeError
from roundel.quark.tools import TOOLS, run_tool

# What each tool is run on, and its arguments; {i} and {o} are the files.
QUANTIZED = {
    "convert_a8w8_npu_to_a8w8_cpu": ("xint8", "{i} {o}"),
    "convert_bias_int32_to_int16": ("a8w8", "--input_model_path {i} --output_model_path {o}"),
    "convert_customqdq_to_qdq": ("a16w8", "--input_model {i} --output_model {o}"),
    "convert_qdq_to_customqdq": ("a16w8", "--input_model {i} --output_model {o}"),
    "convert_qdq_to_qop": ("u8s8_aaws", "--input_model {i} --output_model {o}"),
    "convert_quant_to_float": ("a8w8", "{i} {o}"),
    "remove_qdq": ("a8w8", "--input_model {i} --output_model {o}"),
    "remove_qdq_mul_add": ("a8w8", "--input_model {i} --output_model {o}"),
    "remove_qdq_between_ops": (
        "a8w8",
        "--input_model {i} --between_ops Conv,Relu;Mul,Add --output_model {o}",
    ),
    "convert_s8s8_to_u8s8": ("s8s8_aaws", "{i} {o}"),
    "convert_u16s8_to_s16s8": ("u16s8_aaws", "{i} {o}"),
    "convert_u16u8_to_u8u8": ("u16s8_aaws", "{i} {o}"),
    "convert_resize_fs_to_pof2s": ("a8w8", "--input_model {i} --output_model {o}"),
}
FLOAT = {
    "convert_nchw_to_nhwc": "--input {i} --output {o}",
    "convert_opset_version": "--input {i} --target_opset 20 --output {o}",
    "convert_dynamic_to_fixed": "--fix_shapes x:[1,3,8,8] {i} {o}",
    "fix_shapes": "--input_model_path {i} --output_model_path {o} --fix_shapes x:[1,3,8,8]",
    "remove_initializer_from_input": "--input {i} --output {o}",
    "convert_shared_initializer_to_unique": "--input {i} --op_types ['Conv','Gemm'] --output {o}",
    "replace_inf_weights": "--input_model {i} --output_model {o} --replace_inf_value 100",
    "convert_fp32_to_bf16": "--input {i} --output {o} --format with_cast",
    "convert_fp16_to_bf16": "--input {i} --output {o}",
    "convert_fp32_to_bfp16": "--input {i} --output {o}",
    "convert_fp16_to_bfp16": "{i} {o}",
    "convert_fp32_to_fp16": "--input {i} --output {o} --keep_io_types",
    "convert_fp16_to_fp32": "--input {i} --output {o}",
    "random_quantize": "--input_model_path {i} --quantized_model_path {o} --config A8W8 --exclude_nodes gemm",
}
# These have tests of their own.
ELSEWHERE = {
    *("evaluate", "convert_custom_ops", "replace_bfloat16_qdq_cast", "remove_bf16_cast"),
    *("insert_clip_bfloat16_qdq", "convert_onnx_to_onnxtxt", "convert_onnxtxt_to_onnx"),
    *("save_weights_hist", "save_tensor_hist", "print_a16w8_a8w8_nodes"),
}


def test_every_tool_is_run_somewhere() -> None:
    assert set(TOOLS) == {*QUANTIZED, *FLOAT, *ELSEWHERE}


def called(name: str, line: str, source: Path, target: Path) -> str:
    return TOOLS[name]([word.format(i=source, o=target) for word in line.split(" ")])


@pytest.mark.parametrize("name", QUANTIZED)
def test_tools_for_quantized_models(name: str, model_of, sample, tmp_path: Path) -> None:
    recipe, line = QUANTIZED[name]
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model_of(recipe), source)
    called(name, line, source, target)
    results = [_run(path, sample) for path in (source, target)]
    assert np.allclose(*results, atol=0.3)


@pytest.mark.parametrize("name", FLOAT)
def test_tools_for_float_models(name: str, float_model, sample, tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(float_model, source)
    called(name, FLOAT[name], source, target)
    feed = {"x": sample["x"].transpose(0, 2, 3, 1)} if name == "convert_nchw_to_nhwc" else sample
    far = 100.0 if name == "random_quantize" else 0.3
    assert np.allclose(_run(target, feed), _run(source, sample), atol=far)


def _run(path: Path, feed) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


def test_text_files(float_model, tmp_path: Path) -> None:
    source, text, back = tmp_path / "m.onnx", tmp_path / "m.onnxtxt", tmp_path / "b.onnx"
    onnx.save(float_model, source)
    called("convert_onnx_to_onnxtxt", "--input_model {i} --output_model {o}", source, text)
    called("convert_onnxtxt_to_onnx", "--input_model {i} --output_model {o}", text, back)
    assert onnx.load(back) == float_model


def test_two_folders_of_results(tmp_path: Path, capsys) -> None:
    for folder, shift in (("baseline", 0.0), ("quantized", 0.1)):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "0.npy", np.arange(4, dtype=np.float32) + shift)
    flags = ["--baseline_results_folder", tmp_path / "baseline"]
    flags += ["--quantized_results_folder", tmp_path / "quantized"]
    assert run_tool("evaluate", [str(flag) for flag in flags]) == 0
    first = capsys.readouterr().out
    assert "L2 distance: mean 0.2" in first
    run_tool("evaluate", [str(tmp_path / "baseline"), str(tmp_path / "quantized")])
    assert capsys.readouterr().out == first


def test_layers_are_listed(model_of, tmp_path: Path, capsys) -> None:
    onnx.save(model_of("a16w8"), tmp_path / "m.onnx")
    run_tool("print_a16w8_a8w8_nodes", [str(tmp_path / "m.onnx")])
    assert "0 layers with 8-bit, 2 with 16-bit activations" in capsys.readouterr().out


def test_a_misspelt_tool_and_a_missing_argument(tmp_path: Path, capsys) -> None:
    with pytest.raises(RecipeError, match="no tool") as found:
        run_tool("convert_s8s8_to_u8u8", [])
    assert "convert_s8s8_to_u8s8" in str(found.value)
    with pytest.raises(SystemExit):
        run_tool("remove_qdq", [])
    assert "missing: --input, --output" in capsys.readouterr().err


def test_a_tool_never_writes_over_its_input(float_model, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(float_model, path)
    with pytest.raises(OutputError, match="overwrite"):
        run_tool("remove_qdq", [str(path), str(path)])


def test_the_command_lists_and_runs_tools(float_model, tmp_path: Path) -> None:
    onnx.save(float_model, tmp_path / "m.onnx")
    listing = _roundel("tools")
    assert "convert_qdq_to_qop" in listing.stdout
    done = _roundel("tools", "replace_inf_weights", str(tmp_path / "m.onnx"), str(tmp_path / "o.onnx"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o.onnx").exists()
    wrong = _roundel("tools", "nothing_like_it")
    assert wrong.returncode == 2
    assert "There is no tool" in wrong.stderr


def _roundel(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "roundel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
