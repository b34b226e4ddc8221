"""Makes `import quark.onnx` mean Roundel in this process, whether AMD's package is installed or not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from roundel.errors import did_you_mean
from roundel.quark.modules import MODULES, PACKAGES, TOOL_PREFIX, VERSION
from roundel.quark.namespace import lookup, public_names

ROOT = "quark"


class _Module(ModuleType):
    """A module path of the documents: every public name can be taken from every such path."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        if name == "__all__":
            return list(public_names())
        inner = f"{self.__name__}.{name}"
        if inner in MODULES or inner in PACKAGES:
            return importlib.import_module(inner)
        return lookup(name)


class _Finder(MetaPathFinder, Loader):
    """Answers for `quark` and all below it, before any other finder is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ROOT and not fullname.startswith(f"{ROOT}."):
            return None
        if fullname not in MODULES and fullname not in PACKAGES:
            known = did_you_mean(fullname, (*MODULES, *PACKAGES))
            hint = known or "Roundel stands in for quark.onnx only."
            raise ModuleNotFoundError(f"Roundel's quark has no module '{fullname}'. {hint}", name=fullname)
        return ModuleSpec(fullname, self, is_package=fullname in PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name.startswith(TOOL_PREFIX):
            from roundel.quark.old_tools import tool_module

            return tool_module(spec.name)
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == ROOT:
            module.__version__ = VERSION  # type: ignore[attr-defined]


_FINDER = _Finder()


def install() -> None:
    """From now on `import quark…` means Roundel in this process.

    Modules of AMD's package that were imported before are forgotten, so that no script mixes the two.
    """
    if _FINDER in sys.meta_path:
        return
    for name in [n for n in sys.modules if n == ROOT or n.startswith(f"{ROOT}.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undo `install`."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [n for n in sys.modules if n == ROOT or n.startswith(f"{ROOT}.")]:
        del sys.modules[name]
