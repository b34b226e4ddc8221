"""The kit's folder: complete, repeatable, and careful with what is there already."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from roundel.errors import ModelError, OutputError, RecipeError
from roundel.kit import deploy
from roundel.kit.files import KitFile, write_folder
from roundel.targets.npu import Format

from .conftest import build, initializer, qdq_model, saved


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def float_model(path: Path, *, external: str | None = None, seed: int = 0) -> Path:
    weight = initializer("w", np.random.default_rng(seed).normal(size=(2, 2, 16, 16)))
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[8, 8, 8, 8])]
    model = build(nodes, [weight])
    if external:
        (path.parent / external).parent.mkdir(exist_ok=True)
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def test_the_kit_is_complete(a8w8: Path, tmp_path: Path) -> None:
    kit = deploy(a8w8, tmp_path / "kit", device="stx")
    assert kit.format is Format.A8W8
    assert kit.device == "stx"
    assert set(kit.files) == {"model.onnx", "provider_options.json", "run.py", "README.md", "kit.json"}
    files = tree(tmp_path / "kit")
    assert set(files) == set(kit.files)
    assert files["model.onnx"] == a8w8.read_bytes()
    assert json.loads(files["provider_options.json"]) == kit.options
    assert kit.options["cache_key"].startswith("digits_a8w8-")
    assert b"Silent CPU fallback" in files["README.md"]
    assert json.dumps(kit.to_dict())


def test_a_float_model_gets_the_config_file(tmp_path: Path) -> None:
    kit = deploy(float_model(tmp_path / "m.onnx"), tmp_path / "kit", device="krk", optimize_level=3)
    config = json.loads((tmp_path / "kit" / "vaiml_config.json").read_text())
    assert kit.options["config_file"] == "vaiml_config.json"
    assert [p["name"] for p in config["passes"]] == ["init", "vaiml_partition"]
    assert config["passes"][1]["vaiml_config"]["optimize_level"] == 3
    assert "BF16 needs a compiled cache" in (tmp_path / "kit" / "README.md").read_text()


def test_phoenix_gets_its_options(tmp_path: Path) -> None:
    kit = deploy(saved(qdq_model(), tmp_path / "m.onnx"), tmp_path / "kit", device="phx")
    assert kit.options["target"] == "X1"
    assert "Must be set on this device" in (tmp_path / "kit" / "README.md").read_text()


def test_a_refused_device_writes_nothing(a8w8: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not take A8W8"):
        deploy(a8w8, tmp_path / "kit", device="phx")
    assert list(tmp_path.iterdir()) == []


def test_wrong_words_write_nothing(a8w8: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        deploy(a8w8, tmp_path / "kit", device="npu9")
    with pytest.raises(RecipeError):
        deploy(a8w8, tmp_path / "kit", optimize_level=7)
    with pytest.raises(ModelError):
        deploy(tmp_path / "missing.onnx", tmp_path / "kit")
    assert list(tmp_path.iterdir()) == []


def test_same_inputs_same_bytes(a8w8: Path, tmp_path: Path) -> None:
    deploy(a8w8, tmp_path / "one")
    deploy(a8w8, tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "one").iterdir()}
    deploy(a8w8, tmp_path / "one")
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "one").iterdir()}


def test_permissions_follow_the_umask(a8w8: Path, tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    source.write_bytes(a8w8.read_bytes())
    source.chmod(0o400)
    old = os.umask(0o027)
    try:
        deploy(source, tmp_path / "kit")
    finally:
        os.umask(old)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "kit").iterdir()}
    assert modes.pop("run.py") == 0o750
    assert set(modes.values()) == {0o640}
    assert stat.S_IMODE((tmp_path / "kit").stat().st_mode) == 0o750


def test_external_data_comes_along(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    path = float_model(tmp_path / "src" / "m.onnx", external="weights/m.data")
    kit = deploy(path, tmp_path / "kit")
    assert "weights/m.data" in kit.files
    assert (tmp_path / "kit/weights/m.data").read_bytes() == (tmp_path / "src/weights/m.data").read_bytes()
    weight = onnx.load(tmp_path / "kit" / "model.onnx").graph.initializer[0]
    assert len(weight.raw_data) == 2 * 2 * 16 * 16 * 4


def test_the_cache_key_follows_external_data(tmp_path: Path) -> None:
    path = float_model(tmp_path / "m.onnx", external="m.data")
    first = deploy(path, tmp_path / "one").options["cache_key"]
    data = bytearray((tmp_path / "m.data").read_bytes())
    data[0] ^= 1
    (tmp_path / "m.data").write_bytes(data)
    assert deploy(path, tmp_path / "two").options["cache_key"] != first


def test_external_data_may_not_escape(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    path = float_model(tmp_path / "src" / "m.onnx", external="m.data")
    secret = (tmp_path / "src" / "m.data").rename(tmp_path / "secret")
    (tmp_path / "src" / "m.data").symlink_to(secret)
    with pytest.raises(ModelError):
        deploy(path, tmp_path / "kit")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../secret"
    onnx.save(model, path)
    with pytest.raises(ModelError):
        deploy(path, tmp_path / "kit")
    assert not (tmp_path / "kit").exists()


@pytest.mark.parametrize("name", ["run.py", "README.MD", "kit.json"])
def test_external_data_may_not_take_a_name_of_the_kit(tmp_path: Path, name: str) -> None:
    path = float_model(tmp_path / "m.onnx", external=name)
    with pytest.raises(OutputError, match="name of another file"):
        deploy(path, tmp_path / "kit")
    assert not (tmp_path / "kit").exists()


def test_the_parent_must_exist(a8w8: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        deploy(a8w8, tmp_path / "a" / "b")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="is a file"):
        deploy(a8w8, tmp_path / "file")


def test_foreign_files_stay(a8w8: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    deploy(a8w8, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "run.py").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["README.md", "model.onnx", "kit.json"])
def test_a_foreign_file_in_the_way_is_refused(a8w8: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match="in the way"):
        deploy(a8w8, tmp_path)
    assert tree(tmp_path) == {name: b"mine"}


def test_a_link_in_the_way_is_refused(a8w8: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "run.py").symlink_to(tmp_path / "victim")
    with pytest.raises(OutputError, match="symbolic link"):
        deploy(a8w8, tmp_path / "kit")
    assert (tmp_path / "victim").read_text() == "mine"


def test_an_edited_file_is_refused(a8w8: Path, tmp_path: Path) -> None:
    deploy(a8w8, tmp_path / "kit")
    (tmp_path / "kit" / "run.py").write_text("# better")
    with pytest.raises(OutputError, match="edited since"):
        deploy(a8w8, tmp_path / "kit")
    assert (tmp_path / "kit" / "run.py").read_text() == "# better"


def test_a_new_model_takes_the_place_of_the_old(a8w8: Path, tmp_path: Path) -> None:
    old = float_model(tmp_path / "m.onnx", external="m.data")
    deploy(old, tmp_path / "kit")
    (tmp_path / "kit" / "cache").mkdir()
    (tmp_path / "kit" / "cache" / "compiled").write_text("blob")
    deploy(a8w8, tmp_path / "kit")
    files = tree(tmp_path / "kit")
    assert "vaiml_config.json" not in files
    assert "m.data" not in files
    assert files["cache/compiled"] == b"blob"
    assert files["model.onnx"] == a8w8.read_bytes()


def test_a_forged_manifest_deletes_nothing_outside(a8w8: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    deploy(a8w8, tmp_path / "kit")
    manifest = json.loads((tmp_path / "kit" / "kit.json").read_text())
    digest = KitFile("v", victim).digest()
    manifest["files"] |= {"../victim": digest, str(victim): digest}
    (tmp_path / "kit" / "kit.json").write_text(json.dumps(manifest))
    deploy(a8w8, tmp_path / "kit")
    assert victim.read_text() == "mine"


def test_a_model_may_lie_in_the_kit_already(a8w8: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(a8w8.read_bytes())
    deploy(path, tmp_path)
    assert path.read_bytes() == a8w8.read_bytes()


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    files = [KitFile("a", b"1"), KitFile("b", tmp_path / "missing")]
    with pytest.raises(OutputError, match="could not be written"):
        write_folder(tmp_path / "kit", files, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "a\\b", "c:a", ""])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="outside"):
        write_folder(tmp_path / "kit", [KitFile(name, b"1")], {})
    assert list(tmp_path.iterdir()) == []


def test_notes_about_the_model(tmp_path: Path) -> None:
    model = qdq_model(shape=[8, 2, "height", 4])
    model.graph.node[-1].op_type = "Conv"
    kit = deploy(saved(model, tmp_path / "m.onnx"), tmp_path / "kit")
    text = " ".join(kit.notes)
    assert "fixed batch of 8" in text
    assert "open dimensions" in text
    assert all(note in (tmp_path / "kit" / "README.md").read_text() for note in kit.notes)
