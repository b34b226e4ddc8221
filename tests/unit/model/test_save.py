"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from helpers import build, feeds, node, normal, session
from roundel.errors import OutputError
from roundel.model.files import check_writable, replacing, save_model, staged, write_text


def net(seed: int = 0) -> ir.Model:
    proto = build(
        [node("MatMul", ["x", "k"], ["y"])], {"x": [1, 32]}, ["y"], {"k": normal(32, 32, seed=seed)}
    )
    return ir.from_proto(proto)


def runs(path: Path) -> bytes:
    proto = onnx.load(path)
    return bytes(session(proto).run(None, feeds({"x": (1, 32)}, 1)[0])[0].tobytes())


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_text_appears_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "grüße")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "grüße"
    assert names(tmp_path) == ["a.json"]


def test_a_failure_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_until_the_end_the_old_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent, "a rename is atomic only within one file system"
    assert path.read_text() == "new"


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_writable_place_passes(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.onnx")
    assert names(tmp_path) == []


def test_a_folder_does_not(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a folder"):
        check_writable(tmp_path)


def test_a_model_in_one_file(tmp_path: Path) -> None:
    save_model(net(), tmp_path / "m.onnx")
    assert names(tmp_path) == ["m.onnx"]
    assert runs(tmp_path / "m.onnx")


def test_a_model_with_its_weights_beside_it(tmp_path: Path) -> None:
    save_model(net(), tmp_path / "m.onnx", external_data=True)
    assert names(tmp_path) == ["m.onnx", "m.onnx.data"]
    save_model(net(), tmp_path / "whole.onnx")
    assert runs(tmp_path / "m.onnx") == runs(tmp_path / "whole.onnx")
    assert (tmp_path / "m.onnx").stat().st_size < 1000


def test_saving_again_keeps_the_old_weights_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save_model(net(0), path, external_data=True)
    old = runs(path)
    with staged(net(1), path, external_data=True):
        assert runs(path) == old
    assert runs(path) != old


def test_a_failed_second_save_leaves_the_first(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save_model(net(0), path, external_data=True)
    old, listing = runs(path), names(tmp_path)

    def interrupt() -> None:
        with staged(net(1), path, external_data=True) as temporary:
            assert runs(temporary) != old
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert names(tmp_path) == listing
    assert runs(path) == old


def test_saving_does_not_touch_the_model(tmp_path: Path) -> None:
    model = net()
    tensor = model.graph.initializers["k"].const_value
    save_model(model, tmp_path / "m.onnx", external_data=True)
    assert model.graph.initializers["k"].const_value is tensor


def test_large_models_get_external_data_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundel.model.files._PROTOBUF_LIMIT", 100)
    save_model(net(), tmp_path / "m.onnx")
    assert names(tmp_path) == ["m.onnx", "m.onnx.data"]
