"""Random small graphs, drawn by hypothesis or by a seeded generator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx

from helpers import build, node, normal

Shape = tuple[int, ...]
T = TypeVar("T")
UNARY = ("Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "Neg", "Softmax", "Transpose", "Reshape")
IMAGE_ONLY = ("Conv", "Depthwise", "MaxPool", "AveragePool", "GlobalAveragePool")


class Pick(Protocol):
    """One of several things."""

    def __call__(self, options: list[T]) -> T: ...


@dataclass
class Sketch:
    """A graph in the making: the tensors that exist so far, with their shapes."""

    tensors: dict[str, Shape]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    def add(self, op: str, inputs: list[str], shape: Shape, **attributes: Any) -> None:
        out = f"t{len(self.nodes)}"
        self.nodes.append(node(op, inputs, [out], name=f"{op}_{len(self.nodes)}", **attributes))
        self.tensors[out] = shape

    def constant(self, shape: Shape, *, reuse: bool) -> str:
        """A weight; with `reuse` one of the same shape that another node has already."""
        known = [name for name, a in self.constants.items() if np.shape(a) == shape and name[0] == "w"]
        if reuse and known:
            return known[0]
        name = f"w{len(self.constants)}"
        fan = max(1, int(np.prod(shape[1:])))
        self.constants[name] = normal(*shape, seed=len(self.constants), scale=fan**-0.5)
        return name

    def raw(self, content: Any) -> str:
        """A constant that is no weight: a shape or a bound."""
        name = f"k{len(self.constants)}"
        self.constants[name] = np.asarray(content)
        return name


def random_graph(pick: Pick) -> onnx.ModelProto:
    """One to eight nodes behind one or two images."""
    inputs = {"x": (1, 4, 6, 6)} | ({"z": (1, 4, 6, 6)} if pick([False, True]) else {})
    sketch = Sketch(dict(inputs))
    for _ in range(pick(list(range(1, 9)))):
        x = pick(list(sketch.tensors))
        image = len(sketch.tensors[x]) == 4
        kind = pick(["image", "image", "unary", "binary"] if image else ["flat", "unary", "binary"])
        if kind == "image":
            _image(pick, sketch, x, pick(list(IMAGE_ONLY)))
        elif kind == "flat":
            weight = sketch.constant((sketch.tensors[x][1], 4), reuse=pick([False, True]))
            bias = [sketch.constant((4,), reuse=pick([False, True]))] if pick([False, True]) else []
            sketch.add("Gemm", [x, weight, *bias], (1, 4))
        elif kind == "unary":
            _unary(pick, sketch, x, pick(list(UNARY)))
        else:
            _binary(pick, sketch, x)
    if not sketch.nodes:
        sketch.add("Relu", ["x"], inputs["x"])
    made = [out for n in sketch.nodes for out in n.output]
    read = {name for n in sketch.nodes for name in n.input}
    inner = {pick(made) for _ in range(pick([0, 1, 2]))}
    outputs = {name: sketch.tensors[name] for name in made if name not in read or name in inner}
    constants = {name: a for name, a in sketch.constants.items() if name in read}
    return build(sketch.nodes, inputs, outputs, constants)


def _image(pick: Pick, sketch: Sketch, x: str, op: str) -> None:
    n, c, h, w = sketch.tensors[x]
    if op in ("Conv", "Depthwise"):
        group = c if op == "Depthwise" else 1
        outs = c if group > 1 else pick([2, 4])
        reuse = pick([False, True])
        inputs = [x, sketch.constant((outs, c // group, 3, 3), reuse=reuse)]
        if pick([False, True]):
            inputs.append(sketch.constant((outs,), reuse=reuse))
        sketch.add("Conv", inputs, (n, outs, h, w), pads=[1, 1, 1, 1], group=group)
    elif op == "GlobalAveragePool":
        sketch.add(op, [x], (n, c, 1, 1))
    elif h >= 2:
        sketch.add(op, [x], (n, c, h // 2, w // 2), kernel_shape=[2, 2], strides=[2, 2])


def _unary(pick: Pick, sketch: Sketch, x: str, op: str) -> None:
    shape = sketch.tensors[x]
    if op == "Transpose":
        order = list(range(len(shape)))
        if len(order) == 4:
            order[2], order[3] = 3, 2
        sketch.add(op, [x], tuple(shape[i] for i in order), perm=order)
    elif op == "Reshape":
        flat = (shape[0], int(np.prod(shape[1:])))
        sketch.add(op, [x, sketch.raw(np.int64(flat))], flat)
    elif op == "Clip":
        low, high = pick([(0.0, 6.0), (-1.0, 1.0), (0.0, 1.0), (0.25, 2.0)])
        bounds = [sketch.raw(np.float32(low)), sketch.raw(np.float32(high))]
        sketch.add(op, [x, *bounds], shape)
    else:
        sketch.add(op, [x], shape)


def _binary(pick: Pick, sketch: Sketch, x: str) -> None:
    shape = sketch.tensors[x]
    op = pick(["Add", "Mul", "Concat"])
    second = pick([name for name, other in sketch.tensors.items() if other == shape])
    if op != "Concat" and pick([False, True]):
        second = sketch.constant((1,) * (len(shape) - 1) + shape[-1:], reuse=pick([False, True]))
    if op == "Concat":
        if shape[1] <= 8:
            sketch.add(op, [x, second], (shape[0], 2 * shape[1], *shape[2:]), axis=1)
    else:
        sketch.add(op, [x, second], shape)
