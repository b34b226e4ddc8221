"""One script, two quantizers: do the same tensors carry pairs of the same types?

`python bench/script_placement.py MODEL.onnx …` runs `peers/classic_script.py` in AMD Quark's environment and
through `python -m roundel.quark`, compares the files with `placement.py` and prints a table. Scales and codes
may differ, and are not counted. `--write` puts the table into `results/script_placement.md`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from placement import PlacementDiff, compare_placement

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "peers" / "classic_script.py"
RESULT = Path(__file__).parent / "results" / "script_placement.md"
QUARK = ROOT / ".bench" / "envs" / "quark" / "bin" / "python"
PRESETS = (
    *("XINT8", "VINT8", "S8S8_AAWS", "U8S8_AAWS", "U8U8_AAWA", "S16S8_ASWS", "A8W8", "A16W8", "U16S8_AAWS"),
    *("INT8_CNN_DEFAULT", "INT16_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT", "INT16_TRANSFORMER_DEFAULT"),
    *("BF16", "MXINT8"),
)
SAMPLES = 2  # placement does not depend on data
HEAD = """# The same script with AMD Quark 0.13 and with Roundel

`bench/script_placement.py`: tensors that both quantize, tensors that only one quantizes, and differences of
type, domain or granularity. Scales, codes and zero points are Roundel's own and not counted.

| model | preset | both | only Quark | only Roundel | other differences |
|---|---|---|---|---|---|
"""
NUMBERS = ("scale", "codes", "zero point")


def rows(model: Path, folder: Path, presets: tuple[str, ...]) -> Iterator[str]:
    """One line for each preset."""
    ours, theirs = folder / "roundel", folder / "quark"
    for place in (ours, theirs):
        place.mkdir()
    arguments = [str(SCRIPT), str(model.resolve())]
    _run([str(QUARK), *arguments, str(theirs), str(SAMPLES), *presets], folder)
    _run([sys.executable, "-m", "roundel.quark", *arguments, str(ours), str(SAMPLES), *presets], folder)
    for preset in presets:
        found = compare_placement(theirs / f"{preset}.onnx", ours / f"{preset}.onnx")
        yield f"| {model.stem} | {preset} | {found.matched} | {_names(found, 'only_a')} | "
        yield f"{_names(found, 'only_b')} | {_others(found)} |\n"


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _names(found: PlacementDiff, side: str) -> str:
    tensors = getattr(found, side)
    first = f" ({tensors[0].describe()})" if tensors else ""
    return f"{len(tensors)}{first}"


def _others(found: PlacementDiff) -> str:
    kinds = [d.kind for d in found.differences if d.kind not in NUMBERS]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "none"


def main() -> None:
    """Print, and write when asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--presets", nargs="*", default=PRESETS)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    text = HEAD
    for model in given.models:
        with tempfile.TemporaryDirectory(prefix="roundel-bench-") as folder:
            text += "".join(rows(model, Path(folder), tuple(given.presets)))
    sys.stdout.write(text)
    if given.write:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
