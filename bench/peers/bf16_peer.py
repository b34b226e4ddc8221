"""AMD Quark's BF16 files, and any file under Quark's operator library (the ``quark`` environment).

Writes Quark's own files (CLE off) into a folder, then the logits of all named files, with the library
registered, into an .npz: in the default session, and with all optimizations off.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from protocol import emit

OPTIONS: dict[str, dict[str, bool]] = {
    "pair": {},
    "cast": {"BF16QDQToCast": True},
    "plain": {"EnableVaimlBF16": True},
}


class Reader:
    """A calibration data reader; BF16 without scales never asks it."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)


def write(model: str, folder: Path, samples: list[dict[str, Any]]) -> dict[str, float]:
    """Quark's files, with the seconds that each took."""
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config import Config, get_default_config

    seconds = {}
    for form, options in OPTIONS.items():
        settings = get_default_config("BF16")
        settings.include_cle = False
        settings.extra_options.update(options)
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            quantizer = ModelQuantizer(Config(global_quant_config=settings))
            quantizer.quantize_model(model, str(folder / f"quark_{form}.onnx"), Reader(samples))
        seconds[form] = time.perf_counter() - start
    return seconds


def logits(path: Path, images: Any, library: str, *, optimized: bool) -> Any:
    """One image after the other."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(library)
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {name: images[i : i + 1]})[0] for i in range(len(images))])


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--strict-images", type=int, required=True)
    args = parser.parse_args()
    from quark.onnx import get_library_path

    library = get_library_path()
    images = np.load(args.data)["x"][: args.images]
    name = ort.InferenceSession(args.model, providers=["CPUExecutionProvider"]).get_inputs()[0].name
    seconds = write(args.model, args.folder, [{name: images[:1]}])
    files = [*args.files, *(args.folder / f"quark_{form}.onnx" for form in OPTIONS)]
    found = {}
    for path in files:
        found[path.stem] = logits(path, images, library, optimized=True)
        strict = images[: args.strict_images]
        found[f"{path.stem} strict"] = logits(path, strict, library, optimized=False)
    np.savez(args.folder / "peer.npz", **found)
    emit({"seconds": seconds})


if __name__ == "__main__":
    main()
