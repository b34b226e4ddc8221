"""GPUs for ONNX Runtime: whether there is one, and sessions that really run on it."""

from __future__ import annotations

import onnxruntime as ort

from roundel.errors import DependencyError

PROVIDER = "CUDAExecutionProvider"


def runtime_has_cuda() -> bool:
    """Whether this ONNX Runtime was built with its CUDA provider."""
    return PROVIDER in ort.get_available_providers()


def move_to_cuda(session: ort.InferenceSession, device: int) -> None:
    """Move a session to a GPU; what has no kernel there stays on the CPU.

    Products are computed in float32, not in the shorter TF32 that CUDA prefers: ranges come from them.

    Raises:
        DependencyError: ONNX Runtime went on with the CPU, as it does where CUDA's libraries are missing.
    """
    options = {"device_id": str(device), "use_tf32": "0"}
    session.set_providers([PROVIDER, "CPUExecutionProvider"], [options, {}])
    if PROVIDER not in session.get_providers():
        raise DependencyError(
            "ONNX Runtime could not use the GPU.",
            where=f"cuda:{device}",
            observed=f"a session on {', '.join(session.get_providers())}",
            expected="the libraries of CUDA and cuDNN that this onnxruntime-gpu was built for",
            hint="pip install 'onnxruntime-gpu[cuda,cudnn]', or run with --device-exec cpu.",
        )
