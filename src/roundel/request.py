"""What a run is asked for, checked before any work: the model, and which processor."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from roundel.errors import DependencyError, RecipeError
from roundel.model.session import runtime_has_cuda
from roundel.model.structure import ModelSource
from roundel.recipe.settings import Recipe
from roundel.torch import Exported, is_torch_source, opened


def as_onnx(
    model: Any, example_inputs: object, dynamic_batch: bool, dynamic_shapes: Any
) -> tuple[ModelSource, Exported | None]:
    """The model as ONNX, and where it came from if that was PyTorch."""
    if is_torch_source(model):
        model = opened(model, example_inputs, dynamic_batch=dynamic_batch, dynamic_shapes=dynamic_shapes)
    elif example_inputs is not None or dynamic_batch or dynamic_shapes is not None:
        raise RecipeError(
            "Example inputs and dynamic shapes are for models in PyTorch.",
            observed=f"a model of type {type(model).__name__}",
            hint="Leave them out: an ONNX model says its shapes itself.",
        )
    return (model.model, model) if isinstance(model, Exported) else (model, None)


CHOICES = ("auto", "cpu", "cuda")
_GPU = 0


@dataclass(frozen=True, slots=True)
class Execution:
    """The choice.

    Attributes:
        recipe: with the devices of fine-tuning filled in.
        calibration: the number of the GPU that runs the model over the data, or None for the CPU.
        notes: what was chosen, for the record; nothing where nothing was asked.
    """

    recipe: Recipe
    calibration: int | None = None
    notes: tuple[str, ...] = ()


def choose_execution(asked: str | None, recipe: Recipe) -> Execution:
    """Where calibration and fine-tuning run.

    Args:
        asked: auto takes a GPU where there is one, cuda insists on it, cpu needs none; None leaves the choice
            to the recipe: calibration on the CPU, fine-tuning where improve.finetune says.
        recipe: says whether there is anything to tune.

    Raises:
        RecipeError: no such choice.
        DependencyError: cuda was asked for, and a package for it is missing.
    """
    if asked is None:
        return Execution(recipe)
    if asked not in CHOICES:
        what = "Unknown place to run."
        raise RecipeError.unknown(what, asked, CHOICES, where="--device-exec", observed=asked)
    tunes = recipe.finetuning != "none"
    lacks = {"calibration": _runtime_lacks()} | ({"fine-tuning": _torch_lacks()} if tunes else {})
    if asked == "cuda":
        _insist(lacks)
    places = {part: "cpu" if asked == "cpu" or missing else "cuda" for part, missing in lacks.items()}
    if tunes:
        devices = {"optim_device": places["fine-tuning"], "infer_device": places["calibration"]}
        recipe = recipe.merged({"improve": {"finetune": devices}})
    reasons = {part: f" ({lacks[part]})" if asked == "auto" and lacks[part] else "" for part in places}
    said = ", ".join(f"{part} on {place}{reasons[part]}" for part, place in places.items())
    number = _GPU if places["calibration"] == "cuda" else None
    return Execution(recipe, number, (f"--device-exec {asked}: {said}",))


def _insist(lacks: dict[str, str | None]) -> None:
    hints: dict[str, str] = {
        "calibration": "pip uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'",
        "fine-tuning": "install a build of torch with CUDA, and check its driver: torch.cuda.is_available()",
    }
    for part, missing in lacks.items():
        if missing is not None:
            raise DependencyError(
                f"CUDA was asked for, and {part} cannot use it.",
                where="--device-exec cuda",
                observed=missing,
                hint=f"{hints[part]}; or --device-exec auto, which takes what is there and says so.",
            )


def _runtime_lacks() -> str | None:
    """Why ONNX Runtime cannot use a GPU here, or None."""
    return None if runtime_has_cuda() else "this ONNX Runtime has no CUDA provider: onnxruntime-gpu has"


def _torch_lacks() -> str | None:
    """Why torch cannot use a GPU here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"
