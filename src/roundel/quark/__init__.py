"""The API of AMD Quark's ONNX quantizer, as a thin translation to Roundel's recipes.

    from roundel.quark import ModelQuantizer, Config, get_default_config
    ModelQuantizer(Config(get_default_config("A8W8"))).quantize_model("in.onnx", "out.onnx", reader)

Scripts written for `quark.onnx` run as they are with `python -m roundel.quark script.py`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    inside = name.startswith("__") and name != "__all__"
    if inside or find_spec(f"{__name__}.{name}") is not None:  # a module of this package is not of the API
        raise AttributeError(name)
    from roundel.quark.importing import install, lookup, public_names

    if name == "install":
        return install
    return list(public_names()) if name == "__all__" else lookup(name)


def __dir__() -> list[str]:
    from roundel.quark.importing import public_names

    return [*public_names(), "install"]
