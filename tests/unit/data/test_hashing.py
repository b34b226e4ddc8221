"""The digest of samples, and what importing the room costs."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np

from roundel.data import SampleDigest, open_samples
from roundel.types import InputSpec, Sample

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(3, dtype=np.int64)


def digest(*samples: Sample) -> str:
    running = SampleDigest()
    for sample in samples:
        running.update(sample)
    return running.hexdigest()


def test_same_content_same_digest() -> None:
    assert digest({"a": A, "b": B}) == digest({"b": B.copy(), "a": A.copy()})
    assert digest({"a": np.asfortranarray(A)}) == digest({"a": A})
    assert len(digest({"a": A})) == 64


def test_everything_counts() -> None:
    different = [
        digest({"a": A}),
        digest({"b": A}),
        digest({"a": A.reshape(3, 2)}),
        digest({"a": A.view(np.int32)}),
        digest({"a": A + 1}),
        digest({"a": A}, {"a": A}),
        digest({"a": A}, {"a": A + 1}),
        digest({"a": A + 1}, {"a": A}),
        digest({"a": A, "b": B}),
        digest({"a": np.array(["x", "yz"], object)}),
        digest({"a": np.array(["xy", "z"], object)}),
        digest({"a": np.float32(1)}),  # type: ignore[dict-item]
        digest(),
    ]
    assert len(set(different)) == len(different)


def test_watch_passes_samples_on() -> None:
    running = SampleDigest()
    samples = open_samples([A[:1], A[1:]], [InputSpec("a", np.dtype(np.float32), (1, 3))])
    seen = list(running.watch(samples))
    assert len(seen) == 2
    assert running.hexdigest() == digest(*seen)


def test_description_goes_into_json() -> None:
    samples = open_samples(A, [InputSpec("a", np.dtype(np.float32), (1, 3))])
    list(samples)
    assert json.loads(json.dumps(samples.description))["count"] == 2


def test_import_is_lean() -> None:
    code = (
        "import sys, roundel.data; print(sorted({'PIL', 'onnxruntime', 'torch', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
