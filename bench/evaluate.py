"""Judges quantized files against the float model on labelled images.

Runs in the ``ort`` environment, or in ``quark`` for Quark's files: its custom-op library needs torch.

Every file is simulated in the same way: ONNX Runtime on the CPU with ``session.disable_quant_qdq``, so that
Q/DQ pairs are computed in float as written and no contender gains or loses through integer kernels. Batch 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from records import RESULT_PREFIX, Score

CUSTOM_DOMAINS = frozenset({"com.amd.quark", "com.vai.quantize"})

Outputs = list[npt.NDArray[np.float32]]


def needs_custom_ops(path: Path) -> bool:
    """Whether a file uses operators of AMD's custom-op library and does not define them as functions."""
    model = onnx.load(str(path), load_external_data=False)
    defined = {(function.domain, function.name) for function in model.functions}
    used = {(node.domain, node.op_type) for node in model.graph.node if node.domain in CUSTOM_DOMAINS}
    return bool(used - defined)


def open_session(path: Path, library: Path | None) -> ort.InferenceSession:
    """Opens a file for simulation in float.

    Args:
        path: The ONNX file.
        library: Custom-op library, used only when the file needs it.

    Returns:
        The session.

    Raises:
        FileNotFoundError: The file needs the library and none was given.
    """
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if needs_custom_ops(path):
        if library is None:
            raise FileNotFoundError(
                "the file uses com.amd.quark operators and no custom-op library was given"
            )
        # Quark's library is linked against torch's, which the loader finds only once torch is imported.
        importlib.import_module("torch")
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_all(session: ort.InferenceSession, images: npt.NDArray[np.float32]) -> Outputs:
    """Runs every image; returns one array per model output, stacked over the images."""
    name = session.get_inputs()[0].name
    rows = [session.run(None, {name: images[index : index + 1]}) for index in range(len(images))]
    return [np.concatenate([np.asarray(row[k], np.float32) for row in rows]) for k in range(len(rows[0]))]


def float_outputs(path: Path, images_path: Path, images: npt.NDArray[np.float32]) -> Outputs:
    """The float model's outputs, cached beside the images under the digest of the model file."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    cache = images_path.with_suffix(f".float-{digest}.npz")
    if cache.exists():
        with np.load(cache, allow_pickle=False) as stored:
            return [stored[key] for key in sorted(stored.files)]
    outputs = run_all(open_session(path, None), images)
    partial = cache.with_suffix(".partial.npz")
    arrays: dict[str, Any] = {f"output_{k:03d}": value for k, value in enumerate(outputs)}
    np.savez(partial, **arrays)
    partial.replace(cache)
    return outputs


def sqnr_db(
    reference: Sequence[npt.NDArray[np.float32]], actual: Sequence[npt.NDArray[np.float32]]
) -> float | None:
    """Signal to quantization noise in dB over all outputs pooled; None where there is no noise at all."""
    signal = sum(float(np.square(f, dtype=np.float64).sum()) for f in reference)
    noise = sum(
        float(np.square(f.astype(np.float64) - q).sum()) for f, q in zip(reference, actual, strict=True)
    )
    return 10 * math.log10(signal / noise) if noise > 0 else None


def file_size(path: Path) -> int:
    """Bytes of an ONNX file together with its external data files."""
    model = onnx.load(str(path), load_external_data=False)
    external = {
        str(entry.value)
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return path.stat().st_size + sum((path.parent / name).stat().st_size for name in external)


def score(reference: Outputs, actual: Outputs, labels: npt.NDArray[np.int64], size: int) -> Score:
    """Compares outputs; the first output holds the class scores."""
    order = np.argsort(-actual[0].reshape(len(labels), -1), axis=1, kind="stable")
    expected = reference[0].reshape(len(labels), -1).argmax(axis=1)
    return Score(
        top1=100 * float((order[:, 0] == labels).mean()),
        top5=100 * float((order[:, :5] == labels[:, None]).any(axis=1).mean()),
        agreement=100 * float((order[:, 0] == expected).mean()),
        sqnr_db=sqnr_db(reference, actual),
        size_bytes=size,
        images=len(labels),
    )


def main() -> None:
    """Evaluates one file (or the float model itself) and prints its result line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--float", dest="float_model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="npz with x (N, C, H, W) and y (N,)")
    parser.add_argument("--quantized", type=Path, help="file to judge; the float model when left out")
    parser.add_argument("--library", type=Path, help="custom-op library for com.amd.quark operators")
    args = parser.parse_args()
    with np.load(args.data, allow_pickle=False) as stored:
        images, labels = stored["x"], stored["y"]
    reference = float_outputs(args.float_model, args.data, images)
    judged: Path = args.quantized or args.float_model
    actual = run_all(open_session(judged, args.library), images) if args.quantized else reference
    result = score(reference, actual, labels, file_size(judged))
    print(RESULT_PREFIX + json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
