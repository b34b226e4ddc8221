"""Cross-layer equalization: exact in float, kinder to one scale for a whole weight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.algorithms.equalize_balance import Balance, find_spaces
from roundel.algorithms.equalize_layers import Layer
from roundel.algorithms.equalize_trace import Trace
from roundel.model.session import open_session
from roundel.passes.rewriting import Editor
from roundel.recipe import Equalize
from roundel.types import Sample


@dataclass(frozen=True, slots=True)
class LayerSpread:
    """How far the largest channel of a layer stands out, before and after: maximum over median range."""

    layer: str
    op: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class EqualizeReport:
    """What equalization did.

    Attributes:
        spaces: sets of tied channels that were rescaled.
        channels: channels that got a factor of their own.
        silenced: channels that are constant whatever the input, taken out of their layers.
        absorbed: channels whose constant part moved into the biases behind.
        rounds: how often all spaces were visited.
        layers: the layers that changed.
        seconds: how long it took.
    """

    spaces: int
    channels: int
    silenced: int
    absorbed: int
    rounds: int
    layers: tuple[LayerSpread, ...]
    seconds: float


def equalize(model: ir.Model, options: Equalize, *, power_of_two: bool) -> EqualizeReport:
    """Rescale channels between layers, in place, so that one scale suits each whole weight.

    The model computes what it did before, for every input, up to the rounding of float32.

    Args:
        model: prepared: batch norms folded, shapes known.
        options: rounds, threshold, and what counts.
        power_of_two: whether weight scales will be powers of two.
    """
    started = time.perf_counter()
    trace = Trace(model.graph, absorb=options.absorb_bias)
    before = [_spread(layer, plain=True) for layer in trace.layers]
    balance = Balance(trace.layers, find_spaces(trace), options, power_of_two=power_of_two)
    rounds = balance.run()
    balance.align()
    balance.write()
    editor, changed = Editor(model), []
    for layer, old in zip(trace.layers, before, strict=True):
        if layer.store(editor):
            name = str(layer.node.name or layer.node.outputs[0].name)
            changed.append(LayerSpread(name, layer.node.op_type, old, _spread(layer)))
    return EqualizeReport(
        spaces=sum(bool(np.any(f != 1)) for f in balance.factors),
        channels=sum(int(np.count_nonzero(f != 1)) for f in balance.factors),
        silenced=trace.silenced,
        absorbed=trace.absorbed,
        rounds=rounds,
        layers=tuple(changed),
        seconds=time.perf_counter() - started,
    )


def check_equalized(before: ir.Model, after: ir.Model, samples: Sequence[Sample]) -> float:
    """The largest difference between the outputs of two models, relative to the largest output value."""
    sessions = [open_session(model) for model in (before, after)]
    worst = 0.0
    for sample in samples:
        for old, new in zip(*(session.run(None, sample) for session in sessions), strict=True):
            if not old.size or old.dtype.kind != "f":
                continue
            size = float(np.abs(old).max()) or 1.0
            worst = max(worst, float(np.abs(old.astype(np.float64) - new).max()) / size)
    return worst


def _spread(layer: Layer, *, plain: bool = False) -> float:
    """Maximum over median of the ranges of the output channels that are not zero."""
    if plain:
        ranges = np.abs(layer.weight).max(axis=(2, 3)).reshape(-1)
    else:
        ranges = layer.magnitudes().max(axis=2).reshape(-1)
    ranges = ranges[ranges > 0]
    return float(ranges.max() / np.median(ranges)) if ranges.size else 1.0
