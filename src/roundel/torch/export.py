"""A module becomes an ONNX model, which is proved to compute the same on the examples."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from roundel.errors import DataError, ModelError, RecipeError
from roundel.model.session import open_session
from roundel.types import Sample

_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parent)
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_NODE = re.compile(r"target=torch\.ops\.([\w.]+)")
_LONGEST = 300


def not_traced(error: Exception) -> ModelError:
    """For what torch.export refuses: the cause and the line of the user's code that led to it."""
    return ModelError(
        "torch.export cannot trace the module.",
        where=_line(error),
        observed=f"{type(error).__name__}: {_plain(str(error))}",
        hint=_advice(error),
    )


def not_converted(error: Exception) -> ModelError:
    """For what the ONNX exporter has no translation of: the operator."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and isinstance(cause, Exception):
        chain.append(cause)
    texts = [str(one) for one in chain]
    found = [match for pattern in (_OPERATOR, _NODE) for text in texts if (match := pattern.search(text))]
    return ModelError(
        "The module cannot be written as ONNX.",
        where=f"operator {found[0].group(1)}" if found else None,
        observed=_plain(texts[-1]),
        hint="Say it with other operators, or keep this part out of the module and run it before or after.",
    )


def _line(error: BaseException) -> str | None:
    """The innermost line of the traceback that is not torch's own; tracing runs the user's forward."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not frame.filename.startswith("<") and not any(map(path.is_relative_to, _NOT_THE_USERS)):
            return f"{path.name}, line {frame.lineno}, in {frame.name}: {frame.line}"
    return None


def _plain(text: str) -> str:
    """The first paragraph on one line: what follows is about debugging torch."""
    first = text.split("For more information, run with", 1)[0].split("\n\n", 1)[0]
    rest = re.search(r"- (You marked .*?)(?:\. If you're|\n|$)", text)
    whole = first if rest is None else f"{first} {rest.group(1)}"
    return " ".join(whole.split())[:_LONGEST]


def _advice(error: Exception) -> str:
    name, text = type(error).__name__, str(error)
    if "data-dependent" in text or "DataDependent" in name:
        return "The path through the code depends on values: use torch.where, or torch.cond."
    if "Constraints violated" in text:
        return "A dimension is fixed by the code or the example: leave it out of the dynamic shapes."
    if ".numpy()" in text:
        return "Compute with torch operators inside forward, not with numpy."
    if "expected to be" in text or "shape" in text.lower():
        return "Check that the example's shapes and the dynamic shapes fit the module."
    return "Try module(*example_inputs) first; then see torch.export's documentation for this message."


@dataclass(frozen=True, slots=True, eq=False)
class ExampleCall:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def tensors(self) -> list[Any]:
        """All tensors, in the order of the call."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if torch.is_tensor(leaf)]

    def fed(self, names: Sequence[str]) -> Sample:
        """The tensors by the names of a graph's inputs."""
        named = dict(self.kwargs or {})
        if named and set(names) == set(named):
            return {name: array(named[name]) for name in names}
        given = self.tensors()
        if len(given) != len(names):
            raise DataError(
                "The example does not have the exported model's inputs.",
                where="example_inputs",
                observed=f"{len(given)} tensors",
                expected=", ".join(names),
            )
        return {name: array(tensor) for name, tensor in zip(names, given, strict=True)}

    def mapped(self, change: Any) -> ExampleCall:
        """Every tensor changed, all else as it is."""
        whole = (self.args, self.kwargs)
        return ExampleCall(*pytree.tree_map(lambda v: change(v) if torch.is_tensor(v) else v, whole))


def examples_of(given: object) -> tuple[ExampleCall, ...]:
    """A tensor, a tuple (positional arguments), a dict (by parameter name), or a list of these.

    Raises:
        DataError: there is no example, or it is of another kind.
    """
    several = given if isinstance(given, list) else [given]
    found = tuple(_example(one) for one in several)
    if not found:
        raise DataError("There are no example inputs.", where="example_inputs", expected="at least one")
    return found


def _example(given: object) -> ExampleCall:
    if torch.is_tensor(given):
        return ExampleCall((given,))
    if isinstance(given, tuple):
        return ExampleCall(given)
    if isinstance(given, Mapping):
        return ExampleCall((), dict(given))
    raise DataError(
        "A module can be exported only with example inputs: they show its shapes and types.",
        where="example_inputs",
        observed="nothing" if given is None else f"an object of type {type(given).__name__}",
        expected="a tensor, a tuple of arguments, a dict by parameter name, or a list of such examples",
        hint="For example roundel.quantize(module, example_inputs=torch.zeros(1, 3, 224, 224), …).",
    )


def array(tensor: Any) -> Any:
    """A tensor of any device as a numpy array of its own type."""
    return tensor.detach().cpu().numpy()


BATCH = "batch"


