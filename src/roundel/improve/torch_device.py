"""Torch and its devices: found and checked before any work is done."""

from __future__ import annotations

import re

import onnxruntime as ort

from roundel.errors import RecipeError

_DEVICE = re.compile(r"cpu|cuda(?::(\d+))?")


def optim_device(name: str) -> str:
    """The device as torch names it.

    Raises:
        RecipeError: no such device here.
    """
    number = _number("optim_device", name)
    if number is None:
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= count:
        raise _missing("optim_device", name, f"torch sees {count} CUDA devices")
    return f"cuda:{number}"


def infer_device(name: str) -> int | None:
    """The number of the GPU that runs models, or None for the CPU.

    Raises:
        RecipeError: ONNX Runtime has no such device here.
    """
    number = _number("infer_device", name)
    if number is not None and "CUDAExecutionProvider" not in ort.get_available_providers():
        raise _missing("infer_device", name, "ONNX Runtime has no CUDA provider here")
    return number


def _number(option: str, name: str) -> int | None:
    match = _DEVICE.fullmatch(name)
    if match is None:
        raise RecipeError(
            "Unknown device.",
            where=f"improve.finetune.{option}",
            observed=name,
            expected="cpu, cuda or cuda:N",
        )
    return None if name == "cpu" else int(match.group(1) or 0)


def _missing(option: str, name: str, observed: str) -> RecipeError:
    return RecipeError(
        "The device that was asked for is not there.",
        where=f"improve.finetune.{option}: {name}",
        observed=observed,
        hint=f"Set improve.finetune.{option}: cpu, or install a build with CUDA.",
    )
