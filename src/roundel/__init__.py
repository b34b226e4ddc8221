"""Roundel: quantize neural networks for AMD Ryzen AI NPUs.

import roundel
result = roundel.quantize("model.onnx", "model.a8w8.onnx", recipe="a8w8", data="calibration/")
print(result.record.outputs)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from roundel.version import VERSION

if TYPE_CHECKING:
    from roundel.compare.models import compare
    from roundel.conversion import ConvertResult, convert
    from roundel.data import RandomSpec as RandomData
    from roundel.errors import (
        DataError,
        DependencyError,
        ExecutorError,
        ModelError,
        OutputError,
        RecipeError,
        RoundelError,
        SelectionError,
        VerifyError,
    )
    from roundel.evaluate import evaluate_folders, evaluate_models, infer, lint_data
    from roundel.executors import executor
    from roundel.foresight import Forecast, forecast
    from roundel.ladder import AutoResult, auto
    from roundel.pipeline import QuantizeResult, quantize
    from roundel.plan import QuantPlan
    from roundel.recipe import Recipe
    from roundel.recipe_file import load_recipe, preset_names
    from roundel.reporting import write_report
    from roundel.reproduction import reproduce
    from roundel.sensitivity.measure import sensitivity
    from roundel.studies import SearchResult, search

__version__ = VERSION

# ONNX Runtime from 1.29 on reports models and machines to its maker, on Linux too, unless this is set before
# it is imported. Who wants that can set it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Names are looked up on first use, so that `import roundel` costs nothing.
_HOMES = {
    "AutoResult": "roundel.ladder",
    "ConvertResult": "roundel.conversion",
    "DataError": "roundel.errors",
    "DependencyError": "roundel.errors",
    "ExecutorError": "roundel.errors",
    "Forecast": "roundel.foresight",
    "ModelError": "roundel.errors",
    "OutputError": "roundel.errors",
    "QuantPlan": "roundel.plan",
    "QuantizeResult": "roundel.pipeline",
    "RandomData": "roundel.data",
    "Recipe": "roundel.recipe",
    "RecipeError": "roundel.errors",
    "RoundelError": "roundel.errors",
    "SearchResult": "roundel.studies",
    "SelectionError": "roundel.errors",
    "VerifyError": "roundel.errors",
    "auto": "roundel.ladder",
    "compare": "roundel.compare",
    "convert": "roundel.conversion",
    "evaluate_folders": "roundel.evaluate",
    "evaluate_models": "roundel.evaluate",
    "executor": "roundel.executors",
    "forecast": "roundel.foresight",
    "infer": "roundel.evaluate",
    "lint_data": "roundel.evaluate",
    "load_recipe": "roundel.recipe_file",
    "preset_names": "roundel.recipe_file",
    "quantize": "roundel.pipeline",
    "reproduce": "roundel.reproduction",
    "search": "roundel.studies",
    "sensitivity": "roundel.sensitivity",
    "write_report": "roundel.reporting",
}
_RENAMED = {"RandomData": "RandomSpec"}

__all__ = [
    "AutoResult",
    "ConvertResult",
    "DataError",
    "DependencyError",
    "ExecutorError",
    "Forecast",
    "ModelError",
    "OutputError",
    "QuantPlan",
    "QuantizeResult",
    "RandomData",
    "Recipe",
    "RecipeError",
    "RoundelError",
    "SearchResult",
    "SelectionError",
    "VerifyError",
    "auto",
    "compare",
    "convert",
    "evaluate_folders",
    "evaluate_models",
    "executor",
    "forecast",
    "infer",
    "lint_data",
    "load_recipe",
    "preset_names",
    "quantize",
    "reproduce",
    "search",
    "sensitivity",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'roundel' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), _RENAMED.get(name, name))
    # Not over a package of the same name, which importing it has put there: `roundel.compare` is both.
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
