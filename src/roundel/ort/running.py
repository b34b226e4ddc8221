"""Scripts for `onnxruntime.quantization`: in this process its three functions are Roundel's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import onnxruntime.quantization
import onnxruntime.quantization.quantize

from roundel.ort import quantizer
from roundel.quark.importing import run_words

_NAMES = ("quantize", "quantize_dynamic", "quantize_static")
# The package's own `quantize` is the function, which hides the module of that name.
_PLACES: tuple[ModuleType, ...] = (
    onnxruntime.quantization,
    sys.modules["onnxruntime.quantization.quantize"],
)
_THEIRS: dict[str, Any] = {name: getattr(_PLACES[1], name) for name in _NAMES}

USAGE = """usage: python -m roundel.ort [--strict] SCRIPT [ARGUMENT …]
       python -m roundel.ort [--strict] -m MODULE [ARGUMENT …]
       python -m roundel.ort [--strict] -c CODE [ARGUMENT …]

Runs it with quantize, quantize_static and quantize_dynamic of onnxruntime.quantization meaning Roundel's."""


def install() -> None:
    """From now on `onnxruntime.quantization` quantizes with Roundel in this process."""
    _put({name: getattr(quantizer, name) for name in _NAMES})


def uninstall() -> None:
    """Undo `install`."""
    _put(_THEIRS)


def _put(functions: dict[str, Any]) -> None:
    for place in _PLACES:
        for name, function in functions.items():
            setattr(place, name, function)


def main(arguments: list[str]) -> int:
    """Do what the command line says; returns the exit status."""
    return run_words(arguments, USAGE, install)
