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
    from roundel.forecasting import Forecast, forecast
    from roundel.measure.compare import compare
    from roundel.measure.evaluate import evaluate_models
    from roundel.measure.folders import evaluate_folders
    from roundel.measure.infer import infer
    from roundel.measure.lint import lint_data
    from roundel.measure.sensitivity import sensitivity
    from roundel.pipeline import quantize
    from roundel.plan import QuantPlan
    from roundel.recipe.load import load_recipe, preset_names
    from roundel.recipe.settings import Recipe
    from roundel.reporting import write_report
    from roundel.reproduction import reproduce
    from roundel.result import QuantizeResult
    from roundel.trials.auto import auto
    from roundel.trials.rungs import AutoResult
    from roundel.trials.search import SearchResult, search
    from roundel.work.executors import executor

__version__ = VERSION

# ONNX Runtime from 1.29 on reports models and machines to its maker, on Linux too, unless this is set before
# it is imported. Who wants that can set it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Names are looked up on first use, so that `import roundel` costs nothing.
_HOMES = {
    "AutoResult": "roundel.trials.rungs",
    "ConvertResult": "roundel.conversion",
    "DataError": "roundel.errors",
    "DependencyError": "roundel.errors",
    "ExecutorError": "roundel.errors",
    "Forecast": "roundel.forecasting",
    "ModelError": "roundel.errors",
    "OutputError": "roundel.errors",
    "QuantPlan": "roundel.plan",
    "QuantizeResult": "roundel.result",
    "RandomData": "roundel.data",
    "Recipe": "roundel.recipe.settings",
    "RecipeError": "roundel.errors",
    "RoundelError": "roundel.errors",
    "SearchResult": "roundel.trials.search",
    "SelectionError": "roundel.errors",
    "VerifyError": "roundel.errors",
    "auto": "roundel.trials.auto",
    "compare": "roundel.measure.compare",
    "convert": "roundel.conversion",
    "evaluate_folders": "roundel.measure.folders",
    "evaluate_models": "roundel.measure.evaluate",
    "executor": "roundel.work.executors",
    "forecast": "roundel.forecasting",
    "infer": "roundel.measure.infer",
    "lint_data": "roundel.measure.lint",
    "load_recipe": "roundel.recipe.load",
    "preset_names": "roundel.recipe.load",
    "quantize": "roundel.pipeline",
    "reproduce": "roundel.reproduction",
    "search": "roundel.trials.search",
    "sensitivity": "roundel.measure.sensitivity",
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
