"""Roundel: quantize neural networks for AMD Ryzen AI NPUs.

import roundel
result = roundel.quantize("model.onnx", "model.a8w8.onnx", preset="a8w8", data="calibration/")
print(result)
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
    from roundel.inspection import explain, inspect
    from roundel.kit import deploy, npu_report
    from roundel.measure.evaluate import evaluate, evaluate_models
    from roundel.measure.folders import evaluate_folders
    from roundel.measure.lint import lint_data
    from roundel.measure.runner import infer
    from roundel.measure.sensitivity import sensitivity
    from roundel.options import presets
    from roundel.pipeline import quantize
    from roundel.plan import QuantPlan
    from roundel.quark.tools import run_tool as tools
    from roundel.recipe.load import load_recipe, preset_names
    from roundel.recipe.settings import Recipe
    from roundel.reporting import compare, write_report
    from roundel.reproduction import reproduce
    from roundel.result import QuantizeResult
    from roundel.rules import check
    from roundel.showcase import demo
    from roundel.trials.auto import auto
    from roundel.trials.rungs import AutoResult
    from roundel.trials.search import SearchResult, search
    from roundel.twin import NpuSession, npu_session
    from roundel.work.executors import executor

__version__ = VERSION

# ONNX Runtime from 1.29 on reports models and machines to its maker, on Linux too, unless this is set before
# it is imported. Who wants that can set it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Names are looked up on first use, so that `import roundel` costs nothing.
_NAMES = {
    "roundel.conversion": "ConvertResult convert",
    "roundel.data": "RandomData",
    "roundel.errors": "DataError DependencyError ExecutorError ModelError OutputError"
    " RecipeError RoundelError SelectionError VerifyError",
    "roundel.forecasting": "Forecast forecast",
    "roundel.inspection": "explain inspect",
    "roundel.kit": "deploy npu_report",
    "roundel.measure.evaluate": "evaluate evaluate_models",
    "roundel.measure.folders": "evaluate_folders",
    "roundel.measure.lint": "lint_data",
    "roundel.measure.runner": "infer",
    "roundel.measure.sensitivity": "sensitivity",
    "roundel.options": "presets",
    "roundel.pipeline": "quantize",
    "roundel.result": "QuantizeResult",
    "roundel.plan": "QuantPlan",
    "roundel.quark.tools": "tools",
    "roundel.recipe.load": "load_recipe preset_names",
    "roundel.recipe.settings": "Recipe",
    "roundel.reporting": "compare write_report",
    "roundel.reproduction": "reproduce",
    "roundel.rules": "check",
    "roundel.showcase": "demo",
    "roundel.trials.auto": "auto",
    "roundel.trials.rungs": "AutoResult",
    "roundel.trials.search": "SearchResult search",
    "roundel.twin": "NpuSession npu_session",
    "roundel.work.executors": "executor",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_RENAMED = {"RandomData": "RandomSpec", "tools": "run_tool"}

__all__ = [
    "AutoResult",
    "ConvertResult",
    "DataError",
    "DependencyError",
    "ExecutorError",
    "Forecast",
    "ModelError",
    "NpuSession",
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
    "check",
    "compare",
    "convert",
    "demo",
    "deploy",
    "evaluate",
    "evaluate_folders",
    "evaluate_models",
    "executor",
    "explain",
    "forecast",
    "infer",
    "inspect",
    "lint_data",
    "load_recipe",
    "npu_report",
    "npu_session",
    "preset_names",
    "presets",
    "quantize",
    "reproduce",
    "search",
    "sensitivity",
    "tools",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'roundel' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
