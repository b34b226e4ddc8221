"""How long a Phoenix NPU takes: a guess within a factor of 2, beside the CPU's float time measured here.

Two lines fitted to a dozen published timings of one NPU (Ryzen 7 8700G, one subgraph each). They were off by
1.13 on average and 1.7 at worst, on a grouped network; the clock alone makes 1.9 between two sittings.
"""

from __future__ import annotations

from roundel.data import RandomSpec
from roundel.errors import RoundelError
from roundel.forecasting import forward_seconds
from roundel.recipe.settings import Data
from roundel.rules.facts import Facts
from roundel.rules.types import Latency, Place, Prediction
from roundel.stages import open_data
from roundel.targets.npu import Compiler

_FIXED_MS, _EACH_GMAC_MS = 2.5, 0.72
_EACH_LAYER_MS, _BESIDE_LAYERS_MS = 0.049, 0.67
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})
_FACTOR = 2.0  # the promise
_MOSTLY = 0.9  # share of the multiplications on the NPU: the CPU's part is in no formula
_SMALL_MACS = 350_000_000  # MobileNetV2 has 0.30 G
_SMALL = (
    "A network of this size is likely to be faster on the CPU: MobileNetV2 (0.3 GMAC) took 2.68 ms on a"
    " Phoenix NPU and 1.72 ms, in float, on the CPU beside it."
)
_SHALLOW = "With so few layers the two formulas disagree: a single Conv took 0.43 ms there."


def guess(macs: int, layers: int) -> tuple[float, float]:
    """Milliseconds by both formulas: by the work alone, and by work and number of layers."""
    billions = macs / 1e9
    return (_FIXED_MS + _EACH_GMAC_MS * billions, _EACH_LAYER_MS * layers + _BESIDE_LAYERS_MS * billions)


def latency_of(facts: Facts) -> Latency | None:
    """The guess; None for another NPU than the first, and where much of the work is not placed."""
    split = facts.after
    if facts.device.compiler is not Compiler.X1 or (split.npu_share or 0.0) < _MOSTLY:
        return None
    placed = [node for node in split.nodes if node.place is Place.NPU]
    both = guess(sum(node.macs or 0 for node in placed), sum(node.op in _LAYERS for node in placed))
    cpu_ms = _on_cpu(facts)
    times = (sum(both) / len(both), min(both) / _FACTOR, max(both) * _FACTOR)
    likely, least, most = (round(time, 2) for time in times)
    notes = _notes(split, (least, most), cpu_ms)
    if max(both) > _FACTOR * min(both):
        notes.append(_SHALLOW)
    return Latency(likely, least, most, cpu_ms, tuple(notes))


def _on_cpu(facts: Facts) -> float | None:
    """Milliseconds of the float model here, on random data."""
    model = facts.loaded.model
    try:
        samples = open_data(model, Data(), RandomSpec(1))
        return round(1000 * forward_seconds(model, samples), 2)
    except RoundelError:
        return None  # open sizes, or an operator that ONNX Runtime does not have: there is no time to tell


def _notes(split: Prediction, limits: tuple[float, float], cpu_ms: float | None) -> list[str]:
    notes = []
    if split.macs <= _SMALL_MACS:
        notes.append(_SMALL)
    elif cpu_ms is not None:
        least, most = limits
        words = "about as fast: measure both"
        if cpu_ms < least:
            words = "faster, even if the guess is too high by the whole factor"
        elif cpu_ms > most:
            words = "slower, even if the guess is too low by the whole factor"
        notes.append(f"This machine's CPU is {words}.")
    if split.islands > 1 or split.npu_share != 1.0:
        notes.append(f"Both formulas hold for one subgraph; each of {split.islands} islands costs more.")
    return notes
