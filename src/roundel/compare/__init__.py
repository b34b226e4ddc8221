"""Float against quantized, tensor by tensor.

`roundel.compare(float_model, quantized_model, data)` is the function `roundel.compare.models.compare`: this
package answers to being called, since a package and a function cannot both be `roundel.compare`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from roundel.compare.models import compare
from roundel.compare.types import (
    ChannelError,
    Comparison,
    Difference,
    Histogram,
    OutputComparison,
    Storage,
    TensorComparison,
    WeightComparison,
)

__all__ = [
    "ChannelError",
    "Comparison",
    "Difference",
    "Histogram",
    "OutputComparison",
    "Storage",
    "TensorComparison",
    "WeightComparison",
    "compare",
]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Comparison:
        return compare(*args, **options)


sys.modules[__name__].__class__ = _Callable
