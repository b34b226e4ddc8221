"""Runs Roundel and its peers on the same models, data and machine, and writes a table.

``python bench/run.py --suite foundation``, or
``python bench/run.py --models a,b --contenders roundel:a8w8,quark:A8W8,ort:int8_tensor --repeat 3``.
Standard library only; everything heavy happens in the peers' environments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import environments
import machine
import report
from contenders import SUITES, parse_contender
from models import (
    BENCH_DIR,
    WORK_DIR,
    BenchModel,
    BenchSetupError,
    Source,
    calib_path,
    eval_path,
    float_path,
    model_by_name,
    require_shared,
)
from processes import run_script, scrub
from records import Contender, Failure, ModelResult, Recorded, Report, Row, Run, Score

EVALUATION_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one invocation runs."""

    models: tuple[BenchModel, ...]
    contenders: tuple[Contender, ...]
    recorded: tuple[tuple[str, Recorded], ...]
    repeat: int
    out: Path
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Tools:
    """The interpreters: one for measuring and judging, one (or a failure) per peer.

    Attributes:
        ort: Interpreter of the ``ort`` environment.
        peers: Interpreter of each peer, or why there is none.
        library: Quark's custom-op library, for files that need it.
    """

    ort: Path
    peers: Mapping[str, Path | Failure]
    library: str


def parse_plan(argv: Sequence[str] | None = None) -> Plan:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=sorted(SUITES), help="ready-made models and contenders")
    parser.add_argument("--models", help="comma-separated; default: those of the suite")
    parser.add_argument("--contenders", help="comma-separated peer:preset[@key=value]; default: the suite's")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="result files without ending; default bench/results/<suite>")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds per quantization")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        raise BenchSetupError("--repeat must be at least 1")
    suite = SUITES[args.suite or "foundation"]
    names = args.models.split(",") if args.models else suite.models
    own = suite.contenders + (suite.gpu if machine.has_nvidia_gpu() else ())
    texts = args.contenders.split(",") if args.contenders else own
    custom = "custom" if args.models or args.contenders else "foundation"
    return Plan(
        models=tuple(model_by_name(name) for name in names),
        contenders=tuple(parse_contender(text) for text in texts),
        recorded=() if args.contenders else suite.recorded,
        repeat=args.repeat,
        out=args.out or BENCH_DIR / "results" / (args.suite or custom),
        timeout_s=args.timeout,
    )


def prepare(plan: Plan) -> Tools:
    """Makes environments, float models and data ready.

    Raises:
        BenchSetupError: Something that all contenders need is missing.
    """
    require_shared()
    ort = environments.ensure("ort")
    for model in plan.models:
        if model.source is Source.EXPORT_EFFICIENTNET_LITE0 and not float_path(model).exists():
            say(f"exporting {model.name}")
            python = environments.ensure("export")
            _must([str(python), str(BENCH_DIR / "export_efficientnet.py"), str(float_path(model))])
    _must(
        [str(ort), str(BENCH_DIR / "prepare.py"), "--models", ",".join(model.name for model in plan.models)]
    )
    peers: dict[str, Path | Failure] = {}
    library = ""
    for peer in dict.fromkeys(contender.peer for contender in plan.contenders):
        try:
            python = environments.ensure(peer)
            last_line = environments.warm_up(peer, python)
        except BenchSetupError as error:
            # One peer that cannot be installed must not keep the others from being measured.
            say(f"{peer}: {error}")
            peers[peer] = Failure(scrub(str(error)))
            continue
        peers[peer] = python
        library = last_line if peer == "quark" else library
    return Tools(ort=ort, peers=peers, library=library)


