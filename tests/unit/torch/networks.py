"""Small networks in PyTorch; imported by name in the tests of factories, too."""

from __future__ import annotations

import torch
from torch import nn


class Cnn(nn.Module):
    """Two convolutions, a batch norm whose statistics a run in training mode would change, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = nn.functional.relu6(self.deep(x))
        return self.head(self.drop(x.mean((2, 3))))


class Encoder(nn.Module):
    """A transformer's encoder over tokens, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = self.layers(self.words(ids), src_key_padding_mask=mask == 0)
        weight = mask.unsqueeze(-1).to(seen.dtype)
        return {"tokens": seen, "sentence": (seen * weight).sum(1) / weight.sum(1)}


def cnn() -> Cnn:
    torch.manual_seed(0)
    return Cnn()


def cnn_with_example() -> tuple[Cnn, torch.Tensor]:
    return cnn().eval(), torch.zeros(1, 3, 8, 8)


def nothing() -> str:
    return "no network"
