"""Small transformers as exporters write them, with the outlier channels of large ones."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from helpers import Feed, build, node, normal, rng

TOKENS, WIDTH, HEADS, INNER, VOCAB = 6, 24, 3, 40, 30
OUTLIERS = (3, 17)  # of the stream
SPIKES = (5, 11)  # of the norms' scales, in `spiky` models; the layers behind them have small weights there

Kind = Literal["layer", "rms", "rms spelled out"]


class Transformer:
    """Nodes and constants of a transformer, built from top to bottom."""

    def __init__(
        self,
        kind: Kind,
        *,
        post: bool = False,
        gated: bool = False,
        biases: bool = True,
        spiky: bool = False,
    ) -> None:
        self.kind, self.post, self.gated, self.biases, self.spiky = kind, post, gated, biases, spiky
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self.norms: set[str] = set()
        self._seed = 0

    def constant(self, name: str, array: Any) -> str:
        self.constants[name] = np.asarray(array)
        return name

    def random(self, name: str, *shape: int, scale: float = 1.0) -> str:
        self._seed += 1
        return self.constant(name, normal(*shape, seed=self._seed, scale=scale))

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(node(op, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def linear(self, value: str, name: str, inputs: int, outputs: int) -> str:
        weight = self.random(f"{name}.weight", inputs, outputs, scale=inputs**-0.5)
        if self.spiky and value in self.norms:
            self.constants[weight][SPIKES, :] /= 40
        product = self.add("MatMul", [value, weight], f"{name}.product")
        if not self.biases or name == "head":
            return product
        return self.add("Add", [self.random(f"{name}.bias", outputs), product], name)

    def norm(self, value: str, name: str) -> str:
        self.norms.add(name)
        spread = np.exp(normal(WIDTH, seed=len(self.nodes), scale=0.6))
        if self.spiky:
            spread[SPIKES,] *= 40
        gamma = self.constant(f"{name}.gamma", spread)
        if self.kind == "layer":
            beta = self.random(f"{name}.beta", WIDTH)
            return self.add("LayerNormalization", [value, gamma, beta], name, axis=-1)
        if self.kind == "rms":
            return self.add("RMSNormalization", [value, gamma], name, axis=-1)
        square = self.add("Mul", [value, value], f"{name}.square")
        mean = self.add("ReduceMean", [square], f"{name}.mean", axes=[-1])
        padded = self.add("Add", [mean, self.constant("tiny", np.float32(1e-5))], f"{name}.padded")
        root = self.add("Sqrt", [padded], f"{name}.root")
        inverse = self.add("Reciprocal", [root], f"{name}.inverse")
        scaled = self.add("Mul", [value, inverse], f"{name}.scaled")
        return self.add("Mul", [gamma, scaled], name)

    def heads(self, value: str, name: str, order: list[int]) -> str:
        shape = self.constant("split", np.int64([1, TOKENS, HEADS, WIDTH // HEADS]))
        split = self.add("Reshape", [value, shape], f"{name}.split")
        return self.add("Transpose", [split], f"{name}.heads", perm=order)

    def attention(self, value: str, name: str) -> str:
        query, key, vector = (self.linear(value, f"{name}.{part}", WIDTH, WIDTH) for part in "qkv")
        left = self.heads(query, f"{name}.q", [0, 2, 1, 3])
        right = self.heads(key, f"{name}.k", [0, 2, 3, 1])
        scores = self.add("MatMul", [left, right], f"{name}.scores")
        shares = self.add("Softmax", [scores], f"{name}.shares", axis=-1)
        mixed = self.add("MatMul", [shares, self.heads(vector, f"{name}.v", [0, 2, 1, 3])], f"{name}.mixed")
        back = self.add("Transpose", [mixed], f"{name}.back", perm=[0, 2, 1, 3])
        shape = self.constant("join", np.int64([1, TOKENS, WIDTH]))
        joined = self.add("Reshape", [back, shape], f"{name}.joined")
        return self.linear(joined, f"{name}.o", WIDTH, WIDTH)

    def network(self, value: str, name: str) -> str:
        up = self.linear(value, f"{name}.up", WIDTH, INNER)
        if self.gated:
            gate = self.linear(value, f"{name}.gate", WIDTH, INNER)
            inner = self.add("Mul", [self.add("Sigmoid", [gate], f"{name}.open"), up], f"{name}.inner")
        else:
            inner = self.add("Relu", [up], f"{name}.inner")
        return self.linear(inner, f"{name}.down", INNER, WIDTH)

    def block(self, value: str, name: str) -> str:
        for part, work in (("attention", self.attention), ("network", self.network)):
            place = f"{name}.{part}"
            if self.post:
                summed = self.add("Add", [value, work(value, place)], f"{place}.sum")
                value = self.norm(summed, f"{place}.norm")
            else:
                normed = self.norm(value, f"{place}.norm")
                value = self.add("Add", [value, work(normed, place)], f"{place}.sum")
        return value


def transformer(
    kind: Kind = "layer",
    *,
    blocks: int = 2,
    head: bool = True,
    shown: str | None = None,
    **options: Any,
) -> onnx.ModelProto:
    """Tokens in; scores out, or the last norm's result without a head. `shown` is one more output."""
    t = Transformer(kind, **options)
    table = normal(VOCAB, WIDTH, seed=90)
    table[:, OUTLIERS] *= 25
    looked = t.add("Gather", [t.constant("table", table), "ids"], "looked")
    value = t.add("Add", [looked, t.random("places", 1, TOKENS, WIDTH)], "stream")
    for index in range(blocks):
        value = t.block(value, f"block{index}")
    last = t.norm(value, "last")
    if head:
        last = t.linear(last, "head", WIDTH, VOCAB)
    outputs = [last, *([shown] if shown else [])]
    opset = 23 if kind == "rms" else 17
    kinds = {"ids": TensorProto.INT64}
    return build(t.nodes, {"ids": [1, TOKENS]}, outputs, t.constants, opset=opset, types=kinds)


def tokens(count: int = 10) -> list[Feed]:
    """Random token numbers."""
    generator = rng(7)
    return [{"ids": generator.integers(0, VOCAB, (1, TOKENS))} for _ in range(count)]


STREAM = 32  # channels of the residual sum below


def residual_sum(outlier: float) -> onnx.ModelProto:
    """A residual sum with a channel of outliers, its norm, which makes little of it, and a layer."""
    ahead = np.zeros((STREAM, STREAM), np.float32)
    ahead[:, 3] = outlier / STREAM**0.5
    gain = np.full(STREAM, max(outlier, 1.0) / 8, np.float32)
    gain[3] = 0.01
    nodes = [
        node("MatMul", ["x", "w1"], ["branch"], name="ahead"),
        node("Add", ["branch", "x"], ["sum"], name="add"),
        node("LayerNormalization", ["sum", "gain", "shift"], ["normed"], name="norm", axis=-1),
        node("MatMul", ["normed", "w2"], ["y"], name="behind"),
    ]
    constants = {"w1": ahead, "gain": gain, "shift": np.zeros(STREAM, np.float32)}
    constants["w2"] = normal(STREAM, 16, seed=5, scale=0.3)
    return build(nodes, {"x": [1, 8, STREAM]}, ["y"], constants)


def rows_of_noise(count: int = 12) -> list[dict[str, np.ndarray]]:
    """Samples for it."""
    return [{"x": normal(1, 8, STREAM, seed=index)} for index in range(count)]
