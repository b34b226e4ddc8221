"""Random small networks compute the same before and after equalization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equalize_cases import check_equalized
from helpers import build, node
from roundel.improve.equalize import equalize
from roundel.passes.shapes import refresh_shapes
from roundel.recipe.settings import Equalize

SIZE = 6


@dataclass
class Sketch:
    """A network under construction; every value is [1, channels, SIZE, SIZE]."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=lambda: {"x": 4})

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array, np.float32)
        return name

    def weight(self, *shape: int) -> str:
        """Rows and columns of very different sizes, a few of them zero."""
        array = self.rng.normal(0, 1, shape)
        for axis in range(min(2, len(shape))):
            factors = 2.0 ** self.rng.uniform(-5, 3, shape[axis]) * (self.rng.random(shape[axis]) > 0.05)
            array *= factors.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        return self.constant(array)

    def add(self, op: str, inputs: list[str], channels: int, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(node(op, inputs, [name], **attributes))
        self.channels[name] = channels
        return name

    def conv(self, source: str, outputs: int, groups: int, kernel: int) -> str:
        shape = (outputs, self.channels[source] // groups, kernel, kernel)
        inputs = [source, self.weight(*shape)]
        if self.rng.random() < 0.7:
            inputs.append(self.constant(self.rng.normal(0, 1, outputs) * 3))
        pads = {"pads": [kernel // 2] * 4} if kernel > 1 else {}
        return self.add("Conv", inputs, outputs, group=groups, **pads)


def layer(draw: Any, sketch: Sketch, source: str) -> None:
    size = sketch.channels[source]
    groups = draw(st.sampled_from(sorted({1, 2, size})))
    outputs = size * draw(st.sampled_from([1, 2])) if groups == size else draw(st.sampled_from([2, 4]))
    groups = groups if outputs % groups == 0 and size % groups == 0 else 1
    if draw(st.integers(0, 5)) == 0:
        weight = sketch.weight(size, outputs // groups, 3, 3)
        sketch.add("ConvTranspose", [source, weight], outputs, group=groups, pads=[1] * 4)
    else:
        sketch.conv(source, outputs, groups, draw(st.sampled_from([1, 3])))


def activation(draw: Any, sketch: Sketch, source: str) -> None:
    size = sketch.channels[source]
    op = draw(st.sampled_from(["Relu", "Clip", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "Tanh"]))
    inputs, attributes = [source], {}
    if op == "Clip":
        low = draw(st.sampled_from([0.0, 0.0, 0.0, -2.0, 0.5, None]))
        high = draw(st.sampled_from([6.0, 1.0, 100.0]))
        inputs += ["" if low is None else sketch.constant(low), sketch.constant(high)]
    elif op == "PRelu":
        inputs.append(sketch.constant(sketch.rng.normal(0, 1, (size, 1, 1))))
    elif op == "LeakyRelu":
        attributes["alpha"] = 0.3
    sketch.add(op, inputs, size, **attributes)


def pool(draw: Any, sketch: Sketch, source: str) -> None:
    op = draw(st.sampled_from(["MaxPool", "AveragePool"]))
    extra = {"count_include_pad": draw(st.integers(0, 1))} if op == "AveragePool" else {}
    sketch.add(op, [source], sketch.channels[source], kernel_shape=[3, 3], pads=[1] * 4, **extra)


def join(draw: Any, sketch: Sketch, source: str) -> None:
    size = sketch.channels[source]
    partner = draw(st.sampled_from([name for name, c in sketch.channels.items() if c == size]))
    op = draw(st.sampled_from(["Add", "Add", "Concat", "Mul"]))
    if op == "Concat":
        sketch.add(op, [source, partner], 2 * size, axis=1)
    else:
        sketch.add(op, [source, partner], size)


def gate(draw: Any, sketch: Sketch, source: str) -> None:
    size = sketch.channels[source]
    known = dict(sketch.channels)
    pooled = sketch.add("GlobalAveragePool", [source], size)
    inner = sketch.add("Relu", [sketch.conv(pooled, 2, 1, 1)], 2)
    strength = sketch.add("HardSigmoid", [sketch.conv(inner, size, 1, 1)], size)
    sketch.channels = known  # what is inside is [1, channels, 1, 1]: nothing for others
    sketch.add("Mul", [source, strength] if draw(st.booleans()) else [strength, source], size)


@st.composite
def networks(draw: Any) -> onnx.ModelProto:
    sketch = Sketch(np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
    steps = [layer, layer, activation, activation, pool, join, gate]
    for _ in range(draw(st.integers(3, 12))):
        recent = [name for name, size in sketch.channels.items() if size <= 16][-3:]
        draw(st.sampled_from(steps))(draw, sketch, draw(st.sampled_from(recent)))
    last = sketch.conv(next(reversed(sketch.channels)), 3, 1, 1)
    outputs = {last}
    if draw(st.integers(0, 3)) == 0:
        outputs.add(draw(st.sampled_from([name for name in sketch.channels if name != "x"])))
    return build(sketch.nodes, {"x": (1, 4, SIZE, SIZE)}, sorted(outputs), sketch.constants)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.booleans(), st.integers(0, 2**32 - 1))
def test_random_networks_stay_equal(proto: onnx.ModelProto, power_of_two: bool, seed: int) -> None:
    before = ir.from_proto(proto)
    refresh_shapes(before)
    after = before.clone()
    equalize(after, Equalize(), power_of_two=power_of_two)
    rng = np.random.default_rng(seed)
    shape = (1, 4, SIZE, SIZE)
    samples = [{"x": rng.normal(0, scale, shape).astype(np.float32)} for scale in (0.1, 1, 100)]
    assert check_equalized(before, after, samples) < 1e-4
