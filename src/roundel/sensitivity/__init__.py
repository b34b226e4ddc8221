"""Which layers quantize badly, and what would help.

`roundel.sensitivity(model, …)` is the function `roundel.sensitivity.measure.sensitivity`: this package
answers to being called, since a package and a function cannot both be `roundel.sensitivity`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from roundel.sensitivity.measure import sensitivity
from roundel.sensitivity.types import Head, Kind, LayerCost, Remedy, Sensitivity

__all__ = ["Head", "Kind", "LayerCost", "Remedy", "Sensitivity", "sensitivity"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Sensitivity:
        return sensitivity(*args, **options)


sys.modules[__name__].__class__ = _Callable
