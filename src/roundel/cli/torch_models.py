"""Models in PyTorch on the command line: .pt2 files, and factories by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundel.errors import RecipeError

if TYPE_CHECKING:
    from roundel.torch_frontend import Exported


def opened_model(model: Path, shapes: list[str] | None, *, dynamic_batch: bool) -> Path | Exported:
    """An ONNX file as it is; what is of PyTorch, exported.

    Args:
        model: what the user typed.
        shapes: of example inputs, NAME=1x3x48x320, for a factory that brings none.
        dynamic_batch: leave the first dimension of all inputs open.
    """
    from roundel.torch_frontend import is_torch_source, opened

    if is_torch_source(model):
        return opened(model, _example(shapes), dynamic_batch=dynamic_batch)
    if dynamic_batch:
        raise RecipeError(
            "--dynamic-batch is for models in PyTorch.",
            where=model,
            hint="An ONNX model says its shapes itself; `-s prepare.fixed_shapes=…` fixes open ones.",
        )
    return model


def _example(shapes: list[str] | None) -> object:
    """Inputs by parameter name, in the shapes given; the export alone sees them."""
    if not shapes:
        return None
    from roundel.cli.options import random_data
    from roundel.torch_frontend.requirements import require_exporter

    require_exporter()
    import torch

    generator: Any = torch.Generator().manual_seed(0)
    sizes = random_data(1, shapes).shapes
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
