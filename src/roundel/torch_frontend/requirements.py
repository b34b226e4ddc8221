"""What exporting needs, found before any work is done."""

from __future__ import annotations

import importlib.util

from roundel.errors import DependencyError


def require_torch() -> None:
    """Raise where torch is not installed.

    Raises:
        DependencyError: it is not.
    """
    _require("torch")


def require_exporter() -> None:
    """Raise where torch, or what it exports ONNX with, is not installed.

    Raises:
        DependencyError: a package is missing.
    """
    _require("torch", "onnxscript")


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyError(
            "Models in PyTorch need packages that are not installed.",
            observed=f"no {' and no '.join(missing)}",
            hint="pip install 'roundel[torch]'",
        )
