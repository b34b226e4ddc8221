"""What Roundel needs, and what it does not: no network, no telemetry, no torch, no writable home."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import pytest

from fuzzing.seeds import models

ROOT = Path(__file__).parents[2]
IMPORTED_AS = {"onnx-ir": "onnx_ir", "pillow": "PIL", "pyyaml": "yaml", "olive-ai": "olive"}
# Come with onnx and with pydantic, which cannot do without them.
WITH_OTHERS = {"google", "pydantic_core"}

OFFLINE = """
import sys
def refuse(event, arguments):
    if event.startswith("socket.") and event not in ("socket.gethostname",):
        raise RuntimeError(f"the network was touched: {event} {arguments}")
sys.addaudithook(refuse)
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray", "optuna"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
from roundel.cli import main
main()
"""


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", OFFLINE, *arguments]
    settings = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)


def test_no_network_and_no_torch(tmp_path: Path) -> None:
    onnx.save(models()[0], tmp_path / "model.onnx")
    done = run(["quantize", "model.onnx", "-o", "out.onnx", "--random", "5"], tmp_path)
    assert done.returncode == 0, done.stderr
    for command in (["inspect", "model.onnx"], ["check", "out.onnx"], ["reproduce", "out.json"]):
        done = run(command, tmp_path)
        assert "network" not in done.stderr
        assert "Traceback" not in done.stderr, done.stderr


def test_the_network_would_be_noticed(tmp_path: Path) -> None:
    script = OFFLINE.replace("from roundel.cli import main", "import socket; main = socket.socket")
    script = script.replace("main()", "main().connect(('127.0.0.1', 9))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "the network was touched" in done.stderr


def test_a_home_and_a_working_folder_that_are_read_only(tmp_path: Path) -> None:
    onnx.save(models()[0], tmp_path / "model.onnx")
    locked, out = tmp_path / "locked", tmp_path / "out"
    locked.mkdir()
    out.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    before = list(locked.iterdir())
    # Root may write anywhere: what counts is that nobody tries.
    model, result = str(tmp_path / "model.onnx"), str(out / "out.onnx")
    try:
        arguments = ["quantize", model, "-o", result, "--random", "3"]
        done = run(arguments, locked, HOME=str(locked), XDG_CACHE_HOME=str(locked / "none"))
    finally:
        locked.chmod(stat.S_IRWXU)
    assert done.returncode == 0, done.stderr
    assert list(locked.iterdir()) == before
    assert sorted(path.name for path in out.iterdir()) == ["out.json", "out.onnx"]


@pytest.mark.parametrize("external", ["false", "true"])
def test_a_path_with_spaces_and_letters_from_elsewhere(external: str, tmp_path: Path) -> None:
    folder = tmp_path / "Größe und 模型 ё"
    folder.mkdir()
    onnx.save(models()[0], folder / "mein modèle.onnx")
    arguments = ["quantize", "mein modèle.onnx", "-o", "ergebnis ñ.onnx", "--random", "3"]
    done = run([*arguments, "-s", f"output.external_data={external}"], folder)
    assert done.returncode == 0, done.stderr
    onnx.load(folder / "ergebnis ñ.onnx")
    assert (folder / "ergebnis ñ.json").exists()


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    words = [*project["dependencies"], *(w for k, v in extras.items() if k != "dev" for w in v)]
    declared = {w.split(">")[0].split("<")[0].split("=")[0].split("[")[0].strip() for w in words}
    allowed = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in declared}
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.partition(".")[0])
    foreign = found - set(sys.stdlib_module_names) - {"roundel"} - WITH_OTHERS
    assert foreign <= allowed, f"not declared: {sorted(foreign - allowed)}"


def test_only_worker_processes_unpickle() -> None:
    """As docs/security.md says: files are read as plain arrays, never as Python's objects."""
    unpickling = {}
    for path in (ROOT / "src").rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        for call in calls:
            options = {word.arg: ast.unparse(word.value) for word in call.keywords}
            match ast.unparse(call.func):
                case "np.load":
                    assert options.get("allow_pickle") == "False", f"{path}, line {call.lineno}"
                case "torch.load":
                    assert options.get("weights_only") == "True", f"{path}, line {call.lineno}"
                case "pickle.load" | "pickle.loads" | "pickle.Unpickler":
                    unpickling[path.name] = call.lineno
    assert set(unpickling) == {"worker.py"}


def test_every_runtime_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "decisions" / "dependencies.md").read_text()
    for word in project["dependencies"]:
        name = word.split(">")[0].split("<")[0]
        assert f"{name} |" in page or f"{name}, " in page or f", {name}" in page, name


def test_the_lock_names_no_host() -> None:
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in line and "://" not in line and "@" not in line for line in pins)
    names = {line.split("==")[0].lower().replace("_", "-") for line in pins}
    assert {"numpy", "onnx", "onnx-ir", "onnxruntime", "pytest", "mypy", "ruff"} <= names


def test_file_names_are_safe_on_windows() -> None:
    """No file of the project, and none that Roundel writes, has a name that Windows refuses."""
    for path in [*(ROOT / "src").rglob("*"), *(ROOT / "tests").rglob("*"), *(ROOT / "docs").rglob("*")]:
        assert not set(path.name) & set('<>:"|?*\\'), path
