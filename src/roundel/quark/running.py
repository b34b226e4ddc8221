"""Run a script, a module or a line of code in which `quark.onnx` means Roundel."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from roundel.quark.importing import install
from roundel.quark.modules import MODULES, TOOL_PREFIX

USAGE = """usage: python -m roundel.quark SCRIPT [ARGUMENT …]
       python -m roundel.quark -m MODULE [ARGUMENT …]
       python -m roundel.quark -c CODE [ARGUMENT …]

Runs it with `import quark.onnx` meaning Roundel."""


def main(arguments: list[str]) -> int:
    """Do what the command line says; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE + "\n")
        return 0 if arguments else 2
    install()
    first, rest = arguments[0], arguments[1:]
    if first in ("-m", "-c"):
        if not rest:
            sys.stderr.write(f"{first} needs a value\n{USAGE}\n")
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
    if tool.startswith(TOOL_PREFIX) and tool in MODULES:
        from roundel.quark.old_tools import run_tool

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
