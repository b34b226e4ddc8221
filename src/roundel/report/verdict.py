"""The three questions behind every run, a line each: is it accurate, will it run on the NPU, what next.

Summary, report and `compare` show the same lines, so that no two of them disagree.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from roundel.plain import counted, decibel, listed

Level = Literal["good", "doubtful", "poor", "unknown"]
Tree = Mapping[str, Any]

GOOD_DB = 20.0  # one per cent of the power is error: classifiers and detectors hardly move
POOR_DB = 12.0  # errors are then a quarter as large as the values themselves
_SMALL_DROP = 0.01
_MOSTLY = 0.9
_KINDS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answers.

    Attributes:
        level: of the accuracy: good, doubtful, poor, or unknown where nothing real was measured.
        accurate: the same in words, with the numbers.
        npu: where it is expected to run.
        next: one command to paste.
    """

    level: Level
    accurate: str
    npu: str
    next: str

    def rows(self) -> dict[str, str]:
        """As a table shows it."""
        return {"accurate?": f"{self.level}: {self.accurate}", "on the NPU?": self.npu, "next": self.next}


@dataclass(frozen=True, slots=True)
class Known:
    """What a verdict rests on.

    Attributes:
        float_model: its path, None in memory.
        model: the quantized model's path, None in memory.
        outputs: name, sqnr_db and same_top of each output or part of one.
        scores: of the float and the quantized model on labelled data, as `ModelScore.to_dict` has them.
        samples: how many the outputs were compared on.
        random: whether these were random.
        data: path of the data, None in memory.
        npu: as `rules.report.placement` has it.
        recipe: name and effort; None for a model without a record.
    """

    float_model: str | None
    model: str | None
    outputs: Sequence[Tree]
    scores: Sequence[Tree]
    samples: int
    random: bool
    data: str | None
    npu: Tree
    recipe: Tree | None


def verdict(known: Known) -> Verdict:
    """The answers to what is known."""
    level, words = _accuracy(known)
    return Verdict(level, words, npu_words(known.npu), _next(known, level))


def _accuracy(known: Known) -> tuple[Level, str]:
    if len(known.scores) > 1:
        before, after = known.scores[0], known.scores[-1]
        if before.get("top1") is not None:
            return _share("top-1", before["top1"], after["top1"], after)
        for name, value in before["metric"].items():  # mAP stands first
            return _share(name, value, after["metric"].get(name, 0.0), after)
        for name, value in after["metric"].items():  # without labels: the boxes of the float model
            return _share(f"{name} with float", 1.0, value, after)
        if after.get("agreement") is not None:
            return _share("same answer as float", 1.0, after["agreement"], after)
    if not known.outputs:
        return "unknown", "no output was compared: give data"
    worst = min(known.outputs, key=lambda out: float(out["sqnr_db"]))
    decibels = float(worst["sqnr_db"])
    words = f"{decibel(decibels)} at {'the worst ' * (len(known.outputs) > 1)}output {worst['name']}"
    same = [out["same_top"] for out in known.outputs if out["same_top"] is not None]
    words += f", same answer on {min(same):.1%}" if same else ""
    words += f" of {counted(known.samples, 'sample')}" if same else f", {counted(known.samples, 'sample')}"
    if known.random:
        return "unknown", f"{words}; random data says nothing about real inputs"
    level: Level = "good" if decibels >= GOOD_DB else "doubtful" if decibels >= POOR_DB else "poor"
    return level, f"{words}; for accuracy give --eval-data and --labels"


def _share(name: str, before: float, after: float, score: Tree) -> tuple[Level, str]:
    """A share of right answers before and after, with the interval of the change where rows were counted."""
    change, margin = after - before, score.get("margin")
    within = "" if margin is None else f" ± {100 * margin:.2f}"
    sure = "" if margin is None else " (95 %)"
    words = f"{name} {before:.2%} -> {after:.2%}, {100 * change:+.2f}{within} points{sure}"
    level: Level = "good"
    if -change > _SMALL_DROP:
        level = "poor" if -change - (margin or 0.0) > _SMALL_DROP else "doubtful"
    elif margin is not None and -change + margin > _SMALL_DROP + 0.02:
        level = "doubtful"  # too few rows to tell
    return level, f"{words} on {counted(score['rows'], 'row')}"


def npu_words(npu: Tree) -> str:
    """Where a model is expected to run, by `rules.report.placement`, and the fix where it is too little."""
    fix = npu.get("fix")
    return _npu(npu) + ("" if fix is None else f". To get more there: {fix['text']}")


def _npu(npu: Tree) -> str:
    if npu.get("refused"):
        return f"not foreseen: {npu['refused']}"
    like = npu.get("judged_as")
    place = f"predicted for {npu['device']}" + ("" if like is None else f" (taken to behave as {like})")
    whole = npu["npu_nodes"] + npu["cpu_nodes"]
    if npu["errors"]:
        return f"no, {place}: {listed(npu['errors'], 1)}"
    if not npu["npu_nodes"]:
        return f"no, {place}: all {whole} nodes stay on the CPU"
    where = f"in {counted(npu['islands'], 'island')}"
    if not npu["cpu_nodes"]:
        return f"yes, {place}: all {whole} nodes {where}"
    share = npu["npu_share_of_macs"] or 0.0
    kinds = listed([f"{count} {op}" for op, count in npu["cpu"].items()], _KINDS)
    much = "mostly" if share >= _MOSTLY else "partly"
    return (
        f"{much}, {place}: {share:.1%} of the multiplications {where}; {npu['cpu_nodes']} of {whole} nodes on"
        f" the CPU ({kinds})"
    )


def _next(known: Known, level: Level) -> str:
    model, source, data = known.model, known.float_model, known.data or "DATA"
    if model is None:
        return "result.save('model.onnx')"
    if source is None:
        return _line("roundel", "check", model)
    recipe, path = known.recipe or {}, PurePath(model)
    # A record is a recipe with all that was asked for; it lies beside the model, which stays.
    again = ("--recipe", str(path.with_suffix(".json"))) if known.recipe else ()
    if level == "unknown":
        return _line("roundel", "quantize", source, "-o", _beside(path, "real"), *again, "--data", "DATA")
    if level != "good":
        if recipe.get("effort") == "none":
            more = ("--data", data, "--effort", "fast")
            return _line("roundel", "quantize", source, "-o", _beside(path, "fast"), *again, *more)
        if known.recipe is None:
            return _line("roundel", "sensitivity", source, "--data", data)
        return _line("roundel", "sensitivity", model)
    option = (known.npu.get("fix") or {}).get("option")
    if option is not None and known.recipe is not None:
        words = ("--data", data, *shlex.split(option))
        return _line("roundel", "quantize", source, "-o", _beside(path, known.npu["device"]), *again, *words)
    if known.npu.get("refused") or known.npu["errors"] or not known.npu["npu_nodes"]:
        return _line("roundel", "check", model, "--device", known.npu["device"])
    folder = path.with_suffix("").name + "-kit"
    return _line("roundel", "deploy", model, "--device", known.npu["device"], "-o", folder)


def _beside(model: PurePath, what: str) -> str:
    return str(model.with_suffix(f".{what}{model.suffix}"))


def _line(*words: str) -> str:
    return shlex.join(words)