def _must(command: Sequence[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise BenchSetupError(f"{Path(command[1]).name} failed; its message is above")


def say(text: str) -> None:
    """Prints a line of progress at once."""
    print(f"bench: {text}", flush=True)


def output_path(model: BenchModel, contender: Contender) -> Path:
    """Where a contender's file goes; kept after the run, for bench/placement.py."""
    return WORK_DIR / "out" / model.name / f"{slug(contender)}.onnx"


def slug(contender: Contender) -> str:
    """A contender's label as a file name."""
    return "".join(c if c.isalnum() or c in "._=-" else "_" for c in contender.label)


def forward_once(model: BenchModel, tools: Tools, timeout_s: float) -> tuple[float, int]:
    """Times one float pass; returns seconds and number of images.

    Raises:
        BenchSetupError: The float model does not run; nothing can be compared then.
    """
    arguments = ["--model", str(float_path(model)), "--calib", str(calib_path(model))]
    arguments += ["--input-name", model.input_name]
    script = BENCH_DIR / "peers" / "forward.py"
    result = run_script(tools.ort, script, arguments, log_path(model, "forward"), timeout_s)
    if isinstance(result, Failure):
        raise BenchSetupError(f"the float forward pass of {model.name} failed: {result.message}")
    return float(result["forward_s"]), int(result["samples"])


def log_path(model: BenchModel, name: str) -> Path:
    """Where a process's output is kept."""
    return WORK_DIR / "logs" / model.name / f"{name}.log"


def quantize_once(
    model: BenchModel, contender: Contender, tools: Tools, timeout_s: float
) -> tuple[Run, dict[str, str]] | Failure:
    """Runs one contender once, in a fresh process; returns the run and the versions it reports."""
    python = tools.peers[contender.peer]
    if isinstance(python, Failure):
        return python
    output = output_path(model, contender)
    arguments = ["--model", str(float_path(model)), "--calib", str(calib_path(model))]
    arguments += ["--input-name", model.input_name, "--preset", contender.preset, "--output", str(output)]
    arguments += ["--options", json.dumps(dict(contender.options))]
    script = BENCH_DIR / "peers" / f"{contender.peer}_peer.py"
    result = run_script(python, script, arguments, log_path(model, slug(contender)), timeout_s)
    if isinstance(result, Failure):
        return result
    run = Run(
        wall_s=result["wall_s"],
        import_s=result["import_s"],
        peak_rss_mb=result["peak_rss_mb"],
        rss_before_mb=result["rss_before_mb"],
        child_peak_rss_mb=result["child_peak_rss_mb"],
        digest=hashlib.sha256(output.read_bytes()).hexdigest()[:16],
    )
    return run, result["versions"]


def judge(model: BenchModel, contender: Contender | None, tools: Tools) -> Score | Failure:
    """Evaluates a contender's last output, or the float model itself when no contender is given."""
    python = tools.ort
    arguments = ["--float", str(float_path(model)), "--data", str(eval_path(model))]
    if contender is not None:
        arguments += ["--quantized", str(output_path(model, contender))]
        own = tools.peers[contender.peer]
        # Quark's custom operators need torch beside them. Its environment has the same ONNX Runtime.
        if contender.peer == "quark" and isinstance(own, Path):
            python = own
            arguments += ["--library", tools.library]
    log = log_path(model, f"evaluate-{slug(contender) if contender else 'float'}")
    result = run_script(python, BENCH_DIR / "evaluate.py", arguments, log, EVALUATION_TIMEOUT_S)
    return result if isinstance(result, Failure) else Score(**result)


def measure(model: BenchModel, plan: Plan, tools: Tools, versions: dict[str, dict[str, str]]) -> ModelResult:
    """Runs every contender on one model, alternating, then judges the files."""
    forwards: list[float] = []
    runs: dict[Contender, list[Run]] = {contender: [] for contender in plan.contenders}
    failures: dict[Contender, list[str]] = {contender: [] for contender in plan.contenders}
    images = 0
    for turn in range(plan.repeat):
        seconds, images = forward_once(model, tools, plan.timeout_s)
        forwards.append(seconds)
        # Another one starts each time, so that none always runs first (cold caches) or last (hot processor).
        first = turn % len(plan.contenders)
        for contender in plan.contenders[first:] + plan.contenders[:first]:
            outcome = quantize_once(model, contender, tools, plan.timeout_s)
            if isinstance(outcome, Failure):
                say(f"{model.name} {turn + 1}/{plan.repeat} {contender.label}: FAILED {outcome.message}")
                failures[contender].append(outcome.message)
                continue
            run, versions[contender.peer] = outcome
            runs[contender].append(run)
            say(f"{model.name} {turn + 1}/{plan.repeat} {contender.label}: {run.wall_s:.2f} s")
    float_score = judge(model, None, tools)
    if isinstance(float_score, Failure):
        raise BenchSetupError(f"the float model {model.name} cannot be evaluated: {float_score.message}")
    rows = tuple(judged_row(model, c, tuple(runs[c]), failures[c], tools) for c in plan.contenders)
    known = tuple(recorded for name, recorded in plan.recorded if name == model.name)
    return ModelResult(model.name, model.title, tuple(forwards), images, float_score, rows, known)


def judged_row(
    model: BenchModel, contender: Contender, runs: tuple[Run, ...], errors: Sequence[str], tools: Tools
) -> Row:
    """Judges a contender's last output and makes its row."""
    messages = list(dict.fromkeys(errors))
    score: Score | None = None
    if runs and output_path(model, contender).exists():
        result = judge(model, contender, tools)
        if isinstance(result, Failure):
            messages.append(f"evaluation: {result.message}")
        else:
            score = result
            shown = "identical" if score.sqnr_db is None else f"{score.sqnr_db:.1f} dB"
            say(f"{model.name} {contender.label}: top-1 {score.top1:.1f}, {shown}")
    return Row(contender.label, runs, score, tuple(messages))


def main() -> int:
    """Command line entry; returns the exit status."""
    try:
        plan = parse_plan()
        tools = prepare(plan)
        result = Report(machine=machine.describe(), revision=machine.revision(), repeat=plan.repeat)
        versions: dict[str, dict[str, str]] = {}
        for model in plan.models:
            found = measure(model, plan, tools, versions)
            result = replace(result, versions=dict(versions), models=(*result.models, found))
            # After each model, so that a run that is stopped leaves what it has.
            report.write(result, plan.out)
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    say(f"wrote {plan.out.name}.md and {plan.out.name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
