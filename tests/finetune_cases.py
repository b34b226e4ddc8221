"""Small models, calibrated and ready to be tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from helpers import build, node, normal
from roundel.improve.finetune import finetune
from roundel.improve.memory import run_key
from roundel.improve.probe import session_of
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness
from roundel.recipe.load import load_recipe
from roundel.recipe.settings import Recipe
from roundel.stages import collect, plan, prepare, resolve
from roundel.state import LayerReport, State
from roundel.types import Sample

PLAIN_XINT8: dict[str, Any] = {
    "activations": {"type": "uint8", "symmetric": True, "scale": "power_of_two"},
    "weights": {"type": "int8", "symmetric": True, "scale": "power_of_two", "method": "mse"},
    "bias": {"type": "int8"},
    "calibration": {"method": "mse"},
    "npu": {"adjust_shift_cut": True, "adjust_shift_bias": True, "adjust_shift_read": True},
}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A calibrated model."""

    model: ir.Model
    state: State
    recipe: Recipe
    samples: Sequence[Sample]

    def tune(self, **settings: Any) -> tuple[State, tuple[LayerReport, ...]]:
        """Fine-tune with these settings; those of the call itself are named so."""
        progress, store = settings.pop("progress", None), settings.pop("store", None)
        recipe, memory = self.with_settings(**settings), None
        if store is not None:
            memory = store.memory("finetune", run_key(self.model, self.state, self.samples, recipe))
        return finetune(self.model, self.state, self.samples, recipe, progress=progress, memory=memory)

    def with_settings(self, **settings: Any) -> Recipe:
        """The recipe with fine-tuning settings; few steps unless said otherwise."""
        tuning = {"algorithm": "adaround", "iterations": 60, **settings}
        effort = "high" if self.recipe.effort == "high" else "fast"
        return self.recipe.merged({"effort": effort, "improve": {"finetune": tuning}})

    def sqnr(self, state: State, samples: Sequence[Sample]) -> float:
        """Of the whole model's outputs, in dB."""
        plain, tuned = open_session(self.model), session_of(self.model, state, self.recipe)
        total = Closeness()
        for sample in samples:
            for a, b in zip(plain.run(None, sample), tuned.run(None, sample), strict=True):
                total = total.merge(Closeness.of(a, b))
        return total.sqnr_db


def calibrated(
    model: Any, samples: Sequence[Sample], preset: str = "a8w8", changes: dict[str, Any] | None = None
) -> Case:
    """Calibrated on the samples, nothing improved."""
    base: Any = PLAIN_XINT8 if preset == "xint8" else preset
    recipe = load_recipe(base, changes or {})
    state = resolve(collect(plan(prepare(model, recipe)), list(samples)))
    return Case(state.model, state, recipe, samples)


def pictures(count: int = 20, channels: int = 3, size: int = 8, seed: int = 5) -> list[Sample]:
    """Smooth random images: neighbouring values belong together, as in real ones."""
    generator = np.random.default_rng(seed)
    raw = generator.normal(0, 1, (count, 1, channels, size + 2, size + 2))
    smooth = sum(np.roll(raw, (i, j), (-2, -1)) for i in range(3) for j in range(3)) / 3
    return [{"x": np.asarray(image[..., 1:-1, 1:-1], np.float32)} for image in smooth]


def conv_net(seed: int = 0, residual: bool = False) -> onnx.ModelProto:
    """Conv, depthwise Conv with ReLU6, Conv (or a residual block of them), a pool and a Gemm."""
    weights = {
        "w1": normal(8, 3, 3, 3, seed=seed, scale=0.4) * np.geomspace(0.2, 2, 8).reshape(-1, 1, 1, 1),
        "b1": normal(8, seed=seed + 1, scale=0.2),
        "w2": normal(8, 1, 3, 3, seed=seed + 2, scale=0.5) * np.geomspace(2, 0.2, 8).reshape(-1, 1, 1, 1),
        "b2": normal(8, seed=seed + 3, scale=0.2),
        "w3": normal(8, 8, 1, 1, seed=seed + 4, scale=0.4),
        "b3": normal(8, seed=seed + 5, scale=0.2),
        "w4": normal(8, 5, seed=seed + 6, scale=0.5),
        "b4": normal(5, seed=seed + 7, scale=0.2),
        "low": np.float32(0),
        "high": np.float32(6),
    }
    constants = {name: np.asarray(value, np.float32) for name, value in weights.items()}
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"], "relu1"),
        node("Conv", ["r1", "w2", "b2"], ["c2"], "conv2", pads=[1, 1, 1, 1], group=8),
        node("Clip", ["c2", "low", "high"], ["r2"], "clip2"),
        node("Conv", ["r2", "w3", "b3"], ["c3"], "conv3"),
        *([node("Add", ["c3", "r1"], ["a"], "add")] if residual else []),
        node("GlobalAveragePool", ["a" if residual else "c3"], ["p"], "pool"),
        node("Flatten", ["p"], ["f"], "flat"),
        node("Gemm", ["f", "w4", "b4"], ["y"], "fc"),
    ]
    return build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)


def same(one: State, other: State) -> bool:
    """Whether two states hold the same codes and the same formats."""
    return (
        one.codes.keys() == other.codes.keys()
        and all(np.array_equal(one.codes[name], other.codes[name]) for name in one.codes)
        and all(one.params[name].same_as(other.params[name]) for name in one.params)
    )


def array(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    """Gaussian values."""
    return normal(*shape, seed=seed, scale=scale)
