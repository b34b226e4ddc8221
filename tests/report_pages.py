"""Comparisons of made-up models, for pages of any size and with any names."""

from __future__ import annotations

import random

from roundel.measure.types import (
    ChannelError,
    CoarseHistogram,
    Comparison,
    Difference,
    OutputComparison,
    TensorComparison,
    TensorStorage,
    WeightComparison,
)

_INT8 = TensorStorage("int8", -4.0, 3.96875, 1 / 32)


def made_up(
    layers: int, *, name: str = "/blocks.{0}/conv_{0}", channels: int = 16, branches: bool = True
) -> Comparison:
    """A chain with branches and ways around; every sixth layer joins, every seventeenth branches off.

    Args:
        layers: how many, the input included.
        name: of a layer; {0} is its number.
        channels: of each weight.
        branches: whether there are any; else it is a plain chain.
    """
    dice = random.Random(1)
    tensors: list[TensorComparison] = []
    weights: list[WeightComparison] = []
    for index in range(layers):
        names = [tensor.name for tensor in tensors]
        sources = names[-1:]
        if branches and index > 6 and index % 6 == 5:
            sources = [names[-1], names[-5]]
        if branches and index > 12 and index % 17 == 3:
            sources = [names[-4]]
        label = name.format(index)
        level = round(dice.uniform(18, 50), 2)
        weights.append(_weight(f"{label}.weight", level, channels, dice))
        tensors.append(_tensor(label, index, layers, level, tuple(sources), dice))
    last = tensors[-1]
    return Comparison(
        float_model="big.onnx",
        quantized_model="big.a8w8.onnx",
        float_bytes=100_000_000,
        quantized_bytes=25_600_000,
        samples=8,
        data={"kind": "folder", "path": "/home/someone/private/images"},
        outputs=(OutputComparison(last.name, last.total, 0.975),),
        tensors=tuple(tensors),
        weights=tuple(weights),
        unmatched={},
        seconds={"load": 1.0, "total": 12.0},
    )


def level_of(sqnr_db: float) -> Difference:
    """An error of that size on a signal of power one."""
    return Difference(sqnr_db, 0.99, 10 ** (-sqnr_db / 10), 0.1)


def _tensor(
    label: str, index: int, count: int, level: float, sources: tuple[str, ...], dice: random.Random
) -> TensorComparison:
    return TensorComparison(
        name=f"{label}_output_0",
        quantized_name=f"{label}_output_0",
        place="input" if index == 0 else "output" if index == count - 1 else "inside",
        node="" if index == 0 else label,
        op="Input" if index == 0 else ("Conv", "Conv", "MatMul")[index % 3],
        nodes=() if index == 0 else (label,),
        sources=sources,
        weights=() if index == 0 else (f"{label}.weight",),
        shape=(1, 16, 28, 28),
        storage=_INT8,
        total=level_of(level - 5),
        introduced=level_of(level),
        inherited=level_of(level - 4),
        rounding=level_of(level + 3),
        saturated=0.001,
        range_use=0.7,
        float_low=-5.0,
        float_high=5.0,
        channel_axis=1,
        worst_channels=(ChannelError(3, 12.0, 0.2),),
        histogram=CoarseHistogram(-5.0, 5.0, tuple(dice.randint(0, 9999) for _ in range(64))),
    )


def _weight(name: str, level: float, channels: int, dice: random.Random) -> WeightComparison:
    ranges = tuple((-dice.random(), dice.random()) for _ in range(channels))
    return WeightComparison(
        name=name,
        float_name=name,
        node=name.removesuffix(".weight"),
        op="Conv",
        role="weight",
        shape=(channels, 16, 3, 3),
        storage=_INT8,
        error=level_of(level + 6),
        saturated=0.0,
        channel_axis=0,
        float_ranges=ranges,
        stored_ranges=ranges,
        worst_channels=(),
        rescaled=True,
    )
