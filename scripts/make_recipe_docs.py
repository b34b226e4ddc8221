"""Writes docs/recipes.md from the recipe's own source, so that the page cannot fall behind.

Run `python scripts/make_recipe_docs.py`; with `--check` it only says whether the page is current.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "roundel" / "recipe" / "settings.py"
PAGE = ROOT / "docs" / "recipes.md"

INTRO = """# Recipes

A recipe decides a whole run. Presets are recipes that ship with Roundel (`roundel presets`); a file of your
own is YAML or JSON and may start from one of them:

```yaml
version: 1
extends: a8w8
name: mine
weights: {per_channel: true}
calibration: {method: percentile, percentile: 99.99}
selection:
  exclude: ["/head/*", "op:Softmax", "re:^/decoder/.*"]
  exclude_subgraphs: [{inputs: [features], outputs: [boxes, scores]}]
overrides:
  - {nodes: ["/stem/conv"], type: int16}
  - {tensors: [logits], range: [-20, 20]}
```

On the command line, `-s KEY=VALUE` changes a single value (`-s weights.per_channel=true`); in Python,
`changes={"weights": {"per_channel": True}}` does. An unknown key is an error with a suggestion. A selector is
an exact node or tensor name, a glob, `re:REGEX` or `op:TYPE`; one that matches nothing is an error, too.

This page is generated from the source by `scripts/make_recipe_docs.py`.
"""


def page() -> str:
    """The whole page."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    aliases = {
        node.targets[0].id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    parts = [INTRO, _section("Top level", classes["Recipe"], aliases)]
    parts += _inner(classes["Recipe"], "", classes, aliases)
    parts.append(_section("Subgraph (in `selection.exclude_subgraphs`)", classes["Subgraph"], aliases))
    return "\n".join(parts)


def _inner(
    node: ast.ClassDef, prefix: str, classes: dict[str, ast.ClassDef], aliases: dict[str, str]
) -> list[str]:
    """The sections that a section's fields hold, each followed by its own."""
    parts = []
    for field, kind, _, _ in _fields(node):
        for name in re.findall(r"\w+", kind):
            if name in classes and name != "Subgraph":
                parts.append(_section(f"`{prefix}{field}`", classes[name], aliases))
                parts += _inner(classes[name], f"{prefix}{field}.", classes, aliases)
    return parts


def _fields(node: ast.ClassDef) -> list[tuple[str, str, str, str]]:
    """(name, type, default, description) of each field."""
    rows = []
    for here, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        default = ast.unparse(here.value) if here.value is not None else "required"
        rows.append((here.target.id, ast.unparse(here.annotation), default, text))
    return rows


def _section(title: str, node: ast.ClassDef, aliases: dict[str, str]) -> str:
    lines = [f"## {title}", "", ast.get_docstring(node) or "", ""]
    lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, text in _fields(node):
        values = _readable(kind, aliases)
        shown = "" if default.endswith("()") and default[0].isupper() else f"`{default}`"
        shown = shown.replace("`Field(min_length=1)`", "required")
        lines.append(f"| `{name}` | {values} | {shown} | {text} |")
    return "\n".join([*lines, ""])


def _readable(kind: str, aliases: dict[str, str]) -> str:
    for alias, meaning in reversed(aliases.items()):  # a later one is written in words of earlier ones
        if alias in kind and alias not in ("VERSION",):
            kind = kind.replace(alias, meaning)
    kind = re.sub(r"Annotated\[(int|float), Field\((.*?)\)\]", _bounds, kind)
    kind = kind.replace("Literal[", "").replace("tuple[", "list of ")
    kind = kind.replace("]", "").replace(", ...", "").replace("'", "")
    return kind.replace("|", "or")


def _bounds(found: re.Match[str]) -> str:
    """'int >= 1', '50 < float <= 100'."""
    words = dict(part.split("=") for part in found[2].split(", "))
    low = f"{words['ge']} <= " if "ge" in words else f"{words['gt']} < " if "gt" in words else ""
    high = f" <= {words['le']}" if "le" in words else f" < {words['lt']}" if "lt" in words else ""
    if low and not high:
        return f"{found[1]} {'>=' if 'ge' in words else '>'} {low.split()[0]}"
    return f"{low}{found[1]}{high}"


def main() -> None:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else "docs/recipes.md is out of date")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
