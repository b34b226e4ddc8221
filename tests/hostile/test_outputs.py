"""Outputs that cannot be written, or must not be."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import roundel
from helpers import build, feeds, node, normal, session
from roundel.errors import OutputError, VerifyError


def test_a_missing_folder(refused: Any, model: Path, tmp_path: Path) -> None:
    error = refused(model, OutputError, output=tmp_path / "no" / "out.onnx")
    assert "folder does not exist" in error.what
    assert error.where == str(tmp_path / "no")
    assert "mkdir -p" in error.hint


def test_an_output_that_is_a_folder(refused: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    error = refused(model, OutputError, output=tmp_path / "folder")
    assert "is a folder" in error.what
    assert error.expected == "a file name"


def test_a_read_only_folder(refused: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, who may write anywhere.
    monkeypatch.setattr("roundel.model.files.os.access", lambda path, mode: False)
    error = refused(model, OutputError)
    assert "read-only" in error.what
    assert error.where == str(model.parent)
    assert "Choose" in error.hint


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_folder_of_somebody_else(model: Path, output: Path, samples: list[Any], untouched: None) -> None:
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        # The folders above are open to their owner only: the model has to be in memory.
        try:
            from roundel.model.files import check_writable

            check_writable(output)
        except (OutputError, PermissionError) as error:
            os._exit(7 if isinstance(error, OutputError) else 8)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_the_input_is_not_overwritten(refused: Any, model: Path) -> None:
    error = refused(model, OutputError, output=model)
    assert "overwrite the input model" in error.what
    assert "another output" in error.hint


def test_the_input_is_not_overwritten_by_another_name(refused: Any, model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.onnx"
    link.symlink_to(model)
    assert "overwrite" in refused(model, OutputError, output=link).what
    roundabout = tmp_path / ".." / tmp_path.name / "model.onnx"
    assert "overwrite" in refused(model, OutputError, output=roundabout).what


def test_the_record_does_not_overwrite_the_recipe(refused: Any, model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.json"
    recipe.write_text('{"extends": "a8w8"}')
    error = refused(model, OutputError, output=tmp_path / "mine.onnx", recipe=recipe)
    assert "record would overwrite the recipe" in error.what
    assert error.where == str(recipe)


def test_the_record_does_not_overwrite_the_model(refused: Any, model: Path, tmp_path: Path) -> None:
    error = refused(model, OutputError, output=tmp_path / "out.json")
    assert "record" in error.what
    assert ".onnx" in error.expected


def test_the_output_does_not_overwrite_the_statistics(refused: Any, model: Path, output: Path) -> None:
    assert "statistics file" in refused(model, OutputError, stats=output).what


def test_a_missing_input_with_an_existing_output(refused: Any, tmp_path: Path) -> None:
    from roundel.errors import ModelError

    assert "does not exist" in refused(tmp_path / "none.onnx", ModelError).what


def full(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def half_written(model: Any, path: Any, *arguments: Any, **options: Any) -> None:
    Path(path).write_bytes(b"half a mod")
    if options.get("external_data"):
        (Path(path).parent / options["external_data"]).write_bytes(b"half of the weights")
    full()


@pytest.mark.parametrize("external", [False, True])
def test_a_full_disk(
    refused: Any, model: Path, output: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    monkeypatch.setattr(ir, "save", half_written)
    error = refused(model, OutputError, changes={"output": {"external_data": external}})
    assert "untouched" in error.what
    assert error.where == str(output)
    assert error.observed == "No space left on device"
    assert "space" in error.hint


def test_a_disk_that_is_full_when_the_record_is_written(
    refused: Any, model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    error = refused(model, OutputError)
    assert error.where == str(output.with_suffix(".json"))


def test_a_disk_without_room_for_a_temporary_file(
    refused: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundel.model.files.tempfile.mkstemp", full)
    assert "No space" in refused(model, OutputError).observed


def test_a_name_that_the_file_system_refuses(refused: Any, model: Path, tmp_path: Path) -> None:
    error = refused(model, OutputError, output=tmp_path / ("n" * 300 + ".onnx"))
    assert "name too long" in error.observed.lower()


def test_a_result_that_fails_its_check_replaces_nothing(
    refused: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, threads: int) -> None:
        raise VerifyError("The quantized model fails the ONNX checker.")

    monkeypatch.setattr("roundel.result.check_file", fail)
    refused(model, VerifyError)


def test_an_interrupt_while_writing(
    model: Path, output: Path, samples: list[Any], untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(model: Any, path: Any, *arguments: Any, **options: Any) -> None:
        Path(path).write_bytes(b"half a mod")
        raise KeyboardInterrupt

    monkeypatch.setattr(ir, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        roundel.quantize(model, output, data=samples)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_of_the_command(model: Path, output: Path, tmp_path: Path, untouched: None) -> None:
    """SIGINT once calibration runs: exit code 130, no traceback, no partial file."""
    started = tmp_path.parent / f"{tmp_path.name}-started"
    script = f"""
import signal, sys, time
from pathlib import Path
import roundel.stages
from roundel.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background inherit "ignore"
true = roundel.stages.observe
def slow(*arguments, **options):
    found = true(*arguments, **options)
    Path({str(started)!r}).touch()
    time.sleep(60)
    return found
