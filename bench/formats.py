"""Block formats: Roundel's numerics and function bodies beside AMD Quark's compiled operators.

``python bench/formats.py`` times them in turns on the same tensors and writes bench/results/formats.*;
``python bench/formats.py --golden tests/golden/block_formats.npz`` makes the tests' expectations anew.
Standard library only; the work happens in the ``quark`` environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import environments
import machine
from models import BENCH_DIR, WORK_DIR, BenchSetupError
from processes import run_script
from records import Failure

TIMEOUT_S = 1800.0


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each format and tensor."""
    lines = [
        "| format | tensor | Quark ns | Roundel ns | times | function ns | equal bits |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        ns, equal = row["min"], "yes" if row["equal"] else "NO"
        lines.append(
            f"| {row['format']} | {row['tensor']} ({shape}) | {ns['quark']:.1f} | {ns['roundel']:.1f} "
            f"| {ns['quark'] / ns['roundel']:.1f} | {ns['function']:.1f} | {equal} |"
        )
    return "\n".join(lines)


def page(rows: list[dict[str, Any]], facts: dict[str, str], repeat: int) -> str:
    """The result as Markdown."""
    ratios = [row["min"]["quark"] / row["min"]["roundel"] for row in rows]
    described = ", ".join(f"{key}: {value}" for key, value in facts.items())
    return f"""# Block formats: speed and equality

Nanoseconds for one value, smallest of {repeat} turns; every turn runs all three on the same tensor, each time
in another order. Quark: its compiled custom operators in ONNX Runtime. Roundel: its numpy numerics, one
thread. Function: Roundel's function bodies in a stock ONNX Runtime session, no library. Equal bits: of all
three results.

{table(rows)}

Roundel's numerics are {min(ratios):.1f} to {max(ratios):.1f} times as fast as Quark's operators.

{described}. Revision {machine.revision()}.
"""


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", type=Path, default=BENCH_DIR / "results" / "formats")
    parser.add_argument("--golden", type=Path, help="write the tests' expectations instead of timing")
    args = parser.parse_args()
    facts = machine.describe()
    try:
        python = environments.ensure("quark")
        library = environments.warm_up("quark", python)
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    arguments = ["--library", library, "--repeat", str(args.repeat)]
    if args.golden:
        arguments += ["--golden", str(args.golden.resolve())]
    log = WORK_DIR / "logs" / "formats.log"
    result = run_script(python, BENCH_DIR / "peers" / "formats_peer.py", arguments, log, TIMEOUT_S)
    if isinstance(result, Failure):
        print(f"bench: {result.message}", file=sys.stderr)
        return 1
    if not args.golden:
        args.out.with_suffix(".json").write_text(json.dumps({"machine": facts, **result}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(page(result["rows"], facts, args.repeat))
        print(table(result["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
