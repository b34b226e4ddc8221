"""What each layer gives in the float model, at a few places of each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.data.kept import Kept, Spool
from roundel.improve.moments import parts_of
from roundel.model.edit import Names, add_constant
from roundel.model.graph import (
    attribute_int,
    clip_bounds,
    constant_array,
    only_reader,
    static_shape,
    values_by_name,
)
from roundel.model.layers import Layer
from roundel.model.session import Lanes, open_session
from roundel.passes import refresh_shapes
from roundel.targets.operators import Trait, ops_with
from roundel.types import Doubles, Sample

_ROWS, _MOST_ROWS = 10_000, 200  # places looked at in all samples, and in one
_ROWS_IN_PARTS = 2_560  # the same where only some of the inputs' products are kept
_GROUPED_WORK = 16_000  # the same x kernel size for a grouped layer: few weights need few rows
_MOST_BYTES = 1_000_000_000  # in a file beyond what the run may hold


@dataclass(frozen=True, slots=True, eq=False)
class SampledTargets:
    """One layer's output on one sample: the places looked at, and the values there.

    Attributes:
        places: flat positions.
        spatial: height, width … of the output.
        kept: values of all layers, one after the other.
        start, shape: where this layer's begin, and (places, groups, outputs per group).
    """

    places: NDArray[np.intp]
    spatial: tuple[int, ...]
    kept: Kept
    start: int
    shape: tuple[int, ...]

    @property
    def values(self) -> NDArray[np.float32]:
        """One row for each place."""
        return self.kept.get()[self.start : self.start + math.prod(self.shape)].reshape(self.shape)


def float_targets(
    model: ir.Model,
    layers: Sequence[Layer],
    samples: Sequence[Sample],
    *,
    seed: int = 0,
) -> list[list[SampledTargets]]:
    """For each layer what it should give, for each sample.

    The places are drawn from the seed and the sample's number alone, so the result does not depend on
    how many threads take part.
    """
    lanes = Lanes.of(model, len(samples))
    looked = _Looked(model, layers, samples, seed, lanes.threads)
    found = list(lanes.each(looked.at, range(len(samples))))
    return [list(column) for column in zip(*found, strict=True)]


class _Looked:
    """The float model, of which only the places that are looked at come out."""

    def __init__(
        self,
        model: ir.Model,
        layers: Sequence[Layer],
        samples: Sequence[Sample],
        seed: int,
        threads: int,
    ) -> None:
        self._layers, self._samples, self._seed, self._spool = layers, samples, seed, Spool()
        watched = model.clone()
        _fix_shapes(watched, samples)
        values = values_by_name(watched.graph)
        wanted = [_rows(layer, _inputs_of(layer, watched.graph), len(samples)) for layer in layers]
        names = Names(watched.graph)
        self._taps = [_tap(watched.graph, layer, values[layer.output], names) for layer in layers]
        share = _share(layers, self._taps, wanted, len(samples))
        self._rows = [max(1, int(count * share)) for count in wanted]
        self._session = open_session(watched, threads=threads)

    def at(self, index: int) -> list[SampledTargets]:
        """Every layer's on one sample."""
        rng = np.random.default_rng([self._seed, index])
        each = list(zip(self._layers, self._taps, self._rows, strict=True))
        places = {tap: layer.places(tap.shape, most, rng) for layer, tap, most in each if tap.shape}
        feeds = {tap.index: at for tap, at in places.items()}
        outputs = self._session.run([tap.output for tap in self._taps], {**self._samples[index], **feeds})
        found: list[tuple[NDArray[np.intp], tuple[int, ...], NDArray[np.float32]]] = []
        for (layer, tap, most), out in zip(each, outputs, strict=True):
            if tap in places:
                at, shape = places[tap], tap.shape or ()
                values = (out.T if layer.kernel else out).reshape(len(at), layer.groups, -1)
            else:
                at, shape = layer.places(out.shape, most, rng), out.shape
                values = layer.targets(out, at)
            found.append((at, shape[2:] if layer.kernel else (), values))
        # One array a sample: thousands of small ones would lie between what the session has freed.
        flat = np.concatenate([values.reshape(-1) for _, _, values in found]).astype(np.float32, copy=False)
        whole, start, result = self._spool.keep(flat), 0, []
        for at, spatial, values in found:
            result.append(SampledTargets(at, spatial, whole, start, values.shape))
            start += values.size
        return result


