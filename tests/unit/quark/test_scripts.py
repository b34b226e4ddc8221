"""`python -m roundel.quark`: scripts as they are, modules and code, with or without AMD's package."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from helpers import build, node, normal
from roundel.errors import RecipeError
from roundel.quark import get_library_path
from roundel.quark.importing import MODULES, PACKAGES, install, uninstall

SCRIPT = """
import sys
import onnxruntime
from quark.onnx import ModelQuantizer, get_library_path
from quark.onnx.quantization.config import Config, get_default_config
from quark.onnx import RandomDataReader
import helper_beside_it

source, target = sys.argv[1:]
reader = RandomDataReader(source)
ModelQuantizer(Config(get_default_config("A8W8"))).quantize_model(source, target, reader)
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(get_library_path("CPU"))
session = onnxruntime.InferenceSession(target, options, providers=["CPUExecutionProvider"])
print("outputs", [out.name for out in session.get_outputs()], __name__, helper_beside_it.WORD)
"""


def python(*arguments: object, folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-m", "roundel.quark", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper_beside_it.py").write_text("WORD = 'found'\n")
    (folder / "quantize.py").write_text(SCRIPT)
    return folder / "quantize.py"


def test_a_script_runs_as_it_is(script: Path, path: Path, tmp_path: Path) -> None:
    done = python(script, path, tmp_path / "out.onnx", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "outputs ['y'] __main__ found" in done.stdout
    assert any(n.op_type == "QuantizeLinear" for n in onnx.load(tmp_path / "out.onnx").graph.node)


def test_roundel_stands_before_an_installed_package(script: Path, path: Path, tmp_path: Path) -> None:
    """A package of the same name further down the path must not be asked."""
    other = tmp_path / "site" / "quark"
    (other / "onnx").mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('the other package')\n")
    (other / "onnx" / "__init__.py").write_text("")
    done = python(script, path, tmp_path / "out.onnx", folder=tmp_path, path=tmp_path / "site")
    assert done.returncode == 0, done.stderr


SPAWNING = """
import multiprocessing, subprocess, sys
import quark.onnx
from quark.onnx.quantization.config import get_default_config

def work(name):
    import quark.onnx as inside
    return quark.__version__, inside.QuantType.__module__, get_default_config(name).weight_type.name

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("worker", *pool.map(work, ["XINT8"])[0])
    code = "import quark; print('program', quark.__version__)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_processes_that_a_script_starts_find_it_too(tmp_path: Path) -> None:
    """Spawned workers begin with an empty interpreter: what they get is the path."""
    (tmp_path / "spawning.py").write_text(SPAWNING)
    done = python("spawning.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    worker, program = sorted(done.stdout.splitlines(), reverse=True)
    assert "+roundel." in worker
    assert worker.endswith("QInt8")
    assert "+roundel." in program


@pytest.mark.parametrize("module", ["quark.onnx.tools.evaluate", "quark.onnx.tools.evaluate.py"])
def test_tools_by_their_module_names(module: str, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "0.npy", np.float32([1, 2, 3]))
    flags = ("--baseline_results_folder", "a", "--quantized_results_folder", "b")
    done = python("-m", module, *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cosine similarity: mean 1" in done.stdout


def test_code_and_modules_of_the_script_s_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import quark, sys; print(quark.__version__, sys.argv[1:], __name__)\n")
    done = python("-m", "mine", "a", folder=tmp_path)
    assert "+roundel." in done.stdout
    assert "['a'] __main__" in done.stdout
    done = python("-c", "from quark.onnx import QuantType; print(QuantType.QInt8)", folder=tmp_path)
    assert done.stdout.strip() == "QInt8"


MISSPELT = "from quark.onnx import *; get_default_config('A8W8').include_cls = True; print('goes on')"


def test_strict_is_for_workers_too(tmp_path: Path) -> None:
    code = (
        f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {MISSPELT!r}]).returncode)"
    )
    lenient, strict = (python(*words, "-c", code, folder=tmp_path) for words in ((), ("--strict",)))
    assert (lenient.returncode, lenient.stdout.strip()) == (0, "goes on")
    assert "no setting 'include_cls'" in lenient.stderr
    assert strict.returncode == 1
    assert "no setting 'include_cls'" in strict.stderr


def test_usage_and_a_missing_script(tmp_path: Path) -> None:
    assert "usage" in python(folder=tmp_path).stdout
    missing = python("nothing.py", folder=tmp_path)
    assert missing.returncode == 2
    assert "does not exist" in missing.stderr
    assert python("-m", folder=tmp_path).returncode == 2


@pytest.fixture
def quark():
    install()
    yield
    uninstall()


@pytest.mark.parametrize("name", sorted(MODULES | PACKAGES))
def test_every_module_path_can_be_imported(name: str, quark: None) -> None:
    assert __import__(name, fromlist=["*"]).__name__ == name


