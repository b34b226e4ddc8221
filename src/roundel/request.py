"""What a run is asked for, checked before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roundel.errors import OutputError, RecipeError
from roundel.model import LoadedModel
from roundel.model.files import check_writable, same_file
from roundel.model.structure import ModelSource
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


def record_path(model_path: Path) -> Path:
    """Where the record of a written model goes."""
    return model_path.with_suffix(".json")


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
    output: str | Path | None, model: object, recipe: RecipeSource, stats: str | Path | None
) -> Path | None:
    if output is None:
        return None
    target = Path(output)
    check_writable(target)
    if record_path(target) == target:
        raise OutputError(
            "The output's name is that of its record.",
            where=target,
            expected="a name that does not end in .json, for example model.a8w8.onnx",
        )
    check_writable(record_path(target))
    file = model.path if isinstance(model, Exported) else model
    sources = {"input model": file, "recipe": recipe, "statistics file": stats}
    for what, source in sources.items():
        if isinstance(source, str | Path):
            _refuse_overwriting(target, Path(source), what)
    return target


def _refuse_overwriting(target: Path, source: Path, what: str) -> None:
    for written, name in ((target, "output"), (record_path(target), "output's record")):
        if same_file(written, source):
            raise OutputError(
                f"The {name} would overwrite the {what}.", where=written, hint="Choose another output path."
            )


def refuse_external_target(target: Path | None, loaded: LoadedModel) -> None:
    if target is not None:
        for path in loaded.data_files:
            _refuse_overwriting(target, path, "input model's external data")