def _fix_shapes(model: ir.Model, samples: Sequence[Sample]) -> None:
    """With the shapes of the samples, where all have the same."""
    first = {name: array.shape for name, array in samples[0].items()}
    if any(array.shape != first[name] for sample in samples for name, array in sample.items()):
        return
    for value in model.graph.inputs:
        if value.name in first and static_shape(value) is None:
            value.shape = ir.Shape(first[value.name])
    refresh_shapes(model)


@dataclass(frozen=True, slots=True)
class _Tap:
    """Where a layer's output is looked at.

    Attributes:
        output: what to ask the session for.
        index: the input that takes the places; they come out as columns of an image, rows of a matrix.
        shape: of the layer's output; None where the output comes whole.
    """

    output: str
    index: str = ""
    shape: tuple[int, ...] | None = None


def _tap(graph: ir.Graph, layer: Layer, value: ir.Value, names: Names) -> _Tap:
    """Let out only the places that are looked at: all outputs of a large network together do not fit."""
    shape = static_shape(value)
    if shape is None or (layer.kernel and shape[0] != 1):
        if not value.is_graph_output():
            graph.outputs.append(value)
        return _Tap(layer.output)
    index = ir.Value(
        name=names(f"{layer.output}_places"), shape=ir.Shape((None,)), type=ir.TensorType(ir.DataType.INT64)
    )
    graph.inputs.append(index)
    flat = np.array([shape[1], -1] if layer.kernel else [-1, shape[-1]], np.int64)
    target = add_constant(graph, names(f"{layer.output}_flat"), flat)
    lines = ir.Value(name=names(f"{layer.output}_lines"), type=value.type)
    seen = ir.Value(name=names(f"{layer.output}_seen"), type=value.type)
    axis = ir.AttrInt64("axis", 1 if layer.kernel else 0)
    producer = value.producer()
    assert producer is not None
    cut = ir.Node("", "Reshape", [value, target], outputs=[lines], name=str(lines.name))
    graph.insert_after(
        producer, [cut, ir.Node("", "Gather", [lines, index], [axis], outputs=[seen], name=str(seen.name))]
    )
    graph.outputs.append(seen)
    return _Tap(str(seen.name), str(index.name), shape)


def visible_ranges(graph: ir.Graph) -> dict[str, tuple[float, float]]:
    """The range in which a tensor's values still matter, where a Relu or Clip alone reads it."""
    found = {}
    for node in graph:
        value = node.inputs[0] if node.op_type in ("Relu", "Clip") else None
        if value is None or only_reader(value) is not node:
            continue
        low, high = (0.0, None) if node.op_type == "Relu" else clip_bounds(node) or (None, None)
        found[str(value.name)] = (-math.inf if low is None else low, math.inf if high is None else high)
    return found


def _inputs_of(layer: Layer, graph: ir.Graph) -> int:
    """Inputs of each output."""
    weight = constant_array(graph.initializers[layer.weight])
    assert weight is not None
    return int(layer.matrix(weight).shape[2])


