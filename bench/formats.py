"""Block formats: Roundel's numerics and function bodies beside AMD Quark's compiled operators.

``python bench/formats.py`` times them in turns on the same tensors, runs EfficientNet-Lite0 in both forms,
and writes bench/results/formats_tensors.*; ``--golden tests/golden/block_formats.npz`` makes the tests'
expectations anew instead. Standard library only; the work happens in the ``quark`` environment. How accurate
whole models are in these formats, and how long they take, is ``bench/run.py --suite formats``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import environments
import machine
from models import BENCH_DIR, WORK_DIR, BenchSetupError, eval_path, float_path, model_by_name
from processes import run_script
from records import Failure

TIMEOUT_S = 3600.0
MODEL = "efficientnet_lite0"
Rows = list[dict[str, Any]]


def speed_table(rows: Rows) -> str:
    """One line for each format and tensor."""
    lines = [
        "| format | tensor | Quark ns | Roundel ns | times | function ns | equal bits |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        ns = row["min"]
        lines.append(
            f"| {row['format']} | {row['tensor']} ({shape}) | {ns['quark']:.1f} | {ns['roundel']:.1f} "
            f"| {ns['quark'] / ns['roundel']:.1f} | {ns['function']:.1f} | {_said(row['equal'])} |"
        )
    return "\n".join(lines)


def form_table(rows: Rows) -> str:
    """One line for each format of the model."""
    lines = [
        "| format | SQNR dB | same logits: no optimisations | basic | all | load s | bare load s |",
        "|---|---:|---|---|---|---:|---:|",
    ]
    for row in rows:
        equal, load = row["equal"], row["load_s"]
        lines.append(
            f"| {row['format']} | {row['sqnr_db']:.1f} | {_said(equal['none'])} | {_said(equal['basic'])} "
            f"| {_said(equal['all'])} | {load['function all']:.1f} | {load['bare all']:.1f} |"
        )
    return "\n".join(lines)


def _said(equal: bool) -> str:
    return "yes" if equal else "NO"


def page(tensors: Rows, forms: Rows, facts: dict[str, str], repeat: int) -> str:
    """The result as Markdown."""
    ratios = [row["min"]["quark"] / row["min"]["roundel"] for row in tensors]
    described = ", ".join(f"{key}: {value}" for key, value in facts.items())
    return f"""# Block formats: speed and equality

## Tensors

Nanoseconds for one value, smallest of {repeat} turns; every turn runs all three on the same tensor, each time
in another order. Quark: its compiled custom operators in ONNX Runtime. Roundel: its numpy numerics, one
thread. Function: Roundel's function bodies in a stock ONNX Runtime session, no library. Equal bits: of all
three results.

{speed_table(tensors)}

Roundel's numerics are {min(ratios):.1f} to {max(ratios):.1f} times as fast as Quark's operators.

## EfficientNet-Lite0

The file that Roundel writes, on {forms[0]["images"]} images: with function bodies in a stock ONNX Runtime,
and bare (`output.strip_functions`) with Quark's library. ONNX Runtime's own optimisations see constant
weights where there are function bodies, and unknown ones where there are custom operators: they fuse and lay
out convolutions differently, which sums in another order.

{form_table(forms)}

{described}. Revision {machine.revision()}.
"""


def run_peer(python: Path, arguments: Sequence[str], name: str) -> Rows:
    """One run of the peer.

    Raises:
        BenchSetupError: it failed.
    """
    log = WORK_DIR / "logs" / f"{name}.log"
    result = run_script(python, BENCH_DIR / "peers" / "formats_peer.py", arguments, log, TIMEOUT_S)
    if isinstance(result, Failure):
        raise BenchSetupError(result.message)
    rows: Rows = result["rows"]
    return rows


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", type=Path, default=BENCH_DIR / "results" / "formats_tensors")
    parser.add_argument("--golden", type=Path, help="write the tests' expectations instead of timing")
    args = parser.parse_args()
    facts = machine.describe()
    try:
        python = environments.ensure("quark")
        common = ["--library", environments.warm_up("quark", python), "--repeat", str(args.repeat)]
        if args.golden:
            run_peer(python, [*common, "--golden", str(args.golden.resolve())], "formats_golden")
            return 0
        tensors = run_peer(python, common, "formats")
        model = model_by_name(MODEL)
        files = ["--model", str(float_path(model)), "--images", str(eval_path(model))]
        forms = run_peer(python, [*common, *files], "formats_forms")
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    record = {"machine": facts, "revision": machine.revision(), "tensors": tensors, "forms": forms}
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    text = page(tensors, forms, facts, args.repeat)
    args.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
