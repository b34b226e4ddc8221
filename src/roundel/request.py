"""What a run is asked for, checked before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roundel.errors import RecipeError
from roundel.model.structure import ModelSource
from roundel.outputs import model_targets, refuse_overwriting
from roundel.recipe.load import RecipeSource, unfolded
from roundel.recipe.settings import merge
from roundel.torch import Exported, is_torch_source, opened


def changed(
    changes: Mapping[str, Any] | None,
    samples: int | None,
    exclude: Sequence[str],
    effort: str | None = None,
) -> dict[str, Any]:
    """The short options as recipe changes."""
    tree = unfolded(changes or {})
    if effort is not None:
        tree["effort"] = effort
    if samples is not None:
        tree = merge(tree, {"data": {"samples": samples}})
    if exclude:
        selection = tree.get("selection")
        before = selection.get("exclude", ()) if isinstance(selection, Mapping) else ()
        words = [before] if isinstance(before, str) else before
        tree = merge(tree, {"selection": {"exclude": [*words, *exclude]}})
    return tree


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


def checked_output(
    output: str | Path | None, model: object, recipe: RecipeSource, data: object, stats: str | Path | None
) -> Path | None:
    """Where the model goes, once it is sure that nothing that is read would be overwritten."""
    written = {**model_targets(output), "statistics file": stats}
    file = model.path if isinstance(model, Exported) else model
    refuse_overwriting(written, {"input model": file, "calibration data": data, "recipe": recipe})
    return None if output is None else Path(output)