def batch_shapes(example: ExampleCall) -> Any:
    """The first dimension of every tensor, under one name.

    Raises:
        DataError: the tensors have no common first dimension.
    """
    tensors, given = example.tensors(), example.kwargs or example.args
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        raise DataError(
            "The inputs have no common first dimension that could be the batch.",
            where="example_inputs",
            observed=", ".join(str(tuple(tensor.shape)) for tensor in tensors),
            hint="Say which dimensions are open with dynamic_shapes, in torch.export's notation.",
        )
    return pytree.tree_map(lambda value: {0: BATCH} if torch.is_tensor(value) else None, given)


def for_export(shapes: Any) -> Any:
    """As torch.export wants it: a name becomes a dimension, the same one wherever it stands."""
    made = cache(torch.export.Dim)
    return _each(shapes, lambda dim: made(dim) if isinstance(dim, str) else dim)


def for_naming(shapes: Any) -> Any:
    """As the ONNX exporter names dimensions: by strings."""
    return _each(shapes, lambda dim: dim.__name__ if isinstance(dim, torch.export.Dim) else dim)


def _each(shapes: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(shapes, Mapping):
        axes = bool(shapes) and all(isinstance(key, int) for key in shapes)
        return {k: change(v) if axes else _each(v, change) for k, v in shapes.items()}
    if isinstance(shapes, list | tuple):
        return type(shapes)(_each(part, change) for part in shapes)
    if shapes is None:
        return None
    raise RecipeError(
        "The dynamic shapes cannot be read.",
        where="dynamic_shapes",
        observed=repr(shapes),
        expected="by parameter name or position, a dict from axis to a name: {'x': {0: 'batch'}}",
    )


OPSET = 18
"""The lowest that torch's exporter writes by itself; below it lies a version converter that may give up."""
TOLERANCE = 1e-4
"""Largest difference between export and module, over the largest output: float32 sums in another order."""
HALF_TOLERANCE = 1e-2
"""The same for modules in 16 bits."""


def export_module(
    module: Any, examples: Sequence[ExampleCall], *, dynamic_batch: bool, dynamic_shapes: Any
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
            dims, named = for_export(shapes), dict(traced.kwargs or {})
            program = torch.export.export(module, traced.args, named, dynamic_shapes=dims, strict=False)
        # Deliberately broad: the user's forward runs here and may raise anything.
        except Exception as error:
            raise not_traced(error) from error
        model = _converted(program, for_naming(shapes))
        return model, (_compared(model, module, examples),)


def export_program(program: Any, examples: Sequence[ExampleCall]) -> tuple[ir.Model, tuple[str, ...]]:
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
        used = examples or (ExampleCall(*program.example_inputs),)
        # Guards are Python text in the file; the comparison needs none of them.
        return model, (_compared(model, program.module(check_guards=False), used),)


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


def _compared(model: ir.Model, module: Any, examples: Sequence[ExampleCall]) -> str:
    """A sentence for the record; an error where the export is not what the module is."""
    session = open_session(model)
    names = [one.name for one in session.get_inputs()]
    worst, bound = 0.0, TOLERANCE
    for index, example in enumerate(examples):
        answer = module(*example.args, **(example.kwargs or {}))
        expected = [leaf for leaf in pytree.tree_leaves(answer) if torch.is_tensor(leaf)]
        got = session.run(None, example.fed(names))
        outputs = [one.name for one in session.get_outputs()]
        if len(outputs) != len(expected):
            raise ModelError(
                "The exported model has other outputs than the module.",
                observed=", ".join(outputs),
                expected=f"{len(expected)} tensors",
            )
        for name, left, right in zip(outputs, expected, got, strict=True):
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
    levels = {logger: logger.level for logger in loggers}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


class QuantizedModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Runs a quantized model in ONNX Runtime: torch tensors in and out, without gradients.

    Results lie on the device of the first input. They are those of the file as it is written, without the
    integer kernels of one particular CPU.
    """

    def __init__(self, model: ir.Model) -> None:
        super().__init__()
        self._session = open_session(model, simulate=True)
        self.input_names = tuple(one.name for one in self._session.get_inputs())
        self.output_names = tuple(one.name for one in self._session.get_outputs())
        self._types = {value.name: value.dtype for value in model.graph.inputs}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One tensor, or a tuple of them in the order of `output_names`.

        Raises:
            DataError: inputs are missing, unknown, or given twice.
        """
        fed = dict(zip(self.input_names, args, strict=False)) | kwargs
        if set(fed) != set(self.input_names) or len(args) + len(kwargs) != len(self.input_names):
            raise DataError(
                "The model takes other inputs.",
                observed=f"{len(args)} by position" + (f", {', '.join(kwargs)} by name" if kwargs else ""),
                expected=", ".join(self.input_names),
            )
        first = next(iter(fed.values()))
        feed = {name: self._array(name, value) for name, value in fed.items()}
        made = [torch.from_numpy(np.asarray(out)) for out in self._session.run(None, feed)]
        if torch.is_tensor(first):
            made = [out.to(first.device) for out in made]
        return made[0] if len(made) == 1 else tuple(made)

    def _array(self, name: str, value: Any) -> Any:
        given = array(value) if torch.is_tensor(value) else np.asarray(value)
        wanted = self._types[name]
        return given if wanted is None else np.ascontiguousarray(given, wanted.numpy())
