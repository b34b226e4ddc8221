"""What a person sees of the improving steps: the table of layers, the summary's lines, the live line."""

from __future__ import annotations

import io

from rich.console import Console

from roundel.improve.steps import verdict
from roundel.report.console import layer_table
from roundel.report.progress import ProgressListener
from roundel.state import LayerReport, StepReport

LONG = "/model/backbone/stages.3/blocks.11/depthwise_separable/conv_dw/Conv"
COUNT = 20


def rounding(kept: bool = True) -> StepReport:
    layers = tuple(
        LayerReport(f"{LONG}_{i}", "Conv", 10.0 + i, 10.0 + 2 * i if i else 10.0, bool(i), 0.25)
        for i in range(COUNT)
    )
    return verdict("rounding", (5.0, 18.25 if kept else 4.0), 6.5, layers)


def tuning() -> StepReport:
    layers = tuple(
        LayerReport(f"{LONG}_{i}", "Conv", 20.0 + i, 20.5 + i, True, 103.4, 1000) for i in range(COUNT)
    )
    return verdict("fine-tuning", (18.25, 18.5), 2068.0, layers)


def shown(*steps: StepReport, most: int | None) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    table = layer_table(steps, most=most)
    assert table is not None
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def numbers(lines: list[str]) -> list[int]:
    """The layers that are shown, in their order."""
    return [int(line.split()[0].rpartition("_")[2]) for line in lines if line.lstrip().startswith("…")]


def test_the_worst_and_the_most_improved_fit_on_a_screen() -> None:
    lines = shown(rounding(), tuning(), most=8)
    assert all(len(line) <= 80 for line in lines)
    assert numbers(lines) == [0, 1, 2, 3, 16, 17, 18, 19]
    assert "worst and the most improved 8 of 20" in " ".join(lines)
    last = lines[-1]
    assert "29.0 -> 48.0" in last
    assert "39.0 -> 39.5" in last
    assert "103.4" in last
    first = next(line for line in lines if "Conv_0 " in line)
    assert "10.0 as it was" in first


def test_all_layers_when_asked_for() -> None:
    lines = shown(rounding(), tuning(), most=None)
    assert numbers(lines) == list(range(COUNT))
    assert "--verbose" not in " ".join(lines)


def test_one_step_and_a_step_that_was_not_kept() -> None:
    lines = shown(rounding(kept=False), most=4)
    assert "(rounding)" in " ".join(lines)
    assert all(len(line) <= 80 for line in lines)
    assert len(numbers(shown(rounding(), most=4))) == 4
    # Layers count by what was kept: here by fine-tuning, where all gained alike and the first are worst.
    assert numbers(shown(rounding(kept=False), tuning(), most=4)) == [0, 1, 2, 3]


def test_steps_that_do_not_work_layer_by_layer_have_no_table() -> None:
    ranges = verdict("ranges", (1.0, 2.0), 0.5, (LayerReport("t", "range", 1.0, 2.0, True, 0.1),))
    assert layer_table([ranges], most=8) is None
    assert shown(ranges, rounding(), tuning(), most=8) == shown(rounding(), tuning(), most=8)
    assert layer_table([verdict("equalization", (1.0, 2.0), 0.5)], most=8) is None
    assert layer_table([], most=8) is None


def test_the_live_line_has_layers_loss_and_time_left() -> None:
    out = io.StringIO()
    told = ProgressListener(Console(file=out, width=80, force_terminal=True, color_system=None))
    told.say("before any step: nothing to say it beside")
    told.step("fine-tune by AdaRound", 49)
    told.advance(12.4)
    told.say("loss 3.1e-04")
    told.close()
    text = out.getvalue()
    assert "fine-tune by AdaRound" in text
    assert "12/49" in text
    assert "loss 3.1e-04" in text
    assert "…" not in text, "nothing is cut off at 80 columns"
