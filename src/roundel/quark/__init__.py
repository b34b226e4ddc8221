"""The API of AMD Quark's ONNX quantizer, as a thin translation to Roundel's recipes.

    from roundel.quark import ModelQuantizer, Config, get_default_config
    ModelQuantizer(Config(get_default_config("A8W8"))).quantize_model("in.onnx", "out.onnx", reader)

Scripts written for `quark.onnx` run as they are with `python -m roundel.quark script.py`.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "install":
        from roundel.quark.importing import install

        return install
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    from roundel.quark.namespace import lookup, public_names

    return list(public_names()) if name == "__all__" else lookup(name)


def __dir__() -> list[str]:
    from roundel.quark.namespace import public_names

    return [*public_names(), "install"]
