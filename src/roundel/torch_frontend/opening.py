"""The front door: whatever of PyTorch is given becomes an ONNX model, and a sentence for the record.

Nothing here imports torch before it is certain that something of torch was given.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from roundel.torch_frontend.requirements import require_exporter

SUFFIX = ".pt2"


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """An ONNX model that came from PyTorch.

    Attributes:
        model: the model.
        name: of the module or file.
        path: the file, where there is one.
        notes: how it was made, and how close it is to the module.
    """

    model: ir.Model
    name: str
    path: Path | None
    notes: tuple[str, ...]


def is_torch_source(model: object) -> bool:
    """Whether this is something of PyTorch: a module, a program, a .pt2 file or `module:factory`."""
    if isinstance(model, str | Path):
        return Path(model).suffix == SUFFIX or (":" in str(model) and not Path(model).exists())
    torch: Any = sys.modules.get("torch")
    if torch is None:  # then nobody can have made a module
        return False
    return isinstance(model, torch.nn.Module) or type(model).__name__ == "ExportedProgram"


def opened(
    model: Any,
    example_inputs: object = None,
    *,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
) -> Exported:
    """Export a module, a torch.export program, a .pt2 file, or what `module:factory` makes.

    Args:
        model: any of these; a module is left as it was.
        example_inputs: a tensor, a tuple of arguments, a dict by parameter name, or a list of such examples:
            the first is traced, all are compared. A program and a factory may bring their own.
        dynamic_batch: leave the first dimension of all inputs open.
        dynamic_shapes: open dimensions in torch.export's notation; names may stand for Dim objects.

    Raises:
        DependencyError: torch or onnxscript is not installed.
        ModelError: the model cannot be read or exported, or its export computes something else.
        DataError: the examples are missing or do not fit.
    """
    require_exporter()
    import torch

    from roundel.torch_frontend import archive, export, factories
    from roundel.torch_frontend.examples import examples_of

    name = Path(model).name if isinstance(model, str | Path) else type(model).__name__
    path = Path(model) if isinstance(model, str | Path) and Path(model).suffix == SUFFIX else None
    if path is not None:
        model = archive.load_program(path)
    elif isinstance(model, str | Path):
        model, own = factories.build(str(model))
        example_inputs = own if example_inputs is None else example_inputs
    if isinstance(model, torch.nn.Module):
        made = export.export_module(
            model, examples_of(example_inputs), dynamic_batch=dynamic_batch, dynamic_shapes=dynamic_shapes
        )
    else:
        export.refuse_shapes(name, dynamic_batch=dynamic_batch, dynamic_shapes=dynamic_shapes)
        given = () if example_inputs is None else examples_of(example_inputs)
        made = export.export_program(model, given)
    return Exported(made[0], name, path, made[1])
