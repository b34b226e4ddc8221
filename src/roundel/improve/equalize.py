"""Factors for the channels between layers, so that every channel uses its layers' ranges alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.improve.channel_rules import Trace
from roundel.improve.channels import Ids, Rescaled, Settled
from roundel.model.edit import Editor
from roundel.recipe.settings import Equalize
from roundel.types import Doubles

_LIMIT = 2.0**16  # no channel is scaled further than this
_BIAS_SHARE = 0.5  # a bias of 32 bits only widens the activation: it counts half
_NARROW_BIAS_SHARE = 1.0  # beside power-of-two scales a bias has 8 bits, and needs them as weights do
_ALIGNMENTS = 2.0 ** (np.arange(-16, 16) / 32)
_TOP = 127  # the largest code of a symmetric 8-bit weight


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The channels that a layer has in one space.

    Attributes:
        layer: which one, as its number.
        produces: whether they are its outputs (rows) or its inputs (columns).
        places: their positions in the layer.
        local: their numbers in the space.
    """

    layer: int
    produces: bool
    places: Ids
    local: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Channels that can be rescaled together, and every layer around them."""

    most: Doubles
    sides: tuple[Side, ...]
    whole: bool


def find_spaces(trace: Trace) -> list[Space]:
    """The spaces with a channel that may change, in graph order."""
    settled = trace.channels.settle()
    members: dict[int, list[tuple[int, bool, Ids]]] = {}
    for number, (given, made) in enumerate(trace.sides):
        for ids, produces in ((made, True), (given, False)):
            if ids is None:
                continue
            for space in np.unique(settled.spaces[ids]).tolist():
                members.setdefault(space, []).append((number, produces, ids))
    found = []
    for space in sorted(members):
        whole = _space(settled, space, members[space])
        if whole is not None:
            found.append(whole)
    return found


def _space(settled: Settled, number: int, members: list[tuple[int, bool, Ids]]) -> Space | None:
    free = [np.flatnonzero((settled.spaces[ids] == number) & ~settled.fixed[ids]) for _, _, ids in members]
    own = [settled.roots[ids][places] for (_, _, ids), places in zip(members, free, strict=True)]
    roots = np.unique(np.concatenate(own))
    if not roots.size:
        return None
    sides, whole = [], True
    for (layer, produces, ids), places, mine in zip(members, free, own, strict=True):
        sides.append(Side(layer, produces, places, np.searchsorted(roots, mine)))
        whole = whole and places.size == ids.size
    return Space(settled.most[roots], tuple(sides), whole)


class Balance:
    """Finds the factors, round by round; each round goes once over all spaces."""

    def __init__(
        self, layers: list[Rescaled], spaces: list[Space], options: Equalize, *, power_of_two: bool
    ) -> None:
        self.layers, self.spaces, self.options = layers, spaces, options
        self.power_of_two = power_of_two
        self.factors = [np.ones(len(space.most)) for space in spaces]
        around = {side.layer for space in spaces for side in space.sides}
        self.magnitudes = {number: layers[number].magnitudes() for number in sorted(around)}
        self.biases = {n: np.abs(layers[n].bias).reshape(-1, len(layers[n].rows)).max(axis=0) for n in around}

    def run(self) -> int:
        """Rounds until nothing changes any more; returns how many."""
        if not self.spaces:
            return 0
        for done in range(1, self.options.steps + 1):
            change = max(self._settle(number) for number in range(len(self.spaces)))
            if change < self.options.threshold:
                return done
        return self.options.steps

    def align(self) -> None:
        """One factor for each whole space, so that its layers end just below a power of two."""
        for number, space in enumerate(self.spaces if self.power_of_two else ()):
            room = float((space.most / self.factors[number]).min())
            if not space.whole or room < 1:
                continue
            tops = [(side.produces, self._top(side.layer)) for side in space.sides]
            tops = [(produces, top) for produces, top in tops if top > 0]
            costs = [(_waste(tops, f), abs(math.log2(f)), f) for f in _ALIGNMENTS.tolist() if f <= room]
            self._apply(number, np.full(len(space.most), min(costs)[2]))

    def write(self) -> None:
        """Put the factors into the layers."""
        for space, factors in zip(self.spaces, self.factors, strict=True):
            for side in space.sides:
                layer, scale = self.layers[side.layer], factors[side.local]
                if side.produces:
                    layer.rows[side.places] *= scale
                    layer.bias[..., side.places] *= scale
                else:
                    layer.columns[side.places] /= scale

    def _settle(self, number: int) -> float:
        """Balance one space; returns the largest relative change."""
        space, total = self.spaces[number], self.factors[number]
        made, read = np.zeros(len(total)), np.zeros(len(total))
        for side in space.sides:
            for ranges in self._ranges(side):
                np.maximum.at(made if side.produces else read, side.local, ranges[side.places])
        known = (made > 0) & (read > 0)
        step = np.ones(len(total))
        step[known] = np.sqrt(read[known] / made[known])
        wanted = np.minimum(np.clip(total * step, 1 / _LIMIT, _LIMIT), np.maximum(space.most, 0))
        step = np.where(known, wanted / total, 1.0)
        self._apply(number, step)
        return float(np.abs(step - 1).max())

    def _ranges(self, side: Side) -> Iterable[Doubles]:
        """Each channel's range in the layer's weight, relative to the whole; and in its bias."""
        magnitudes = self.magnitudes[side.layer]
        weights = magnitudes.max(axis=2 if side.produces else 1).reshape(-1)
        if not weights.any():
            return
        yield weights / weights.max()
        bias = self.biases[side.layer]
        if side.produces and self.options.append_bias and bias.any():
            share = _NARROW_BIAS_SHARE if self.power_of_two else _BIAS_SHARE
            yield np.where(weights > 0, bias / bias.max() * share, 0.0)

    def _apply(self, number: int, step: Doubles) -> None:
        self.factors[number] *= step
        for side in self.spaces[number].sides:
            magnitudes = self.magnitudes[side.layer]
            groups, outputs, inputs = magnitudes.shape
            scale = np.ones(groups * (outputs if side.produces else inputs))
            scale[side.places] = step[side.local]
            if side.produces:
                magnitudes *= scale.reshape(groups, outputs, 1)
                self.biases[side.layer] *= scale
            else:
                magnitudes /= scale.reshape(groups, 1, inputs)

    def _top(self, layer: int) -> float:
        return float(self.magnitudes[layer].max())


def _waste(tops: list[tuple[bool, float]], factor: float) -> float:
    """How far the largest weights stay below the top of their power-of-two ranges, as noise."""
    total = 0.0
    for produces, top in tops:
        exponent = math.log2(top * (factor if produces else 1 / factor) / _TOP)
        total += 4.0 ** (math.ceil(exponent) - exponent)
    return total


@dataclass(frozen=True, slots=True)
class EqualizeReport:
    """What equalization did.

    Attributes:
        spaces: sets of tied channels that were rescaled.
        channels: channels that got a factor of their own.
        silenced: channels that are constant whatever the input, taken out of their layers.
        absorbed: channels whose constant part moved into the biases behind.
        rounds: how often all spaces were visited.
        layers: the names of those that changed.
    """

    spaces: int
    channels: int
    silenced: int
    absorbed: int
    rounds: int
    layers: tuple[str, ...]


def equalize(model: ir.Model, options: Equalize, *, power_of_two: bool) -> EqualizeReport:
    """Rescale channels between layers, in place, so that one scale suits each whole weight.

    The model computes what it did before, for every input, up to the rounding of float32.

    Args:
        model: prepared: batch norms folded, shapes known.
        options: rounds, threshold, and what counts.
        power_of_two: whether weight scales will be powers of two.
    """
    trace, editor = Trace(model.graph, absorb=True), Editor(model)
    balance = Balance(trace.layers, find_spaces(trace), options, power_of_two=power_of_two)
    rounds = balance.run()
    balance.align()
    balance.write()
    return EqualizeReport(
        spaces=sum(bool(np.any(f != 1)) for f in balance.factors),
        channels=sum(int(np.count_nonzero(f != 1)) for f in balance.factors),
        silenced=trace.silenced,
        absorbed=trace.absorbed,
        rounds=rounds,
        layers=tuple(rescaled.layer.name for rescaled in trace.layers if rescaled.store(editor)),
    )
