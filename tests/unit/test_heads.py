"""Models whose head is cut off: both parts together are the model, for whoever runs or measures it."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from head_models import FAMILIES, yolov8
from helpers import build, feeds, node, normal, run
from roundel.errors import ModelError, OutputError
from roundel.heads import cut_head, joined
from roundel.measure.runner import Predictor
from roundel.recipe.load import load_recipe
from roundel.stages import prepare

_DATA = feeds({"x": [1, 3, 16, 16]}, 4)


def _names(values: object) -> tuple[str, ...]:
    return tuple(str(value.name) for value in values)  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_parts_together_are_the_model(family: str) -> None:
    make, ends = FAMILIES[family]
    proto = make()
    cut = cut_head(prepare(proto, load_recipe("xint8")).model)
    assert cut is not None
    assert sorted(_names(cut.model.graph.outputs)) == sorted(ends)
    assert _names(cut.tail.graph.outputs) == _names(proto.graph.output)
    assert not {"Reshape", "Transpose", "Concat"} & {n.op_type for n in cut.model.graph}
    whole = joined(cut.model, cut.tail)
    onnx.checker.check_model(ir.to_proto(whole))
    for sample in _DATA:
        made = dict(zip(_names(cut.model.graph.outputs), run(cut.model, sample), strict=True))
        feed = {name: made[name] for name in _names(cut.tail.graph.inputs)}
        wanted = run(proto, sample)
        for results in (run(cut.tail, feed), run(whole, sample)):
            for result, value in zip(results, wanted, strict=True):
                np.testing.assert_allclose(result, value, atol=1e-5, rtol=1e-5)


def test_what_rearranges_nothing_is_left() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="layer"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        node("Flatten", ["p"], ["y"], name="flat"),
    ]
    proto = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], {"w": normal(4, 3, 1, 1)})
    assert cut_head(ir.from_proto(proto)) is None
    done = roundel.quantize(proto, preset="xint8", data=feeds({"x": [1, 3, 8, 8]}), cut_head=True)
    assert done.tail is None
    assert any(note.startswith("cut_head: nothing was cut off") for note in done.record.notes)


def test_an_activation_stays_with_its_layer_and_a_last_sigmoid_goes() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="layer"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Squeeze", ["r", "axes"], ["y"], name="squeeze"),
        node("Conv", ["x", "w"], ["d"], name="other"),
        node("Sigmoid", ["d"], ["z"], name="sigmoid"),
    ]
    constants = {"w": normal(1, 3, 1, 1), "axes": np.int64([1])}
    cut = cut_head(ir.from_proto(build(nodes, {"x": [1, 3, 8, 8]}, ["y", "z"], constants)))
    assert cut is not None
    assert _names(cut.model.graph.outputs) == ("r", "d")
    assert _names(cut.tail.graph.outputs) == ("y", "z")


def test_an_input_of_the_tail_alone_forbids_the_cut() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="layer"),
        node("Transpose", ["c"], ["t"], name="turn", perm=[0, 2, 3, 1]),
        node("Mul", ["t", "scale"], ["y"], name="scaled"),
    ]
    proto = build(nodes, {"x": [1, 3, 8, 8], "scale": [1]}, ["y"], {"w": normal(4, 3, 1, 1)})
    assert cut_head(ir.from_proto(proto)) is None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YOLOv8 for Phoenix, its head cut off because nothing would be placed otherwise."""
    folder = tmp_path_factory.mktemp("pair")
    onnx.save(yolov8(), folder / "float.onnx")
    file = folder / "m.onnx"
    roundel.quantize(folder / "float.onnx", file, preset="xint8", device="phx", effort="fast", data=_DATA)
    return file


def test_phoenix_decides_it(written: Path) -> None:
    record = json.loads(written.with_suffix(".json").read_text())
    assert record["recipe"]["prepare"]["cut_head"] is True
    assert record["file"]["tail"]["name"] == "m.tail.onnx"
    assert record["file"]["tail"]["sha256"]
    assert sorted(file.name for file in written.parent.glob("m.*")) == ["m.json", "m.onnx", "m.tail.onnx"]
    assert roundel.check(written, device="phx").before.npu_nodes
    report = roundel.check(written.with_name("float.onnx"), preset="xint8", device="phx")
    assert not report.before.npu_nodes
    assert report.after.npu_nodes
    assert [f.automatic for f in report.findings if f.rule == "P25"] == [True]


def test_the_user_decides_first() -> None:
    changes = {"prepare.cut_head": False}
    done = roundel.quantize(
        yolov8(), preset="xint8", device="phx", effort="fast", data=_DATA, changes=changes
    )
    assert done.tail is None
    assert roundel.quantize(yolov8(), preset="xint8", device="stx", data=_DATA).tail is None
    assert roundel.quantize(yolov8(), preset="a8w8", data=_DATA, cut_head=True).tail is not None


