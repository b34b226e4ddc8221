"""One small model for each operator of the tables, and for each variant that is quantized differently.

A case says which tensors must be stored as integers. Graph inputs are x (and z), constants have the names
they get below, the output is y (and y1). `follows` puts a Conv in front: Relu and Clip are quantized only
behind a quantized tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from helpers import Feed, build, node, normal, rng

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Case:
    """A model around one operator.

    Args:
        op: operator type.
        variant: what is special about it.
        inputs: names of the node's inputs; an empty name is a missing one.
        feeds: shape of every graph input.
        constants: initializers.
        attributes: of the node.
        activations: tensors that must carry a Q/DQ pair.
        weights: constants that must be stored as integers.
        bias: the constant that must be int32 at the accumulator's scale.
        positive: feed values above 1/4 only.
        outputs: names of the node's outputs.
        follows: put a 1x1 Conv between x and the node.
        folds: the node vanishes, and the pair before it, where saturation does its work (fold_relu).
    """

    op: str
    variant: str
    inputs: str
    feeds: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    activations: str = "x y"
    weights: str = ""
    bias: str | None = None
    positive: bool = False
    outputs: str = "y"
    follows: bool = False
    folds: bool = False
    opset: int = 17
    domain: str = ""
    types: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For test ids."""
        return f"{self.op}-{self.variant}" if self.variant else self.op

    def model(self) -> onnx.ModelProto:
        """The float model."""
        names = ["" if word == "-" else word for word in self.inputs.split()]
        outputs = self.outputs.split()
        constants = dict(self.constants)
        nodes = [node(self.op, names, outputs, name=self.op, domain=self.domain, **self.attributes)]
        if self.follows:
            channels = self.feeds["x"][1]
            constants |= {"w": normal(channels, channels, 1, 1, seed=7)}
            nodes.insert(0, node("Conv", ["x", "w"], ["c"], name="front"))
        kinds = dict(self.types)
        return build(nodes, self.feeds, outputs, constants, opset=self.opset, types=kinds)

    def data(self, count: int = 4) -> list[Feed]:
        """Samples; integer inputs are small indices."""
        generator = rng(3)
        return [
            {name: self._values(generator, name, shape) for name, shape in self.feeds.items()}
            for _ in range(count)
        ]

    def _values(self, generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
        kind = self.types.get(name, TensorProto.FLOAT)
        if kind == TensorProto.INT64:
            return generator.integers(0, 4, shape, np.int64)
        if kind == TensorProto.BOOL:
            return generator.random(shape) < 0.5
        if kind == TensorProto.INT32:
            return generator.integers(0, 4, shape, np.int32)
        values = generator.normal(0, 1, shape)
        return np.asarray(np.abs(values) + 0.25 if self.positive else values, np.float32)


def _ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def _scalar(value: float) -> np.ndarray:
    return np.asarray(value, np.float32)


IMAGE = {"x": (2, 4, 8, 8)}
ROWS = {"x": (4, 16)}
PAIR = {"x": (2, 4, 6, 6), "z": (2, 4, 6, 6)}
CONV_W, CONV_B = normal(6, 4, 3, 3, seed=1, scale=0.3), normal(6, seed=2)

CONVOLUTIONS = (
    Case("Conv", "2d", "x w b", IMAGE, {"w": CONV_W, "b": CONV_B}, weights="w b", bias="b"),
    Case("Conv", "no-bias", "x w", IMAGE, {"w": CONV_W}, weights="w"),
    Case(
        "Conv",
        "1d",
        "x w b",
        {"x": (2, 4, 16)},
        {"w": normal(6, 4, 3, seed=1, scale=0.3), "b": CONV_B},
        weights="w b",
        bias="b",
    ),
    Case(
        "Conv",
        "3d",
        "x w b",
        {"x": (1, 2, 6, 6, 6)},
        {"w": normal(3, 2, 3, 3, 3, seed=1, scale=0.3), "b": normal(3, seed=2)},
        weights="w b",
        bias="b",
    ),
    Case(
        "Conv",
        "grouped",
        "x w b",
        IMAGE,
        {"w": normal(6, 2, 3, 3, seed=1, scale=0.3), "b": CONV_B},
        {"group": 2},
        weights="w b",
        bias="b",
    ),
    Case(
        "Conv",
        "depthwise",
        "x w b",
        IMAGE,
        {"w": normal(4, 1, 3, 3, seed=1), "b": normal(4, seed=2)},
        {"group": 4, "pads": [1, 1, 1, 1]},
        weights="w b",
        bias="b",
    ),
    Case(
        "Conv",
        "auto-pad",
        "x w b",
        IMAGE,
        {"w": CONV_W, "b": CONV_B},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        weights="w b",
        bias="b",
    ),
    Case("Conv", "computed-weight", "x z", {"x": (2, 4, 8, 8), "z": (6, 4, 3, 3)}, activations="x z y"),
    Case(
        "ConvTranspose",
        "",
        "x w b",
        IMAGE,
        {"w": normal(4, 6, 3, 3, seed=1, scale=0.3), "b": CONV_B},
        {"strides": [2, 2]},
        weights="w b",
        bias="b",
    ),
    Case(
        "ConvTranspose",
        "grouped",
        "x w b",
        IMAGE,
        {"w": normal(4, 3, 3, 3, seed=1, scale=0.3), "b": CONV_B},
        {"group": 2},
        weights="w b",
        bias="b",
    ),
    Case("ConvTranspose", "no-bias", "x w", IMAGE, {"w": normal(4, 3, 2, 2, seed=1)}, weights="w"),
)

GEMM_W, GEMM_B = normal(16, 8, seed=1, scale=0.3), normal(8, seed=2)
PRODUCTS = (
    Case("Gemm", "", "x w b", ROWS, {"w": GEMM_W, "b": GEMM_B}, weights="w b", bias="b"),
    Case("Gemm", "no-bias", "x w", ROWS, {"w": GEMM_W}, weights="w"),
    Case(
        "Gemm",
        "trans-b",
        "x w b",
        ROWS,
        {"w": GEMM_W.T.copy(), "b": GEMM_B},
        {"transB": 1},
        weights="w b",
        bias="b",
    ),
    Case(
        "Gemm",
        "trans-a",
        "x w b",
        {"x": (16, 4)},
        {"w": GEMM_W, "b": GEMM_B},
        {"transA": 1},
        weights="w b",
        bias="b",
    ),
    Case(
        "Gemm",
        "alpha-beta",
        "x w b",
        ROWS,
        {"w": GEMM_W, "b": GEMM_B},
        {"alpha": 0.5, "beta": 2.0},
        weights="w b",
        bias="b",
    ),
    Case("Gemm", "negative-alpha", "x w b", ROWS, {"w": GEMM_W, "b": GEMM_B}, {"alpha": -1.0}, weights="w b"),
    Case("Gemm", "zero-beta", "x w b", ROWS, {"w": GEMM_W, "b": GEMM_B}, {"beta": 0.0}, weights="w b"),
    Case("Gemm", "c-row", "x w b", ROWS, {"w": GEMM_W, "b": GEMM_B[None]}, weights="w b"),
    Case("Gemm", "c-scalar", "x w b", ROWS, {"w": GEMM_W, "b": _scalar(0.7)}, weights="w b"),
    Case("Gemm", "c-column", "x w b", ROWS, {"w": GEMM_W, "b": normal(4, 1, seed=2)}, weights="w b"),
    Case("Gemm", "c-matrix", "x w b", ROWS, {"w": GEMM_W, "b": normal(4, 8, seed=2)}, weights="w b"),
    Case(
        "Gemm",
        "computed-c",
        "x w z",
        {"x": (4, 16), "z": (4, 8)},
        {"w": GEMM_W},
        activations="x z y",
        weights="w",
    ),
    Case("MatMul", "constant", "x w", ROWS, {"w": GEMM_W}, weights="w"),
    Case("MatMul", "computed", "x z", {"x": (4, 16), "z": (16, 8)}, activations="x z y"),
    Case("MatMul", "3d", "x w", {"x": (2, 4, 16)}, {"w": normal(2, 16, 8, seed=1)}, weights="w"),
    Case("MatMul", "3d-computed", "x z", {"x": (2, 4, 16), "z": (2, 16, 8)}, activations="x z y"),
    Case("MatMul", "constant-left", "w x", {"x": (16, 8)}, {"w": normal(4, 16, seed=1)}, weights="w"),
    Case("MatMul", "vector", "x w", ROWS, {"w": normal(16, seed=1)}, weights="w"),
)

ELEMENTWISE = (
    *(Case(op, "", "x z", PAIR, activations="x z y") for op in ("Add", "Sub", "Mul", "Max", "Min")),
    Case("Div", "", "x z", PAIR, activations="x z y", positive=True),
    *(
        Case(op, "constant", "x c", {"x": (2, 4, 6, 6)}, {"c": normal(4, 1, 1, seed=5)}, weights="c")
        for op in ("Add", "Sub", "Mul", "Max", "Min")
    ),
    Case(
        "Div", "constant", "x c", {"x": (2, 4, 6, 6)}, {"c": np.abs(normal(4, 1, 1, seed=5)) + 1}, weights="c"
    ),
    Case("Add", "scalar", "x c", {"x": (2, 4, 6, 6)}, {"c": _scalar(0.75)}, weights="c"),
    Case("Add", "twice-the-same", "x x", {"x": (2, 4)}),
    Case("Max", "three", "x z c", PAIR, {"c": normal(6, seed=5)}, activations="x z y", weights="c"),
    Case(
        "Where", "", "m x z", {"m": (2, 4, 6, 6), **PAIR}, activations="x z y", types={"m": TensorProto.BOOL}
    ),
    Case(
        "Where",
        "constant",
        "m x c",
        {"m": (2, 4, 6, 6), "x": (2, 4, 6, 6)},
        {"c": _scalar(-2.0)},
        weights="c",
        types={"m": TensorProto.BOOL},
    ),
)

ACTIVATIONS = (
    *(Case(op, "", "x", ROWS) for op in ("Sigmoid", "Tanh", "Erf", "LeakyRelu", "Softmax")),
    Case("Gelu", "microsoft", "x", ROWS, domain=MICROSOFT),
    Case("Gelu", "opset-20", "x", ROWS, opset=20),
    Case("Softmax", "axis", "x", {"x": (2, 4, 6)}, attributes={"axis": 1}),
    Case("LeakyRelu", "alpha", "x", ROWS, attributes={"alpha": 0.2}),
    Case("HardSigmoid", "npu", "x", ROWS, attributes={"alpha": 1 / 6, "beta": 0.5}),
    Case("PRelu", "", "x s", IMAGE, {"s": np.abs(normal(4, 1, 1, seed=5)) * 0.2}, weights="s"),
    Case("Relu", "", "c", IMAGE, activations="x y", weights="w", follows=True, folds=True),
    Case(
        "Clip",
        "six",
        "c lo hi",
        IMAGE,
        {"lo": _scalar(0), "hi": _scalar(6)},
        activations="x y",
        weights="w",
        follows=True,
        folds=True,
    ),
    Case(
        "Clip",
        "symmetric",
        "c lo hi",
        IMAGE,
        {"lo": _scalar(-1), "hi": _scalar(1)},
        activations="x c y",
        weights="w",
        follows=True,
        folds=True,
    ),
    Case(
        "Clip",
        "min-only",
        "c lo",
        IMAGE,
        {"lo": _scalar(-0.5)},
        activations="x c y",
        weights="w",
        follows=True,
        folds=True,
    ),
    Case(
        "Clip",
        "max-only",
        "c - hi",
        IMAGE,
        {"hi": _scalar(0.5)},
        activations="x c y",
        weights="w",
        follows=True,
        folds=True,
    ),
    Case(
        "Clip",
        "above-zero",
        "c lo hi",
        IMAGE,
        {"lo": _scalar(0.5), "hi": _scalar(2)},
        activations="x c y",
        weights="w",
        follows=True,
    ),
    Case("Clip", "no-bounds", "c", IMAGE, activations="x c y", weights="w", follows=True, folds=True),
)

MOVERS = (
    Case("Reshape", "", "x shape", IMAGE, {"shape": _ints(2, -1)}),
    Case("Transpose", "", "x", IMAGE, attributes={"perm": [0, 2, 3, 1]}),
    Case("Squeeze", "", "x axes", {"x": (2, 1, 8)}, {"axes": _ints(1)}),
    Case("Unsqueeze", "", "x axes", ROWS, {"axes": _ints(1)}),
    Case("Resize", "nearest", "x - scales", IMAGE, {"scales": np.float32([1, 1, 2, 2])}),
    Case("Resize", "linear", "x - - sizes", IMAGE, {"sizes": _ints(2, 4, 12, 12)}, {"mode": "linear"}),
    Case("MaxPool", "", "x", IMAGE, attributes={"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case("Split", "", "x", IMAGE, attributes={"axis": 1}, activations="x y y1", outputs="y y1"),
    Case(
        "Split",
        "uneven",
        "x sizes",
        IMAGE,
        {"sizes": _ints(1, 3)},
        {"axis": 1},
        activations="x y y1",
        outputs="y y1",
    ),
    Case("Gather", "", "x i", IMAGE, {"i": _ints(0, 2)}, {"axis": 1}),
    Case(
        "Gather",
        "table",
        "t i",
        {"i": (2, 3)},
        {"t": normal(4, 8, seed=4)},
        activations="y",
        weights="t",
        types={"i": TensorProto.INT64},
    ),
    Case("Slice", "", "x starts ends axes", IMAGE, {"starts": _ints(1), "ends": _ints(7), "axes": _ints(2)}),
    Case("Pad", "constant", "x pads v", IMAGE, {"pads": _ints(0, 0, 1, 1, 0, 0, 1, 1), "v": _scalar(0.5)}),
    Case("Pad", "reflect", "x pads", IMAGE, {"pads": _ints(0, 0, 1, 1, 0, 0, 1, 1)}, {"mode": "reflect"}),
    Case("Concat", "", "x z", PAIR, attributes={"axis": 1}, activations="x z y"),
    Case(
        "Concat",
        "constant",
        "x c",
        {"x": (2, 4)},
        {"c": normal(2, 4, seed=5, scale=3.0)},
        {"axis": 0},
        weights="c",
    ),
    Case("DepthToSpace", "", "x", IMAGE, attributes={"blocksize": 2}),
    Case("SpaceToDepth", "", "x", IMAGE, attributes={"blocksize": 2}),
)

REDUCERS = (
    Case("AveragePool", "", "x", IMAGE, attributes={"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case("GlobalAveragePool", "", "x", {"x": (2, 4, 3, 3)}),
    Case("ReduceMean", "rows", "x", {"x": (4, 8)}, attributes={"axes": [1]}),
    Case("ReduceMean", "all", "x", {"x": (4, 8)}, attributes={"keepdims": 0}, positive=True),
    Case("ArgMax", "", "x", ROWS, attributes={"axis": 1}, activations="x", types={"y": TensorProto.INT64}),
    Case("LpNormalization", "", "x", ROWS),
    Case(
        "InstanceNormalization",
        "",
        "x s b",
        IMAGE,
        {"s": normal(4, seed=5) + 2, "b": normal(4, seed=6)},
        weights="s b",
        bias="b",
    ),
    Case(
        "LayerNormalization",
        "",
        "x s b",
        ROWS,
        {"s": normal(16, seed=5) + 2, "b": normal(16, seed=6)},
        weights="s b",
    ),
    Case("LayerNormalization", "no-bias", "x s", ROWS, {"s": normal(16, seed=5) + 2}, weights="s"),
    Case(
        "EmbedLayerNormalization",
        "",
        "i j wt pt st g b",
        {"i": (2, 4), "j": (2, 4)},
        {
            "wt": normal(8, 16, seed=1),
            "pt": normal(4, 16, seed=2),
            "st": normal(4, 16, seed=3),
            "g": normal(16, seed=5) + 2,
            "b": normal(16, seed=6),
        },
        {"epsilon": 1e-5},
        activations="y",
        weights="wt pt st g b",
        outputs="y mask",
        types={"i": TensorProto.INT32, "j": TensorProto.INT32, "mask": TensorProto.INT32},
        domain=MICROSOFT,
    ),
)

CASES = (*CONVOLUTIONS, *PRODUCTS, *ELEMENTWISE, *ACTIVATIONS, *MOVERS, *REDUCERS)
