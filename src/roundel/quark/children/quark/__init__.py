"""`quark` for processes that a script starts: the first import there makes it mean Roundel.

The folder above is put on `sys.path`, which spawned workers take over, and on PYTHONPATH for other programs.
"""

from __future__ import annotations

from importlib import import_module

from roundel.quark.importing import install

install()  # forgets this module, too
import_module("quark")
