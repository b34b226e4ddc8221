"""The matrix of Pythons and packages: `nox` runs all of it, `nox -s "newest-3.12"` one part.

Each session has an environment of its own without PyTorch, so that what needs it is skipped or refused
as it is for users. Where an interpreter is missing, nox skips its sessions.
"""

from __future__ import annotations

import nox

PYTHONS = ("3.11", "3.12", "3.13")
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
TESTS = (
    "tests/hostile",
    "tests/unit/model",
    "tests/unit/recipe",
    "tests/unit/reproduction",
    "tests/unit/plan",
    "tests/unit/qdq",
    "tests/unit/test_supply.py",
)
# The oldest of each that the tests pass with; pyproject.toml says the same.
OLDEST = {
    "numpy": "1.26.4",
    "onnx": "1.17.0",
    "onnxruntime": "1.23.2",
    "pillow": "10.1.0",
    "pydantic": "2.7.0",
    "pyyaml": "6.0",
    "rich": "13.7.0",
    "threadpoolctl": "3.5.0",
    "typer": "0.15.4",
}
nox.options.default_venv_backend = "venv"


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """The newest packages that the index has."""
    session.install("-e", ".", *TOOLS)
    session.run("python", "-m", "pytest", *TESTS)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """The oldest packages that pyproject.toml allows."""
    session.install("-e", ".", *TOOLS, *(f"{name}=={version}" for name, version in OLDEST.items()))
    session.run("python", "-m", "pytest", *TESTS)


@nox.session(python="3.12")
@nox.parametrize("onnxruntime", ["1.23.2", "1.26.0"])
@nox.parametrize("onnx", ["1.17.0", "1.19.0"])
def between(session: nox.Session, onnx: str, onnxruntime: str) -> None:
    """Two versions each of the two packages that everything stands on."""
    session.install("-e", ".", *TOOLS, f"onnx=={onnx}", f"onnxruntime=={onnxruntime}")
    session.run("python", "-m", "pytest", *TESTS)
