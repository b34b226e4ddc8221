"""What scripts import, by name and by module; makes `import quark.onnx` mean Roundel in this process."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from roundel.errors import did_you_mean
from roundel.quark import commands, presets, qconfig, runtime
from roundel.quark.errors import STRICT, QuarkConfigError
from roundel.quark.specs import DATA_TYPES, KINDS, SPECS
from roundel.quark.tools import TOOLS, run_tool, tool_module
from roundel.version import VERSION as _ROUNDEL

# Names that scripts may import and Roundel does otherwise: using one says what to do instead.
_SEARCH = (
    "search of the first kind",
    "Use AutoSearchPro with get_auto_search_config, or `roundel search` over recipe fields.",
)
_CALIBRATOR = (
    "calibrating apart from a run",
    "Pass SaveAndRestore=FILE: ranges are then kept for the next run of the same model and data.",
)
ABSENT: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("AutoSearch", "AutoSearchConfig", "SearchSpace"), _SEARCH),
    **dict.fromkeys(("create_calibrator_float_scale", "create_calibrator_power_of_two"), _CALIBRATOR),
}


class Absent:
    """Stands for a name; it can be imported, and explains itself when used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        what, instead = ABSENT[self._name]
        raise QuarkConfigError(f"{self._name}: Roundel has no {what}.", hint=instead)

    def __repr__(self) -> str:
        return f"<{self._name}: not in Roundel>"


_OURS: Mapping[str, tuple[str, ...]] = {
    "enums": (
        *("CalibMethod", "ExtendedCalibrationMethod", "ExtendedQuantFormat", "ExtendedQuantType"),
        *("Int16Method", "LayerWiseMethod", "PowerOfTwoMethod", "QuantGranularity", "ScaleType"),
        *("VitisQuantFormat", "VitisQuantType", "get_tensor_type_from_qType"),
    ),
    "config": ("Config", "QuantizationConfig"),
    "presets": (
        *("DEFAULT_ADAQUANT_PARAMS", "DEFAULT_ADAROUND_PARAMS", "DEFAULT_BFP_PARAMS"),
        *("DEFAULT_MICROEXPONENTS_PARAMS", "DEFAULT_MICROSCALING_PARAMS"),
        *("get_default_config", "get_default_config_mapping"),
    ),
    "specs": (
        *("AlgoConfig", "DataType", "QLayerConfig", "QTensorConfig", "parse_data_type"),
        *(*KINDS, *DATA_TYPES, *SPECS),
    ),
    "qconfig": ("QConfig",),
    "quantizer": ("ModelQuantizer", "quantize_dynamic", "quantize_static"),
    "runtime": (
        *("CachedDataReader", "PathDataReader", "RandomDataReader", "get_data_reader"),
        *("ScreenLogger", "dump_model", "log_errors"),
        *("COP_BFP_OP_NAME", "COP_DEQUANT_OP_NAME", "COP_DOMAIN", "COP_IN_OP_NAME", "COP_LSTM_OP_NAME"),
        *("COP_MX_OP_NAME", "COP_QUANT_OP_NAME", "COP_VERSION"),
        *("create_infer_session_for_onnx_model", "get_library_path", "register_custom_ops_library"),
    ),
    "scripting": (
        *("is_version_below", "get_opset_version", "get_batch_size", "make_batch_size_fixed"),
        *("check_model_is_fp16", "infer_shape", "load_model_with_shape_infer", "check_onnx_model"),
        *("remove_initializer_from_input", "convert_nchw_to_nhwc", "get_matmul_nodes_without_weights"),
        *("get_tensor_value", "generate_initializer", "scale2pos", "pos2scale"),
        *("get_qmin_qmax_for_qType", "quantize_nparray", "run_calibration"),
        *("calculate_mse", "calculate_cos", "calculate_l1_distance", "calculate_l2_distance"),
        *("calculate_psnr", "calculate_ssim"),
    ),
    "search": ("AutoSearchPro", "generate_all_configs", "get_auto_search_config"),
}
_RUNTIME: Mapping[str, tuple[str, ...]] = {
    "onnxruntime.quantization.calibrate": (
        *("CalibraterBase", "CalibrationDataReader", "CalibrationMethod", "MinMaxCalibrater"),
    ),
    "onnxruntime.quantization.quant_utils": (
        *("QuantFormat", "QuantType", "QuantizationMode", "write_calibration_table"),
    ),
}
HOMES: Mapping[str, str] = {
    **{name: f"roundel.quark.{home}" for home, names in _OURS.items() for name in names},
    **{name: home for home, names in _RUNTIME.items() for name in names},
}


def public_names() -> tuple[str, ...]:
    """What `from quark.onnx import *` brings."""
    return tuple(sorted({*HOMES, *ABSENT, *qconfig.QCONFIG_NAMES, "_COP_DOMAIN", "_COP_VERSION"}))


def lookup(name: str) -> Any:
    """The object of that name.

    Presets come as fresh copies, so that no script changes another's.

    Raises:
        AttributeError: there is none.
    """
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    if name in ABSENT:
        return Absent(name)
    if name.startswith("_COP_"):
        return getattr(runtime, name[1:])
    if name == "DefaultConfigMapping":
        return presets.get_default_config_mapping()
    made = qconfig.qconfig_preset(name) or presets.preset_constant(name)
    if made is None:
        raise AttributeError(f"Roundel's quark API has no '{name}'")
    return made


