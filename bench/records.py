"""The values that move between the benchmark's processes and into its result files. Standard library only."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

# Peer scripts cannot import this module (their import path starts in peers/): peers/protocol.py has the same.
RESULT_PREFIX = "ROUNDEL_BENCH_RESULT "


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to quantize: a peer, its preset and settings.

    Attributes:
        peer: Name of the peer, which is also the name of its environment and of its script.
        preset: The peer's own name for what to do.
        options: Settings as sorted pairs, so that the value is hashable.
    """

    peer: str
    preset: str
    options: tuple[tuple[str, object], ...] = ()

    @property
    def label(self) -> str:
        """The contender as it is written on the command line."""
        return f"{self.peer}:{self.preset}" + "".join(f"@{key}={_text(value)}" for key, value in self.options)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that did not work, with its message."""

    message: str


@dataclass(frozen=True, slots=True)
class Run:
    """One timed quantization.

    Attributes:
        wall_s: Seconds of the quantize call alone.
        import_s: Seconds to import the tool and build its settings.
        peak_rss_mb: Largest resident size of the whole process, imports and images included.
        rss_before_mb: The same just before the quantize call.
        child_peak_rss_mb: Largest resident size of any process that the tool itself started.
        digest: First digits of the output file's SHA-256.
    """

    wall_s: float
    import_s: float
    peak_rss_mb: float
    rss_before_mb: float
    child_peak_rss_mb: float
    digest: str


@dataclass(frozen=True, slots=True)
class Score:
    """How good one file is on the evaluation images; rates in percent.

    Attributes:
        top1: Share of images whose best class is the label.
        top5: Share of images whose label is among the five best classes.
        agreement: Share of images with the same best class as the float model.
        sqnr_db: ``10 log10(sum f^2 / sum (f - q)^2)`` over all outputs of all images; None where identical.
        size_bytes: The file, with its external data.
        images: Number of images.
    """

    top1: float
    top5: float
    agreement: float
    sqnr_db: float | None
    size_bytes: int
    images: int


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one model.

    Attributes:
        contender: Its label.
        runs: The timed runs that worked.
        score: Accuracy of the last output, or None when there is none.
        errors: Messages of every step that failed.
    """

    contender: str
    runs: tuple[Run, ...]
    score: Score | None
    errors: tuple[str, ...]

    @property
    def median_s(self) -> float | None:
        """Median quantize time."""
        return statistics.median(run.wall_s for run in self.runs) if self.runs else None

    @property
    def min_s(self) -> float | None:
        """Smallest quantize time."""
        return min((run.wall_s for run in self.runs), default=None)

    @property
    def repeatable(self) -> bool | None:
        """Whether all repeats wrote the same bytes; None with fewer than two runs."""
        return len({run.digest for run in self.runs}) == 1 if len(self.runs) > 1 else None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a contender that takes too long to run again has shown before.

    Attributes:
        contender: Its label.
        wall_s: Seconds of the quantize call.
        forward_s: Seconds of one float pass over the calibration images on that machine, at rest.
        peak_rss_mb: Largest resident size.
        top1, top5, agreement, sqnr_db: As in a score, on other images of the same set.
    """

    contender: str
    wall_s: float
    forward_s: float
    peak_rss_mb: float
    top1: float
    top5: float
    agreement: float
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class ModelResult:
    """All contenders on one model.

    Attributes:
        model: The model's name.
        title: One phrase for the table.
        forward_s: Seconds of one float pass over the calibration images, once per repeat.
        calibration_images: How many images that is.
        float_score: The float model on the evaluation images.
        rows: One per contender, in the order of the command line.
        recorded: Results of earlier runs, for comparison.
    """

    model: str
    title: str
    forward_s: tuple[float, ...]
    calibration_images: int
    float_score: Score
    rows: tuple[Row, ...]
    recorded: tuple[Recorded, ...] = ()

    @property
    def forward_median_s(self) -> float:
        """Median time of the float pass."""
        return statistics.median(self.forward_s)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one benchmark run found out.

    Attributes:
        machine: What it ran on.
        revision: State of the repository.
        repeat: Number of repeats.
        versions: Package versions by peer.
        models: Results by model.
    """

    machine: dict[str, str]
    revision: str
    repeat: int
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    models: tuple[ModelResult, ...] = ()