roundel.stages.observe = slow
sys.argv = ["roundel", "quantize", {str(model)!r}, "-o", {str(output)!r}, "--random", "2"]
main()
"""
    command = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not started.exists() and command.poll() is None:
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    printed, complained = command.communicate(timeout=60)
    started.unlink()
    assert command.returncode == 130
    assert "interrupted" in complained
    assert "Traceback" not in printed + complained


# Weights in a file of their own: what Roundel wrote in an earlier run goes, and nothing else.


@pytest.fixture
def wide() -> onnx.ModelProto:
    """One with a weight that is large enough to lie apart."""
    return build([node("MatMul", ["x", "k"], ["y"], name="fc")], {"x": [1, 32]}, ["y"], {"k": normal(32, 32)})


def apart(proto: onnx.ModelProto, path: Path) -> None:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    onnx.save_model(copy, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)


def run(kind: str, source: Any, target: Path, apart: bool) -> None:
    if kind == "convert":
        roundel.convert(source, target, external_data=apart)
    else:
        changes = {"output": {"external_data": apart}}
        roundel.quantize(source, target, data=feeds({"x": (1, 32)}), changes=changes)


def result(path: Path) -> bytes:
    return bytes(session(onnx.load(path)).run(None, feeds({"x": (1, 32)}, 1)[0])[0].tobytes())


@pytest.mark.parametrize("kind", ["quantize", "convert"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_data_that_the_input_reads_stay(
    tmp_path: Path, wide: onnx.ModelProto, kind: str, again: bool, ours: bool
) -> None:
    path, copy = tmp_path / "model.onnx", tmp_path / "float.onnx"
    if ours:
        roundel.convert(wide, path, to="fp32", external_data=True)
    else:
        apart(wide, path)
    copy.write_bytes(path.read_bytes())
    data, before = tmp_path / "model.onnx.data", result(copy)
    content = data.read_bytes()
    run(kind, copy, path, again)
    assert data.read_bytes() == content
    assert result(copy) == before
    assert result(path)


@pytest.mark.parametrize("kind", ["quantize", "convert"])
def test_data_that_another_model_reads_stay(tmp_path: Path, wide: onnx.ModelProto, kind: str) -> None:
    path, other = tmp_path / "model.onnx", tmp_path / "backup"
    run(kind, wide, path, apart=True)
    other.write_bytes(path.read_bytes())
    before = result(other)
    run(kind, wide, path, apart=True)
    assert result(other) == before


@pytest.mark.parametrize("kind", ["quantize", "convert"])
def test_data_of_another_tool_stay(tmp_path: Path, wide: onnx.ModelProto, kind: str) -> None:
    """Even where the old output says that Roundel made it, and refers to the file."""
    path = tmp_path / "model.onnx"
    run(kind, wide, path, apart=True)
    changed = onnx.load(path)
    (tmp_path / "model.onnx.data").unlink()
    for tensor in changed.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) // 2, tensor.name))
    apart(changed, path)
    content = (tmp_path / "model.onnx.data").read_bytes()
    run(kind, wide, path, apart=True)
    assert (tmp_path / "model.onnx.data").read_bytes() == content
    assert result(path)


def test_a_file_that_has_the_name_of_the_data_stays(tmp_path: Path, wide: onnx.ModelProto) -> None:
    foreign = tmp_path / "model.onnx.data"
    foreign.write_bytes(b"somebody's")
    (tmp_path / "model.onnx.1.data").symlink_to("nowhere")
    for _ in range(2):
        run("quantize", wide, tmp_path / "model.onnx", apart=True)
        assert foreign.read_bytes() == b"somebody's"
        assert not (tmp_path / "nowhere").exists()
    assert result(tmp_path / "model.onnx")


def test_a_model_in_memory_whose_data_the_output_would_replace(tmp_path: Path, wide: onnx.ModelProto) -> None:
    path = tmp_path / "model.onnx"
    run("convert", wide, path, apart=True)
    held = ir.load(path)
    run("convert", held, path, apart=True)
    tensor = held.graph.initializers["k"].const_value
    assert tensor is not None
    assert tensor.numpy().shape == (32, 32)
    assert (tmp_path / "model.onnx.data").exists()


@pytest.mark.parametrize("kind", ["quantize", "convert"])
def test_two_runs_leave_no_orphan(tmp_path: Path, wide: onnx.ModelProto, kind: str) -> None:
    path = tmp_path / "model.onnx"
    for _ in range(3):
        run(kind, wide, path, apart=True)
        assert len(list(tmp_path.glob("*.data"))) == 1
        assert result(path)
    run(kind, wide, path, apart=False)
    assert not list(tmp_path.glob("*.data"))
    assert result(path)


def test_weights_that_all_stay_in_the_model_make_no_file(tmp_path: Path) -> None:
    small = build([node("MatMul", ["x", "k"], ["y"])], {"x": [1, 4]}, ["y"], {"k": normal(4, 4)})
    for _ in range(2):
        roundel.convert(small, tmp_path / "model.onnx", external_data=True)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_a_second_run_that_is_killed_leaves_the_first(tmp_path: Path, wide: onnx.ModelProto) -> None:
    path = tmp_path / "model.onnx"
    run("convert", wide, path, apart=True)
    before, files = result(path), {file: file.read_bytes() for file in tmp_path.iterdir()}
    script = f"""
import os
import onnx_ir as ir
from pathlib import Path
from roundel.model.files import staged
with staged(ir.load({str(path)!r}), Path({str(path)!r}), external_data=True):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert all(file.read_bytes() == content for file, content in files.items())
    assert result(path) == before
    run("convert", wide, path, apart=True)
    assert not (tmp_path / "model.onnx.data").exists()
    assert result(path) == before