def _rows(layer: Layer, size: int, samples: int) -> int:
    """Places of each sample that are worth looking at."""
    if layer.groups > 1:
        return max(1, _GROUPED_WORK // size // samples)
    return min(_MOST_ROWS, -(-(_ROWS if parts_of(size) == 1 else _ROWS_IN_PARTS) // samples))


def rows_of(samples: int) -> int:
    """Places that are looked at in a layer without groups, in all samples together."""
    return samples * min(_MOST_ROWS, -(-_ROWS // max(samples, 1)))


def _share(layers: Sequence[Layer], taps: Sequence[_Tap], rows: Sequence[int], samples: int) -> float:
    """The share of these rows that is worth its room."""
    total = 0
    for layer, tap, most in zip(layers, taps, rows, strict=True):
        if tap.shape is not None:
            channels = tap.shape[1] if layer.kernel else tap.shape[-1]
            total += min(most, math.prod(tap.shape) // max(channels, 1)) * channels * 4 * samples
    return min(1.0, _MOST_BYTES / max(total, 1))


_SAME = ops_with(Trait.CHANNELWISE)


def importance(graph: ir.Graph) -> dict[str, Doubles]:
    """Importance of the channels of every tensor that it is known for; relative within a tensor, mean 1."""
    known: dict[str, Doubles | None] = {}
    for value in graph.outputs:
        known[str(value.name)] = _even(value)
    for node in reversed(graph):
        _pass_back(node, known)
    return {name: array for name, array in known.items() if array is not None}


def _pass_back(node: ir.Node, known: dict[str, Doubles | None]) -> None:
    given = known.get(str(node.outputs[0].name)) if node.outputs else None
    for index, value in enumerate(node.inputs):
        if value is None or value.const_value is not None:
            continue
        name = str(value.name)
        part = None if given is None else _share_of(node, index, value, given)
        before = known.get(name, part)
        if name in known and before is not None and part is not None and before.size == part.size:
            part = _levelled(before + part)
        elif name in known:
            part = None  # read by something whose share is not known
        known[name] = part


def _share_of(node: ir.Node, index: int, value: ir.Value, given: Doubles) -> Doubles | None:
    """What one input has of the output's importance; None where that cannot be told."""
    channels = _channels(value)
    if node.op_type == "Conv" and index == 0:
        weight = constant_array(node.inputs[1])
        # The channels of a 1-d Conv are not where those of three axes are looked for: its share is not known.
        if weight is None or len(weight) != given.size:
            return None
        return _levelled(_through_conv(weight, given, node))
    if node.op_type in ("Gemm", "MatMul") and index == 0 and not attribute_int(node, "transA", 0):
        weight = constant_array(node.inputs[1])
        if weight is None or weight.ndim != 2:
            return None
        matrix = weight if node.op_type == "Gemm" and attribute_int(node, "transB", 0) else weight.T
        if len(matrix) != given.size:
            return None
        return _levelled(given @ np.square(matrix, dtype=np.float64))
    if node.op_type in _SAME and channels == given.size:
        return given
    return None


def _through_conv(weight: NDArray[Any], given: Doubles, node: ir.Node) -> Doubles:
    groups = attribute_int(node, "group", 1)
    energy = np.square(weight.astype(np.float64)).reshape(*weight.shape[:2], -1).sum(-1)
    split = energy.reshape(groups, -1, weight.shape[1])
    return np.asarray(np.einsum("go,goc->gc", given.reshape(groups, -1), split), np.float64).reshape(-1)


def _even(value: ir.Value) -> Doubles | None:
    channels = _channels(value)
    return None if channels is None else np.ones(channels)


def _channels(value: ir.Value) -> int | None:
    """Axis 1 of images, the last of everything else."""
    shape = static_shape(value)
    if shape is None:
        dims = None if value.shape is None else list(value.shape)
        if dims is None or len(dims) < 2:
            return None
        size = dims[1] if len(dims) > 3 else dims[-1]
        return size if isinstance(size, int) else None
    if len(shape) < 2:
        return None
    return int(shape[1] if len(shape) > 3 else shape[-1])


def _levelled(array: Doubles) -> Doubles | None:
    mean = float(array.mean())
    return array / mean if mean > 0 and np.isfinite(mean) else None
