"""Writes docs/quark-options.md from the tables of the front door; `--check` says whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from roundel.quark.algorithms import FEW_BITS, FINETUNE, GPTQ, MIXED
from roundel.quark.importing import ABSENT
from roundel.quark.request import FIELD_OPTIONS
from roundel.quark.rows import Option
from roundel.quark.translate import GROUPS

PAGE = Path(__file__).parents[1] / "docs" / "quark-options.md"
NESTED = {
    "FastFinetune": FINETUNE,
    "AutoMixprecision": MIXED,
    "GPTQParams": GPTQ,
    "MatMulNBitsParams": FEW_BITS,
}
HEAD = """# Extra options of existing scripts

Made by `scripts/make_option_docs.py` from the tables in `src/roundel/quark/` (`options.py`, `algorithms.py`).
Every key is one of three things: it becomes fields of a recipe (see `docs/recipes.md`) or a setting of the
run; it asks for what Roundel does anyhow, which a note then says; or it is refused with the reason. A key
that is not here does nothing and is warned about (an error with `--strict`). `Recipe` is Roundel's own: a
dictionary of recipe values that win over all else.
"""


def table(rows: Iterable[Option]) -> list[str]:
    """One line for each option."""
    lines = ["", "| key | default | becomes |", "|---|---|---|"]
    for row in rows:
        default = "" if row.default is None else f"`{row.default!r}`"
        lines.append(f"| `{row.key}` | {default} | {row.becomes.replace('|', '/')} |")
    return lines


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for title, rows in GROUPS.items():
        lines += [f"## {title}", *table(rows), ""]
    for title, nested in NESTED.items():
        lines += [f"## Inside `{title}`", *table(nested.values()), ""]
    lines += ["## Fields that may also be given as options", "", "| key | field |", "|---|---|"]
    lines += [f"| `{key}` | `{name}` |" for key, name in FIELD_OPTIONS.items()]
    lines += ["", "## Names that can be imported and are not there", "", "| name | instead |", "|---|---|"]
    lines += [f"| `{name}` | {instead} |" for name, (_, instead) in ABSENT.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        sys.exit(0 if current else "docs/quark-options.md is out of date")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
