"""Every model of ONNX's backend tests through every integer preset: docs/backend-models.md.

    python scripts/backend_models.py --log outcomes.jsonl          all presets; goes on where the log ends
    python scripts/backend_models.py --log outcomes.jsonl --table  only the table, from the log

A preset runs in a child process, so that a crash is an outcome like any other. Presets that differ only in
fine-tuning are one: these models have nothing to tune.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
TABLE = HERE.parent / "docs" / "backend-models.md"
OUTCOMES = ("quantized", "passed through", "refused", "crashed")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", type=Path, required=True, help="outcomes, one JSON object to a line")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return _child(given.child, given.log)
    if not given.table:
        for preset in presets():
            _run(preset, given.log)
    TABLE.write_text(table(_read(given.log)), encoding="utf-8")
    return 0


def presets() -> dict[str, list[str]]:
    """Presets in integers with statistics alone, each with those that are the same without fine-tuning."""
    from roundel.recipe.load import load_recipe, preset_names
    from roundel.types import BlockScheme, FloatScheme

    groups: dict[str, list[str]] = defaultdict(list)
    for name in preset_names():
        recipe = load_recipe(name)
        if isinstance(recipe.activations.scheme, FloatScheme | BlockScheme) and recipe.mode == "static":
            continue
        plain = recipe.model_dump(mode="json", exclude={"name", "title", "effort", "improve"})
        groups[json.dumps(plain, sort_keys=True)].append(name)
    return {names[0]: names for names in sorted(groups.values())}


def _read(log: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _run(preset: str, log: Path) -> None:
    """Children until one gets to the end; where one dies, the model it had begun is a crash."""
    while True:
        command = [sys.executable, __file__, "--log", str(log), "--child", preset]
        done = subprocess.run(command, check=False, capture_output=True)
        if done.returncode == 0:
            return
        begun = log.with_suffix(".begun")
        with log.open("a") as file:
            line = {"preset": preset, "model": begun.read_text(), "outcome": "crashed"}
            file.write(json.dumps({**line, "why": f"exit {done.returncode}"}) + "\n")


def _child(preset: str, log: Path) -> int:
    import logging

    from backend_cases import cases, light_cases, outcome
    from roundel.recipe.load import load_recipe

    logging.disable(logging.CRITICAL)
    recipe = load_recipe(preset, {"effort": "none", "improve": {"finetune": {"algorithm": "none"}}})
    recipe = load_recipe(recipe, {"verify": {"samples": 1}})
    done = {line["model"] for line in _read(log) if line["preset"] == preset}
    begun = log.with_suffix(".begun")
    with log.open("a", buffering=1) as file:
        for case in (*cases(), *light_cases()):
            if case.name in done:
                continue
            begun.write_text(case.name)
            what, why = outcome(case, recipe)
            line = {"preset": preset, "model": case.name, "outcome": what, "why": why}
            file.write(json.dumps(line) + "\n")
    return 0


def table(lines: list[dict[str, Any]]) -> str:
    """The page."""
    import onnx
    import onnxruntime

    counts: dict[str, Counter[str]] = defaultdict(Counter)
    refusals: dict[str, set[str]] = defaultdict(set)
    crashed = []
    for line in lines:
        counts[line["preset"]][line["outcome"]] += 1
        if line["outcome"] == "refused":
            refusals[line["why"]].add(line["model"])
        if line["outcome"] == "crashed":
            crashed.append(f"{line['model']} ({line['preset']}: {line['why']})")
    models = len({line["model"] for line in lines})
    twins = presets()
    rows = [
        "# ONNX's backend models through every integer preset",
        "",
        f"Written by `scripts/backend_models.py`: {models} models of `onnx.backend.test` (node, simple,"
        f" PyTorch's, and real-light: whole networks whose weights have one value each),"
        f" onnx {onnx.__version__}, ONNX Runtime {onnxruntime.__version__}; {len(lines)} runs. Each is"
        " quantized on its own test inputs (real-light: on random ones), written, checked by ONNX's checker,"
        " loaded and run. Effort is none: there is nothing to tune or to learn.",
        "",
        "- *quantized*: a valid Q/DQ model, loaded and run by ONNX Runtime.",
        "- *passed through*: nothing in it that the preset quantizes; the float model, valid, with a reason"
        " for each node.",
        "- *refused*: an error of Roundel's own that says why.",
        "",
        "| preset | quantized | passed through | refused | crashed | same without fine-tuning |",
        "|---|---|---|---|---|---|",
    ]
    for preset, names in twins.items():
        if preset in counts:
            cells = " | ".join(str(counts[preset][what]) for what in OUTCOMES)
            rows.append(f"| {preset} | {cells} | {', '.join(names[1:])} |")
    missing = [preset for preset in twins if preset not in counts]
    if missing:
        rows += ["", f"Not run yet: {', '.join(missing)}."]
    rows += [
        "",
        "## Crashes",
        "",
        *(f"- {what}" for what in crashed or ["none"]),
        "",
        "## Why models are refused",
    ]
    rows += ["", "| models | reason |", "|---|---|"]
    for why, which in sorted(refusals.items(), key=lambda item: -len(item[1])):
        rows.append(f"| {len(which)} | {why.replace('|', '/')} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