def test_the_pair_is_measured_as_one_model(written: Path, tmp_path: Path) -> None:
    model = written.with_name("float.onnx")
    found = roundel.compare(model, written, _DATA)
    assert {out.name.partition("[")[0] for out in found.outputs} == {"mask", "y"}
    assert all(out.difference.sqnr_db > 15 for out in found.outputs)
    scores = roundel.evaluate([model, written], data=_DATA)
    assert scores[1].sqnr_db is not None
    assert scores[1].sqnr_db > 15
    for device in (None, "phx"):
        assert roundel.infer(written, _DATA, tmp_path / str(device), as_npu=device).outputs == ("y", "mask")
    assert roundel.compare(model, written, _DATA, as_npu="phx").outputs[0].difference.sqnr_db > 15


def test_a_pair_travels_to_another_process(written: Path) -> None:
    here = Predictor(written)
    there = pickle.loads(pickle.dumps(here)).open(1)
    assert there.outputs == here.outputs
    for name, array in here.run(_DATA[0], 0).items():
        np.testing.assert_array_equal(there.run(_DATA[0], 0)[name], array)


def test_the_kit_gives_the_outputs_of_the_whole_model(written: Path, tmp_path: Path) -> None:
    kit = roundel.deploy(written, tmp_path / "kit", device="phx")
    assert "tail.onnx" in kit.files
    assert "`tail.onnx`" in (tmp_path / "kit" / "README.md").read_text()
    np.savez(tmp_path / "x.npz", **_DATA[0])
    command = ["run.py", "--input", "../x.npz", "--save", "../y.npz", "--cpu"]
    subprocess.run([sys.executable, *command], cwd=tmp_path / "kit", check=True, capture_output=True)
    wanted = Predictor(written).run(_DATA[0], 0)
    with np.load(tmp_path / "y.npz") as got:
        assert sorted(got.files) == sorted(wanted)
        for name, array in wanted.items():
            np.testing.assert_allclose(got[name], array, atol=1e-5)


def test_the_float_parts_in_a_kit_are_the_float_model(tmp_path: Path) -> None:
    """NPU part and tail, run by the kit's script, against the uncut float model."""
    roundel.quantize(yolov8(), tmp_path / "m.onnx", preset="xint8", data=_DATA, cut_head=True)
    roundel.deploy(tmp_path / "m.onnx", tmp_path / "kit", device="phx")
    cut = cut_head(prepare(yolov8(), load_recipe("xint8")).model)
    assert cut is not None
    ir.save(cut.model, tmp_path / "kit" / "model.onnx")
    np.savez(tmp_path / "x.npz", **_DATA[0])
    command = ["run.py", "--input", "../x.npz", "--save", "../y.npz", "--cpu"]
    subprocess.run([sys.executable, *command], cwd=tmp_path / "kit", check=True, capture_output=True)
    with np.load(tmp_path / "y.npz") as got:
        for name, array in zip(("y", "mask"), run(yolov8(), _DATA[0]), strict=True):
            np.testing.assert_allclose(got[name], array, atol=1e-4)


def test_a_lost_tail_is_told(written: Path, tmp_path: Path) -> None:
    for name in ("m.onnx", "m.json"):
        shutil.copy(written.with_name(name), tmp_path)
    with pytest.raises(ModelError, match="tail is missing"):
        Predictor(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="tail is missing"):
        roundel.deploy(tmp_path / "m.onnx", tmp_path / "kit", device="phx")


def test_the_tail_overwrites_no_source(tmp_path: Path) -> None:
    onnx.save(yolov8(), tmp_path / "net.tail.onnx")
    with pytest.raises(OutputError, match="output's tail would overwrite the input model"):
        roundel.quantize(tmp_path / "net.tail.onnx", tmp_path / "net.onnx", preset="xint8", data=_DATA)


def test_in_memory_both_parts_come_along(tmp_path: Path) -> None:
    done = roundel.quantize(yolov8(), preset="xint8", data=_DATA, cut_head=True)
    saved = Predictor(done.save(tmp_path / "m.onnx")).run(_DATA[0], 0)
    for name, array in zip(("y", "mask"), run(done.whole, _DATA[0]), strict=True):
        np.testing.assert_allclose(saved[name], array, atol=1e-5)


def test_the_run_repeats(written: Path) -> None:
    done = roundel.reproduce(written.with_suffix(".json"), data=_DATA)
    assert done.matches
    assert done.result.tail is not None