@pytest.mark.parametrize(
    "line",
    [
        "from quark.onnx import *; ModelQuantizer; QuantType; XINT8_QCONFIG; AdaRoundConfig",
        "from quark.onnx.quant_utils import PowerOfTwoMethod, VitisQuantType, VitisQuantFormat",
        "from quark.onnx.quantization.config.custom_config import DEFAULT_ADAROUND_PARAMS, U8S8_AAWS_CONFIG",
        "from quark.onnx.quantization.config.config import Config, QuantizationConfig, QConfig",
        "from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, QLayerConfig",
        "from quark.onnx.quantization.config.algorithm import AdaQuantConfig",
        "from quark.onnx.operators.custom_ops import _COP_DOMAIN, get_library_path",
        "from quark.onnx.quantization.api import ModelQuantizer",
        "from quark.onnx.quantize import quantize_static, quantize_dynamic",
        "from quark.onnx.calibrate import PowerOfTwoMethod",
        "from quark.onnx.calibration import CachedDataReader, RandomDataReader",
        "from quark.onnx.auto_search import AutoSearch, AutoSearchConfig",
        "from quark.shares.utils.log import ScreenLogger; ScreenLogger('a').info('b')",
        "import quark.onnx; quark.onnx.VitisQuantType.QInt16; quark.onnx.quantization.config.Config",
        "from quark.onnx.tools.remove_qdq import remove_qdq",
        "from quark.onnx.tools import convert_s8s8_to_u8s8; convert_s8s8_to_u8s8.main",
    ],
)
def test_imports_of_public_scripts(line: str, quark: None) -> None:
    exec(line, {})


def test_a_module_that_is_not_there_suggests_another(quark: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"quark\.onnx\.quantization"):
        __import__("quark.onnx.quantisation")
    with pytest.raises(ImportError, match="QuantTyp"):
        exec("from quark.onnx import QuantTyp", {})


def test_functions_of_tools_take_models(quark: None, model: onnx.ModelProto) -> None:
    from quark.onnx.tools.convert_opset_version import convert_opset_version  # type: ignore[import-not-found]

    raised = convert_opset_version(model, 18)
    assert next(o.version for o in raised.opset_import if o.domain == "") == 18


TOOL_CALLS = """
from argparse import Namespace
import onnx
from quark.onnx.tools import convert_shared_initializer_to_unique as unshare
from quark.onnx.tools import convert_fp32_to_bf16, convert_fp32_to_bfp16, convert_fp32_to_fp16
from quark.onnx.tools import evaluate, replace_inf_weights, remove_initializer_from_input

flags = dict(disable_shape_infer=True, save_as_external_data=False, all_tensors_to_one_file=True)
half = Namespace(input="in.onnx", output="half.onnx", keep_io_types=True, not_simplify=True, **flags)
convert_fp32_to_fp16.convert(half)
convert_fp32_to_bf16.convert(Namespace(input="in.onnx", output="bf16.onnx", format="with_cast"))
convert_fp32_to_bfp16.convert_fp32_to_bfp16("in.onnx", "bfp16.onnx")
replace_inf_weights.replace_inf_in_onnx_weights("in.onnx", "finite.onnx", replace_inf_value=9.0)
remove_initializer_from_input.remove_initializer_from_input(Namespace(input="in.onnx", output="out.onnx"))
made = unshare.convert(onnx.load("in.onnx"), ["Conv"], prefix="copy", only_bias=False)
onnx.save(made, "unique.onnx")
"""


def test_tools_as_functions(path: Path, tmp_path: Path, quark: None, monkeypatch, capsys) -> None:
    """As scripts call them: `convert(args)` with the tool's own arguments, two files, or a model."""
    monkeypatch.chdir(path.parent)
    path.rename("in.onnx")
    exec(compile(TOOL_CALLS, "calls", "exec"), {})
    told = capsys.readouterr().out
    assert "--not_simplify: nothing is simplified" in told
    assert any(t.data_type == onnx.TensorProto.FLOAT16 for t in onnx.load("half.onnx").graph.initializer)
    assert any(node.op_type == "Cast" for node in onnx.load("bf16.onnx").graph.node)
    written = {"half", "bf16", "bfp16", "finite", "out", "unique"}
    assert {file.stem for file in Path.cwd().glob("*.onnx")} == {*written, "in"}


def test_shared_biases_alone_get_copies(quark: None) -> None:
    from quark.onnx.tools import convert_shared_initializer_to_unique as tool  # type: ignore[import-not-found]

    shared = np.float32([1, 2, 3])
    nodes = [
        node("Conv", ["x", "w", "s"], ["a"], name="one"),
        node("Conv", ["a", "w", "s"], ["b"], name="two"),
        node("Mul", ["b", "m"], ["c"], name="gain"),
        node("Add", ["c", "m"], ["y"], name="sum"),
    ]
    weights = {"w": normal(3, 3, 1, 1), "s": shared, "m": normal(1, 3, 1, 1)}
    model = build(nodes, {"x": [1, 3, 4, 4]}, ["y"], weights)
    made = tool.convert(model, only_bias=True)
    inputs = {n.name: list(n.input) for n in made.graph.node}
    assert inputs["two"] == ["a", "w", "duplicated_s"]
    assert inputs["sum"] == ["c", "m"]
    with pytest.raises(RecipeError, match="needs 'target'"):
        tool.main(Namespace(input="in.onnx"))
    with pytest.raises(RecipeError, match="has no 'inputt'"):
        tool.main(inputt="in.onnx")


@pytest.mark.parametrize("device", ["CPU", "cpu", "ROCM", "CUDA", "gpu"])
def test_the_library_can_be_registered_anywhere(device: str) -> None:
    options = ort.SessionOptions()
    options.register_custom_ops_library(get_library_path(device))
    with pytest.raises(ValueError, match="no such device"):
        get_library_path("TPU")


def test_other_libraries_are_still_registered_by_onnx_runtime(tmp_path: Path) -> None:
    fake = tmp_path / "lib.so"
    fake.write_bytes(b"no library")
    with pytest.raises(Exception, match="Failed to load library"):
        ort.SessionOptions().register_custom_ops_library(str(fake))
