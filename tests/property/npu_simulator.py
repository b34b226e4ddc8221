"""What the NPU's 8-bit engine computes for an XINT8 Q/DQ model: whole numbers and shifts, nothing else.

The interpreter reads a written ONNX file and knows nothing of the code that wrote it. A tensor behind a
DequantizeLinear is an array of integers at a position p, that is with scale 2**-p. Between Q/DQ pairs,
results are exact: products add positions, sums shift to the finer one. A QuantizeLinear shifts to its own
position, rounds half to even, adds the zero point and saturates. The divisions of average pools and of
HardSigmoid leave a denominator, which the gain behind the node must turn into a shift: k / 2**n.

ONNX Runtime computes the same file in float32. With each number goes a bound on how far float32 may be off:
zero while every intermediate result has at most 24 significant bits and no division by anything but a power
of two took place. Where the bound is not zero, it is the usual one for sums and products (n roundings of
2**-24 each, in any order). A code is *doubtful* when the exact number lies no farther from a tie than that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Integers = NDArray[np.int64]
Settle = Callable[[str, Integers, NDArray[np.bool_]], Integers]

_BITS = 24  # significant bits of a float32
_UNIT = 2.0**-_BITS  # relative error of one rounding
_WORD = 62  # bits that an int64 holds safely
_FAR = 40  # a shift by so many bits saturates, or leaves nothing, whatever the numerator


@dataclass(frozen=True, eq=False)
class Exact:
    """numerator / denominator * 2**-position; float32 is off by at most `doubt` steps of the numerator."""

    numerator: Integers
    position: int
    denominator: int = 1
    doubt: NDArray[np.float64] | float = 0.0

    def map(self, move: Callable[[NDArray[Any]], NDArray[Any]]) -> Exact:
        """The same numbers in other places."""
        doubt = np.broadcast_to(self.doubt, self.numerator.shape)
        return Exact(move(self.numerator), self.position, self.denominator, move(doubt))

    def at(self, position: int) -> Exact:
        """The same numbers at a finer position."""
        by = position - self.position
        return Exact(_shifted(self.numerator, by), position, self.denominator, self.doubt * 2.0**by)

    def divided(self, by: int) -> Exact:
        """A quotient; the powers of two in the denominator become a position."""
        twos = (by & -by).bit_length() - 1
        return Exact(self.numerator, self.position + twos, self.denominator * (by >> twos), self.doubt)

    def rounded(self, times: int = 1) -> Exact:
        """What float32 makes of it in so many operations: nothing where the number fits."""
        size = np.abs(self.numerator)
        fits = (size >> _BITS) < np.maximum(self.numerator & -self.numerator, 1)
        if self.denominator != 1:
            fits = np.zeros_like(fits)
        off = self.doubt + times * _UNIT * (size + self.doubt)
        return Exact(
            self.numerator,
            self.position,
            self.denominator,
            np.where(fits & (np.asarray(self.doubt) == 0), 0.0, off),
        )


def simulate(model: onnx.ModelProto, feed: Mapping[str, NDArray[Any]], settle: Settle) -> dict[str, Exact]:
    """Run the model; returns the graph outputs.

    Args:
        model: a Q/DQ model with power-of-two scales.
        feed: float32 inputs by name.
        settle: called with the output name of every QuantizeLinear, its codes, and where they are doubtful;
            returns the codes to go on with.
    """
    machine = _Machine(settle)
    for tensor in model.graph.initializer:
        machine.constants[tensor.name] = numpy_helper.to_array(tensor)
    machine.floats.update(feed)
    for node in model.graph.node:
        machine.step(node)
    return {value.name: machine.values[value.name] for value in model.graph.output}


@dataclass
class _Machine:
    settle: Settle
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    floats: dict[str, NDArray[Any]] = field(default_factory=dict)
    codes: dict[str, NDArray[Any]] = field(default_factory=dict)
    values: dict[str, Exact] = field(default_factory=dict)
    owed: set[str] = field(default_factory=set)  # quotients that wait for their gain
    uneven: set[str] = field(default_factory=set)  # means over windows that the padding makes smaller

    def step(self, node: onnx.NodeProto) -> None:
        if node.input[0] in self.owed:
            assert node.op_type == "Mul", (
                f"no gain between '{node.input[0]}' and {node.op_type} '{node.name}'"
            )
        if node.op_type == "Flatten" and node.input[0] in self.floats:  # of a graph input: not yet codes
            self.floats[node.output[0]] = self.floats[node.input[0]].reshape(1, -1)
        elif node.op_type == "QuantizeLinear":
            self.codes[node.output[0]] = self._quantize(node)
        elif node.op_type == "DequantizeLinear":
            self.values[node.output[0]] = self._dequantize(node)
        else:
            self.values[node.output[0]] = self._compute(node)

    def _quantize(self, node: onnx.NodeProto) -> NDArray[Any]:
        position, zero = self._scale(node)
        limits = np.iinfo(zero.dtype)
        source = node.input[0]
        if source in self.floats:
            # A product with a power of two is exact in float64, and rint rounds half to even.
            scaled = np.rint(np.ldexp(self.floats[source].astype(np.float64), position))
            codes, doubtful = scaled.clip(-(2**_FAR), 2**_FAR).astype(np.int64), np.zeros(scaled.shape, bool)
        else:
            codes, doubtful = _round(self.values[source], position)
        codes = np.clip(codes + int(zero), limits.min, limits.max)
        return self.settle(node.output[0], codes, doubtful).astype(zero.dtype)

    def _dequantize(self, node: onnx.NodeProto) -> Exact:
        position, zero = self._scale(node)
        name = node.input[0]
        codes = self.codes[name] if name in self.codes else self.constants[name]
        assert codes.dtype == zero.dtype
        return Exact(codes.astype(np.int64) - int(zero), position)

    def _scale(self, node: onnx.NodeProto) -> tuple[int, NDArray[Any]]:
        scale, zero = (self.constants[name] for name in node.input[1:3])
        assert scale.shape == zero.shape == ()
        mantissa, exponent = math.frexp(float(scale))
        assert mantissa == 0.5
        return 1 - exponent, zero

    def _compute(self, node: onnx.NodeProto) -> Exact:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        match node.op_type:
            case "Conv" | "ConvTranspose" | "Gemm":
                linear = {"Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm}[node.op_type]
                return _layer(linear, [self.values[name] for name in node.input], attributes)
            case "Add" | "Sub":
                return _add(*self._inputs(node), sign=1 if node.op_type == "Add" else -1)
            case "Mul":
                return self._mul(node)
            case "Concat":
                return _concat(self._inputs(node), attributes["axis"])
            case "PRelu":
                return _prelu(*self._inputs(node))
            case "MaxPool" | "AveragePool" | "GlobalAveragePool":
                return self._pool(node, attributes)
            case _:
                return self._unary(node, self.values[node.input[0]], attributes)

    def _unary(self, node: onnx.NodeProto, x: Exact, attributes: dict[str, Any]) -> Exact:
        rest: list[Any] = [self.constants[name] if name else None for name in node.input[1:]]
        match node.op_type:
            case "Relu":
                return _clip(x, Fraction(0), None)
            case "Clip":
                bounds = [None if a is None else Fraction(float(a)) for a in (*rest, None, None)]
                return _clip(x, bounds[0], bounds[1])
            case "LeakyRelu":
                return _leaky_relu(x, Fraction(attributes.get("alpha", 0.01)))
            case "HardSigmoid":
                assert attributes["alpha"] == float(np.float32(1 / 6))
                assert attributes.get("beta", 0.5) == 0.5
                self.owed.add(node.output[0])
                return _hard_sigmoid(x)
            case "Pad":
                return _pad(x, rest, attributes)
            case "Slice":
                return x.map(lambda a: a[_slices(a.ndim, rest)])
            case "Reshape":
                shape = [x.numerator.shape[i] if d == 0 else d for i, d in enumerate(rest[0].tolist())]
                return x.map(lambda a: a.reshape(shape))
            case "Flatten":
                axis = attributes.get("axis", 1)
                return x.map(lambda a: a.reshape(math.prod(a.shape[:axis]), -1))
            case "Transpose":
                return x.map(lambda a: a.transpose(attributes["perm"]))
        raise NotImplementedError(node.op_type)

    def _pool(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> Exact:
        x = self.values[node.input[0]]
        if node.op_type == "MaxPool":
            return _max_pool(x, attributes)
        kernel = attributes.get("kernel_shape", x.numerator.shape[2:])
        if any(attributes.get("pads", ())) and not attributes.get("count_include_pad", 0):
            self.uneven.add(node.output[0])
        made = _average_pool(x, attributes | {"kernel_shape": kernel})
        # The hardware's factors are for square kernels; a power of two needs none.
        if kernel[0] == kernel[1] and math.prod(kernel) & (math.prod(kernel) - 1):
            self.owed.add(node.output[0])
        return made

    def _inputs(self, node: onnx.NodeProto) -> list[Exact]:
        return [self.values[name] for name in node.input]

    def _mul(self, node: onnx.NodeProto) -> Exact:
        if node.input[1] in self.constants:
            gain = Fraction(float(self.constants[node.input[1]]))
            assert node.input[0] in self.owed
            assert abs(gain - 1) < Fraction(1, 32), f"{node.name}: {gain} corrects no rounding of k / 2**n"
            made = _gain(self.values[node.input[0]], gain)
            assert made.denominator == 1 or node.input[0] in self.uneven, f"{node.name} leaves a division"
            return made
        left, right = self._inputs(node)
        assert left.denominator == right.denominator == 1
        return Exact(left.numerator * right.numerator, left.position + right.position).rounded()


def _gain(x: Exact, gain: Fraction) -> Exact:
    """A division and the gain behind it are k / 2**n, with k and n recovered exactly."""
    factor, denominator = gain.numerator, x.denominator
    common = math.gcd(factor, denominator)
    made = Exact(x.numerator * (factor // common), x.position, 1, x.doubt * (factor // common))
    return made.divided(denominator // common * gain.denominator).rounded()


def _round(x: Exact, position: int) -> tuple[Integers, NDArray[np.bool_]]:
    """Half to even at the position, and where float32 may have come out on the other side of a tie."""
    by = x.position - position
    left, right = min(max(-by, 0), _FAR), min(max(by, 0), _FAR + 10)
    numerator, step = _shifted(x.numerator, left), x.denominator << right
    assert right == by or left or np.abs(numerator).max(initial=0) < step // 4
    doubt = np.broadcast_to(x.doubt, numerator.shape) * 2.0**left
    floor, rest = numerator // step, numerator % step
    up = (2 * rest > step) | ((2 * rest == step) & (floor % 2 == 1))
    distance = np.abs(2 * rest - step) / 2
    return floor + up, (doubt > 0) & (distance <= doubt)


def _shifted(numerator: Integers, by: int) -> Integers:
    """Left shift that cannot overflow unseen."""
    assert by >= 0
    assert int(np.abs(numerator).max(initial=0)).bit_length() + by <= _WORD
    return numerator << by


def _layer(
    linear: Callable[[Integers, Integers, dict[str, Any]], Integers],
    inputs: Sequence[Exact],
    attributes: dict[str, Any],
) -> Exact:
    """Products summed up, the bias shifted to the accumulator or the accumulator to the bias."""
    x, weight = inputs[0], inputs[1]
    total = Exact(linear(x.numerator, weight.numerator, attributes), x.position + weight.position)
    size = Exact(linear(np.abs(x.numerator), np.abs(weight.numerator), attributes), total.position)
    if len(inputs) > 2:
        bias = inputs[2].map(lambda b: b if linear is _gemm else b.reshape(-1, *[1] * (x.numerator.ndim - 2)))
        total, size = _add(total, bias), _add(size, Exact(np.abs(bias.numerator), bias.position))
    terms = weight.numerator.size // (1 if linear is _conv_transpose else total.numerator.shape[1])
    doubt = np.where(size.numerator < 1 << _BITS, 0.0, (terms + 2) * _UNIT * size.numerator)
    return Exact(total.numerator, total.position, 1, doubt)


def _gemm(x: Integers, weight: Integers, attributes: dict[str, Any]) -> Integers:
    assert attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
    left = x.T if attributes.get("transA", 0) else x
    return left @ (weight.T if attributes.get("transB", 0) else weight)


def _conv(x: Integers, weight: Integers, attributes: dict[str, Any]) -> Integers:
    group = attributes.get("group", 1)
    out, each = weight.shape[0] // group, weight.shape[1]
    total: Any = 0
    for offset, window in _windows(x, weight.shape[2:], attributes, 0):
        taps = weight[(slice(None), slice(None), *offset)]
        parts = [
            np.moveaxis(
                np.tensordot(
                    window[:, g * each : (g + 1) * each], taps[g * out : (g + 1) * out], axes=([1], [1])
                ),
                -1,
                1,
            )
            for g in range(group)
        ]
        total = total + np.concatenate(parts, 1)
    return np.asarray(total)


def _conv_transpose(x: Integers, weight: Integers, attributes: dict[str, Any]) -> Integers:
    assert attributes.get("auto_pad", b"NOTSET") == b"NOTSET"
    assert "output_shape" not in attributes
    kernel, ndim = weight.shape[2:], x.ndim - 2
    strides, dilations = (attributes.get(name, [1] * ndim) for name in ("strides", "dilations"))
    extra, pads = attributes.get("output_padding", [0] * ndim), attributes.get("pads", [0] * 2 * ndim)
    group = attributes.get("group", 1)
    each = x.shape[1] // group
    full = [
        (n - 1) * s + d * (k - 1) + 1
        for n, s, d, k in zip(x.shape[2:], strides, dilations, kernel, strict=True)
    ]
    sides = map(sum, zip(full, extra, strict=True))
    total = np.zeros((x.shape[0], weight.shape[1] * group, *sides), np.int64)
    for offset in itertools.product(*map(range, kernel)):
        places = tuple(
            slice(o * d, o * d + (n - 1) * s + 1, s)
            for o, d, n, s in zip(offset, dilations, x.shape[2:], strides, strict=True)
        )
        taps = weight[(slice(None), slice(None), *offset)]
        parts = [
            np.moveaxis(
                np.tensordot(
                    x[:, g * each : (g + 1) * each], taps[g * each : (g + 1) * each], axes=([1], [0])
                ),
                -1,
                1,
            )
            for g in range(group)
        ]
        total[(slice(None), slice(None), *places)] += np.concatenate(parts, 1)
    inner = tuple(
        slice(b, size - e) for b, e, size in zip(pads[:ndim], pads[ndim:], total.shape[2:], strict=True)
    )
    return total[(slice(None), slice(None), *inner)]


def _windows(
    x: Integers, kernel: Sequence[int], attributes: dict[str, Any], fill: int
) -> Iterator[tuple[tuple[int, ...], Integers]]:
    """For each place in the kernel, what every output position sees there."""
    assert attributes.get("auto_pad", b"NOTSET") == b"NOTSET"
    assert attributes.get("ceil_mode", 0) == 0
    ndim = len(kernel)
    strides, dilations = (attributes.get(name, [1] * ndim) for name in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * ndim)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(pads[:ndim], pads[ndim:], strict=True)], constant_values=fill)
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    last = [(n - r - 1) // s * s for n, r, s in zip(padded.shape[2:], reach, strides, strict=True)]
    for offset in itertools.product(*map(range, kernel)):
        places = tuple(
            slice(o * d, o * d + end + 1, s)
            for o, d, end, s in zip(offset, dilations, last, strides, strict=True)
        )
        yield offset, padded[(slice(None), slice(None), *places)]


def _add(left: Exact, right: Exact, sign: int = 1) -> Exact:
    assert left.denominator == right.denominator == 1
    finer = max(left.position, right.position)
    a, b = left.at(finer), right.at(finer)
    return Exact(a.numerator + sign * b.numerator, finer, 1, a.doubt + b.doubt).rounded()


def _concat(parts: Sequence[Exact], axis: int) -> Exact:
    assert len({part.position for part in parts}) == 1, "Concat of unequal positions"
    assert all(part.denominator == 1 and not np.any(part.doubt) for part in parts)
    return Exact(np.concatenate([part.numerator for part in parts], axis), parts[0].position)


def _clip(x: Exact, low: Fraction | None, high: Fraction | None) -> Exact:
    """Bounds are shifted to where they are whole numbers, and the tensor with them."""
    fractions = [bound.denominator.bit_length() - 1 for bound in (low, high) if bound]
    x = x.at(max([x.position, *fractions]))
    step = Fraction(2) ** x.position * x.denominator
    first, last = (None if bound is None else bound * step for bound in (low, high))
    assert all(bound is None or bound.denominator == 1 for bound in (first, last))
    ends = (None if bound is None else int(bound) for bound in (first, last))
    return Exact(np.clip(x.numerator, *ends), x.position, x.denominator, x.doubt)


def _hard_sigmoid(x: Exact) -> Exact:
    """clip(x + 3, 0, 6) / 6. Float32 computes x * alpha + 1/2, and rounds alpha, the product and the sum."""
    line = _add(x, Exact(np.array(3), 0))
    off = _UNIT * (2 * np.abs(line.numerator - (3 << line.position)) + 2 * np.abs(line.numerator))
    bent = (line.numerator >= -off) & (line.numerator <= (6 << line.position) + off)
    gate = _clip(line, Fraction(0), Fraction(6))
    return Exact(gate.numerator, gate.position, 1, np.where(bent, off, 0.0)).divided(6)


def _leaky_relu(x: Exact, slope: Fraction) -> Exact:
    assert 256 % slope.denominator == 0, f"slope {slope} is not a multiple of 1/256"
    factor = np.where(x.numerator < 0, int(slope * 256), 256)
    made = Exact(x.numerator * factor, x.position + 8, x.denominator, x.doubt * np.abs(factor))
    return made.rounded()


def _prelu(x: Exact, slope: Exact) -> Exact:
    slope = slope.at(max(slope.position, 0))
    factor = np.where(x.numerator < 0, slope.numerator, 1 << slope.position)
    made = Exact(x.numerator * factor, x.position + slope.position, x.denominator, x.doubt * np.abs(factor))
    return made.rounded()


def _max_pool(x: Exact, attributes: dict[str, Any]) -> Exact:
    lowest = int(np.iinfo(np.int64).min)
    windows = [w for _, w in _windows(x.numerator, attributes["kernel_shape"], attributes, lowest)]
    return Exact(np.max(windows, 0), x.position)


def _average_pool(x: Exact, attributes: dict[str, Any]) -> Exact:
    kernel = attributes["kernel_shape"]
    total = np.asarray(sum(w for _, w in _windows(x.numerator, kernel, attributes, 0)))
    count = np.full(total.shape, math.prod(kernel))
    if not attributes.get("count_include_pad", 0):
        inside = np.ones_like(x.numerator)
        count = np.asarray(sum(w for _, w in _windows(inside, kernel, attributes, 0)))
    return _mean(x, total, count)


def _mean(x: Exact, total: Integers, count: Integers) -> Exact:
    """Codes of 8 bits in windows of fewer than 2**16 sum up exactly; only the division is in doubt."""
    assert count.max() < 1 << (_BITS - 8)
    common = math.lcm(*np.unique(count).tolist())
    whole = total * (common // count)
    shift_only = (count & (count - 1)) == 0
    # Float32 divides, or multiplies with a rounded reciprocal.
    doubt = np.where(shift_only, 0.0, 3 * _UNIT * np.abs(whole))
    return Exact(whole, x.position, 1, doubt).divided(common)


def _pad(x: Exact, rest: Sequence[NDArray[Any] | None], attributes: dict[str, Any]) -> Exact:
    assert attributes.get("mode", b"constant") == b"constant"
    pads, filler, axes = [*rest, None, None][:3]
    assert pads is not None
    where = range(x.numerator.ndim) if axes is None else [int(a) % x.numerator.ndim for a in axes]
    widths = [(0, 0)] * x.numerator.ndim
    for axis, begin, end in zip(where, pads[: len(where)], pads[len(where) :], strict=True):
        widths[axis] = (int(begin), int(end))
    value = Fraction(0 if filler is None else float(filler)) * Fraction(2) ** x.position
    assert value.denominator == 1
    return x.map(lambda a: np.pad(a, widths, constant_values=int(value) if a.dtype.kind == "i" else 0))


def _slices(ndim: int, rest: Sequence[NDArray[Any] | None]) -> tuple[slice, ...]:
    starts, ends, axes, steps = [*rest, None, None][:4]
    assert starts is not None
    assert ends is not None
    where = range(len(starts)) if axes is None else axes.tolist()
    paces = [1] * len(starts) if steps is None else steps.tolist()
    chosen = [slice(None)] * ndim
    for axis, start, end, pace in zip(where, starts.tolist(), ends.tolist(), paces, strict=True):
        chosen[axis] = slice(start, end, pace)
    return tuple(chosen)
