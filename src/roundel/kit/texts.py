"""Reports and logs as text, in whatever encoding a console left them."""

from __future__ import annotations

import codecs
from pathlib import Path

from roundel.kit.placement import ReportError

_LARGEST = 512 * 1024 * 1024
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def text_of(path: Path) -> str:
    """What the file holds.

    Raises:
        ReportError: it cannot be read, or is far too large.
    """
    return _decode(_bytes(path))


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            raise ReportError(
                "The file is too large to be a report.",
                where=path,
                observed=f"{size} bytes",
                expected="a log",
            )
        return path.read_bytes()
    except OSError as error:
        raise ReportError("The report cannot be read.", where=path, observed=error.strerror) from error


def _decode(data: bytes) -> str:
    """Text as a console redirect left it: UTF-8, PowerShell's UTF-16, or an old code page."""
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return data.decode(encoding, errors="replace")
    head = data[:4096]
    if head.count(0) > len(head) // 4:
        even = head[0::2].count(0)
        return data.decode("utf-16-be" if even > head.count(0) - even else "utf-16-le", errors="replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
