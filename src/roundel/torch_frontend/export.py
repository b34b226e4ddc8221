"""An nn.Module or an ExportedProgram becomes an onnx-ir model, proved equal to it on the examples."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from roundel.errors import ModelError, RecipeError
from roundel.model.session import open_session
from roundel.torch_frontend.examples import Example, array
from roundel.torch_frontend.failures import not_converted, not_traced
from roundel.torch_frontend.shapes import batch_shapes, for_export, for_naming

OPSET = 18
"""The lowest that torch's exporter writes by itself; below it lies a version converter that may give up."""
TOLERANCE = 1e-4
"""Largest difference between export and module, over the largest output: float32 sums in another order."""
HALF_TOLERANCE = 1e-2
"""The same for modules in 16 bits."""


def export_module(
    module: Any, examples: Sequence[Example], *, dynamic_batch: bool, dynamic_shapes: Any
) -> tuple[ir.Model, tuple[str, ...]]:
    """Export a module in evaluation mode; it is left as it was.

    Args:
        module: an nn.Module.
        examples: the first one is traced, all are compared.
        dynamic_batch: leave the first dimension of all inputs open.
        dynamic_shapes: open dimensions in torch.export's notation; names may stand for Dim objects.

    Raises:
        ModelError: torch cannot export the module, or the export computes something else.
        DataError: the examples do not fit.
    """
    if dynamic_batch and dynamic_shapes is not None:
        raise RecipeError(
            "Both dynamic_batch and dynamic_shapes were given.",
            expected="one of them: dynamic_shapes can name the batch, too",
        )
    shapes = batch_shapes(examples[0]) if dynamic_batch else dynamic_shapes
    traced = examples[0]
    if dynamic_batch and traced.tensors()[0].shape[0] == 1:
        # A size of one is a constant to torch.export.
        traced = traced.mapped(lambda tensor: torch.cat([tensor, tensor]))
        examples = (*examples, traced)
    with _evaluating(module), torch.no_grad(), _quiet():
        try:
            named = dict(traced.kwargs or {})
            program = torch.export.export(
                module, traced.args, named, dynamic_shapes=for_export(shapes), strict=False
            )
        # Deliberately broad: the user's forward runs here and may raise anything.
        except Exception as error:
            raise not_traced(error) from error
        model = _converted(program, for_naming(shapes))
        return model, (_compared(model, module, examples),)


def export_program(program: Any, examples: Sequence[Example]) -> tuple[ir.Model, tuple[str, ...]]:
    """Convert what torch.export has traced already.

    Args:
        program: a torch.export.ExportedProgram.
        examples: compared; those that it was traced with where none are given.

    Raises:
        ModelError: it cannot be written as ONNX, or the result computes something else.
    """
    with torch.no_grad(), _quiet():
        model = _converted(program, None)
        if not examples and program.example_inputs is None:
            return model, ("exported from PyTorch; without example inputs nothing was compared",)
        used = examples or (Example(*program.example_inputs),)
        # Guards are Python text in the file; the comparison needs none of them.
        return model, (_compared(model, program.module(check_guards=False), used),)


def refuse_shapes(name: str, *, dynamic_batch: bool, dynamic_shapes: Any) -> None:
    """A traced program has the open dimensions that it was traced with.

    Raises:
        RecipeError: others were asked for.
    """
    if dynamic_batch or dynamic_shapes is not None:
        raise RecipeError(
            "A program that is traced already keeps its shapes.",
            where=name,
            observed="dynamic_batch" if dynamic_batch else "dynamic_shapes",
            hint="Give dynamic_shapes to torch.export.export, or give Roundel the module.",
        )


def _converted(program: Any, shapes: Any) -> ir.Model:
    try:
        done = torch.onnx.export(
            program, (), dynamo=True, opset_version=OPSET, dynamic_shapes=shapes, verbose=False
        )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError) as error:
        raise not_converted(error) from error
    model: ir.Model = done.model
    # The exporter's tensors are the module's own memory: later training would change the result.
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.const_value = ir.tensor(np.array(value.const_value.numpy()), name=value.name)
    return model


def _compared(model: ir.Model, module: Any, examples: Sequence[Example]) -> str:
    """A sentence for the record; an error where the export is not what the module is."""
    session = open_session(model)
    names = [one.name for one in session.get_inputs()]
    worst, bound = 0.0, TOLERANCE
    for index, example in enumerate(examples):
        expected = [leaf for leaf in pytree.tree_leaves(example.call(module)) if torch.is_tensor(leaf)]
        got = session.run(None, example.fed(names))
        for name, left, right in zip(_outputs(session, expected), expected, got, strict=True):
            if left.dtype in (torch.float16, torch.bfloat16):
                bound = HALF_TOLERANCE
            difference = _difference(array(left), np.asarray(right))
            if not difference <= bound:
                raise ModelError(
                    "The exported model does not compute what the module computes.",
                    where=f"output '{name}', example {index}",
                    observed=f"largest difference {difference:.2g} of the largest value",
                    expected=f"at most {bound:g}",
                    hint="Randomness inside forward is usual; else export the module's parts one by one.",
                )
            worst = max(worst, difference)
    return (
        f"exported by torch {torch.__version__} at opset {OPSET}; equals the module on {len(examples)} "
        f"example(s): largest difference {worst:.1g} of the largest output (allowed: {bound:g})"
    )


def _outputs(session: Any, expected: Sequence[Any]) -> list[str]:
    names = [one.name for one in session.get_outputs()]
    if len(names) != len(expected):
        raise ModelError(
            "The exported model has other outputs than the module.",
            observed=", ".join(names),
            expected=f"{len(expected)} tensors",
        )
    return names


def _difference(expected: Any, got: Any) -> float:
    if expected.shape != got.shape:
        return float("inf")
    if expected.size == 0:
        return 0.0
    left, right = expected.astype(np.float64), got.astype(np.float64)
    # Masks are infinite in both, which has no difference.
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    largest = np.abs(left[np.isfinite(left)]).max(initial=0.0)
    gap = np.abs(np.where(same, 0.0, left - right)).max()
    return float(gap / largest) if largest else float(gap)


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """The module in evaluation mode; afterwards every part is in the mode that it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own warnings: what they are about either fails here, or is proved harmless."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.fx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