VERSION = f"0.13+roundel.{_ROUNDEL}"
"""What `quark.__version__` says."""

TOOL_PREFIX = "quark.onnx.tools."

_CLI_MODULE = "quark.experimental.cli.main"
CLI = "quark-cli"

# By package.
_MODULES: Mapping[str, Iterable[str]] = {
    "quark": ("version",),
    "quark.common.utils": ("log",),
    # older releases'
    "quark.onnx": (
        *("quant_utils", "quantize", "calibrate", "auto_search", "custom_config", "data_reader"),
        "dump_model",
    ),
    "quark.onnx.calibration": (
        *("methods", "data_readers", "calibrators", "calibrate", "interface", "calib_utils"),
    ),
    "quark.onnx.operators.custom_ops": ("build_custom_ops",),
    "quark.onnx.quantization": ("api", "quantize", "quant_utils", "output_eval"),
    "quark.onnx.quantization.auto_search": ("auto_search_v1", "auto_search_pro"),
    "quark.onnx.quantization.config": (
        *("config", "custom_config", "legacy", "algorithm", "spec", "data_type"),
    ),
    "quark.onnx.tools": tuple(TOOLS),
    "quark.onnx.utils": ("model_utils", "deploy_utils", "file_utils", "system_utils"),
    "quark.experimental.cli": ("main",),
    "quark.shares.utils": ("log", "import_utils"),
}
MODULES = frozenset(f"{package}.{name}" for package, names in _MODULES.items() for name in names)

# Every path that lies above a module.
PACKAGES = frozenset(name[:place] for name in MODULES for place, letter in enumerate(name) if letter == ".")


ROOT = "quark"


class _Module(ModuleType):
    """A module path of the documents: every public name can be taken from every such path."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return list(public_names())
        if name.startswith("__"):
            raise AttributeError(name)
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
            return tool_module(spec.name)
        if spec.name == _CLI_MODULE:
            module = _Module(spec.name)
            module.main = commands.main  # type: ignore[attr-defined]
            return module
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == ROOT:
            module.__version__ = VERSION  # type: ignore[attr-defined]


_FINDER = _Finder()
CHILDREN = str(Path(__file__).with_name("children"))
"""A folder with a `quark` that installs this one: a new process has no finder, but it takes over the path."""


def install() -> None:
    """From now on `import quark…` means Roundel in this process, and in workers that it spawns.

    Modules of AMD's package that were imported before are forgotten, so that no script mixes the two.
    """
    if _FINDER not in sys.meta_path:
        _forget()
        sys.meta_path.insert(0, _FINDER)
    if CHILDREN not in sys.path:
        sys.path.insert(1, CHILDREN)  # the first place is the script's own folder


def uninstall() -> None:
    """Undo `install`."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    if CHILDREN in sys.path:
        sys.path.remove(CHILDREN)
    _forget()


def _install_in_programs() -> None:
    """Also in Python programs that this process starts."""
    before = os.environ.get("PYTHONPATH")
    if CHILDREN not in (before or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (CHILDREN, before)))


def _forget() -> None:
    for name in [n for n in sys.modules if n == ROOT or n.startswith(f"{ROOT}.")]:
        del sys.modules[name]


USAGE = """usage: python -m roundel.quark [--strict] SCRIPT [ARGUMENT …]
       python -m roundel.quark [--strict] -m MODULE [ARGUMENT …]
       python -m roundel.quark [--strict] -c CODE [ARGUMENT …]
       python -m roundel.quark [--strict] quark-cli onnx-ptq [ARGUMENT …]

Runs it with `import quark.onnx` meaning Roundel. With --strict, an option, setting or node that does not
exist is an error; without, a warning."""


def main(arguments: list[str]) -> int:
    """Do what the command line says; returns the exit status."""

    def prepare() -> None:
        install()
        _install_in_programs()

    return run_words(arguments, USAGE, prepare)


def run_words(arguments: list[str], usage: str, prepare: Callable[[], None]) -> int:
    """Run a script, a module or code as Python's own command line does; returns the exit status.

    Args:
        arguments: of the command line.
        usage: what to show where they cannot be obeyed.
        prepare: called before anything of the script runs.
    """
    if arguments[:1] == ["--strict"]:
        os.environ[STRICT] = "1"
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage + "\n")
        return 0 if arguments else 2
    prepare()
    first, rest = arguments[0], arguments[1:]
    if first == CLI:
        return commands.run(rest)
    if first in ("-m", "-c"):
        if not rest:
            sys.stderr.write(f"{first} needs a value\n{usage}\n")
            return 2
        return _run_module(rest[0], rest[1:]) if first == "-m" else _run_code(rest[0], rest[1:])
    return _run_script(first, rest)


def _run_script(path: str, arguments: list[str]) -> int:
    if not Path(path).exists():
        sys.stderr.write(f"the script '{path}' does not exist\n")
        return 2
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")
    return 0


def _run_module(name: str, arguments: list[str]) -> int:
    # The documents write the file's ending after the module's name.
    tool = name.removesuffix(".py")
    if tool == _CLI_MODULE:
        return commands.run(arguments)
    if tool.startswith(TOOL_PREFIX) and tool in MODULES:
        return run_tool(tool.removeprefix(TOOL_PREFIX), arguments)
    sys.argv = [name, *arguments]
    sys.path[0] = str(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _run_code(code: str, arguments: list[str]) -> int:
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    return 0
