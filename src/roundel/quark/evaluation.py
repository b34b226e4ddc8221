"""The option EvalMetrics: how far the first output moved, over a reader of the script's own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
from rich.console import Console

from roundel.data import open_samples
from roundel.model.graph import input_specs
from roundel.model.load import load_model
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness
from roundel.pipeline import QuantizeResult
from roundel.types import Sample


@dataclass(frozen=True, slots=True)
class OutputDistance:
    """Cosine and Euclidean distance of the first output, over samples."""

    mean_cosine: float
    worst_cosine: float
    mean_l2: float
    worst_l2: float
    samples: int


def first_output_distance(before: ir.Model, after: ir.Model, samples: Iterable[Sample]) -> OutputDistance:
    """Run both models and compare their first outputs."""
    sessions = open_session(before), open_session(after)
    found = []
    for sample in samples:
        one, other = (session.run([session.get_outputs()[0].name], sample)[0] for session in sessions)
        found.append(Closeness.of(one, other))
    cosines = [pair.cosine for pair in found] or [math.nan]
    lengths = [math.sqrt(pair.noise) for pair in found] or [math.nan]
    return OutputDistance(
        sum(cosines) / len(cosines), min(cosines), sum(lengths) / len(lengths), max(lengths), len(found)
    )


def show_evaluation(
    console: Console, source: str | Path | onnx.ModelProto, result: QuantizeResult, data: object
) -> None:
    """Print the distance; without a reader, what the verification measured has been printed already."""
    if data is None:
        console.print("EvalMetrics: see 'against the float model' above; EvalDataReader gives other samples")
        return
    before = load_model(source).model
    distance = first_output_distance(before, result.ir, open_samples(data, input_specs(before)))
    console.print(
        f"first output over {distance.samples} samples: "
        f"cosine mean {distance.mean_cosine:.6f}, min {distance.worst_cosine:.6f}; "
        f"L2 mean {distance.mean_l2:.6g}, max {distance.worst_l2:.6g}",
        highlight=False,
    )
