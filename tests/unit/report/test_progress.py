"""Progress in a log: few lines, each with the time, and none of a run that takes seconds."""

from __future__ import annotations

import io
from pathlib import Path

from typer.testing import CliRunner

from roundel.cli.app import app
from roundel.errors import RecipeError
from roundel.example import load_example
from roundel.report.progress import LogListener


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_of_seconds_writes_nothing() -> None:
    out, clock = io.StringIO(), Clock()
    told = LogListener(out, clock=clock)
    for second in range(9):
        clock.now = second
        told.step("collect", 100)
        told.advance(second)
    assert out.getvalue() == ""


def test_a_long_one_writes_now_and_then_where_it_is() -> None:
    out, clock = io.StringIO(), Clock()
    told = LogListener(out, clock=clock)
    told.step("rounding", 400)
    told.say("layer 7")
    for second in range(125):
        clock.now = second
        told.advance(second)
    lines = out.getvalue().splitlines()
    assert len(lines) == 12
    assert lines[0] == "[00:10] rounding 10/400  layer 7"
    assert lines[-1].startswith("[02:00] ")


def test_the_log_file_has_every_step_and_the_terminal_no_empty_lines(tmp_path: Path) -> None:
    example, log = load_example().model_path, tmp_path / "run.log"
    words = ["--log-file", log, "quantize", example, "-o", tmp_path / "q.onnx", "--random", "1"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    steps = [line.split("] ")[1] for line in log.read_text().splitlines()]
    assert steps[0] == "load and prepare"
    assert "write" in steps
    assert done.stderr == ""
    assert all(line.strip() for line in done.stdout.splitlines())
    assert "1 sample " in " ".join(done.stdout.split()) + " "
    assert "1 samples" not in done.stdout


def test_h_is_help() -> None:
    for words in (["-h"], ["quantize", "-h"], ["check", "-h"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0
        assert "Usage" in done.output


def test_what_was_meant_stands_before_a_long_list() -> None:
    told = RecipeError.unknown("There is no preset 'a8w9'.", "a8w9", ["a8w8", *(f"p{n}" for n in range(90))])
    labels = [label for label, _ in told.details()]
    assert labels.index("what to do") < labels.index("expected")
