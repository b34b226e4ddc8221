"""Inputs that become constants, and the branches that are then known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from roundel.errors import RecipeError, did_you_mean
from roundel.model import graph
from roundel.model.edit import Editor, Names, detach
from roundel.recipe.settings import Number
from roundel.types import Array

Given = Number | Sequence[Number]
_WHERE = "prepare.fixed_inputs"


def input_constants(model: ir.Model, values: Mapping[str, Given]) -> dict[str, Array]:
    """The values as the model declares these inputs: of their type, and in their shape.

    Args:
        model: its graph's inputs say what fits.
        values: by input name, a number or as many as the input has elements, row by row.

    Raises:
        RecipeError: there is no such input, or the value does not fit it.
    """
    inputs = {value.name: value for value in model.graph.inputs if value.name}
    found = {}
    for name, given in values.items():
        if name not in inputs:
            raise RecipeError(
                f"The model has no input '{name}' that could be fixed.",
                where=_WHERE,
                expected=", ".join(inputs) or "a model with inputs",
                hint=did_you_mean(name, list(inputs)) or "Names are those that `roundel inspect` lists.",
            )
        found[name] = _shaped(_typed(given, inputs[name]), inputs[name])
    return found


def _typed(given: Given, value: ir.Value) -> Array:
    """The numbers in the input's type, none of which may change them."""
    wanted = None if value.dtype is None or not isinstance(value.type, ir.TensorType) else value.dtype
    numbers = np.asarray(given)
    if wanted is None or wanted is ir.DataType.STRING or numbers.dtype.kind not in "biuf":
        raise _misfit(value, given, "numbers for an input of numbers")
    dtype = wanted.numpy()
    with np.errstate(all="ignore"):
        array = numbers.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(array.astype(np.float64), numbers.astype(np.float64)):
        raise _misfit(value, given, f"numbers that {wanted.name.lower()} holds")
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise _misfit(value, given, f"finite numbers that {wanted.name.lower()} holds")
    return array


def _shaped(array: Array, value: ir.Value) -> Array:
    """In the declared shape; one open dimension takes what the others leave."""
    dims = graph.dims(value)
    if dims is None:
        return array
    known = math.prod(size for size in dims if size is not None)
    free = [axis for axis, size in enumerate(dims) if size is None]
    rest = array.size // known if known else 0
    if known * rest != array.size or (not free and rest != 1):
        count = f"{known} numbers" if not free else f"a multiple of {known} numbers"
        shape = ", ".join("?" if size is None else str(size) for size in dims)
        raise _misfit(value, array.tolist(), f"{count}, for shape [{shape}]")
    sizes = [1 if size is None else size for size in dims]
    if free:
        sizes[free[0]] = rest
    return array.reshape(sizes)


def _misfit(value: ir.Value, given: object, expected: str) -> RecipeError:
    return RecipeError(
        f"The value does not fit input '{value.name}'.",
        where=f"{_WHERE}.{value.name}",
        observed=str(given)[:200],
        expected=expected,
        hint=f"The model declares it as {value.dtype} {value.shape}.",
    )


def fix_inputs(model: ir.Model, values: Mapping[str, Given]) -> int:
    """Makes inputs constants of their declared type. Exact for callers that would feed these values.

    Args:
        model: it loses the inputs.
        values: as `input_constants` takes them.
    """
    constants = input_constants(model, values)
    for value in [value for value in model.graph.inputs if value.name in constants]:
        array = constants[str(value.name)]
        model.graph.inputs.remove(value)
        value.const_value = ir.Tensor(array, name=value.name)
        value.shape = ir.Shape(array.shape)
        if value.name not in model.graph.initializers:
            model.graph.register_initializer(value)
    return len(constants)


def take_branches(model: ir.Model) -> int:
    """Replaces each If of the main graph whose condition is a constant by the branch it takes. Exact.

    What the branch made keeps its name where nothing else has it; what the If gave keeps its own.
    """
    editor = Editor(model)
    known = [node for node in model.graph if graph.is_op(node, "If") and _condition(node) is not None]
    for node in known:
        _take(editor, node)
    return len(known)


def _condition(node: ir.Node) -> bool | None:
    array = graph.constant_array(node.inputs[0])
    return None if array is None or array.size != 1 else bool(array.reshape(-1)[0])


def _take(editor: Editor, node: ir.Node) -> None:
    taken = node.attributes["then_branch" if _condition(node) else "else_branch"].as_graph()
    results, nodes = list(taken.outputs), list(taken)
    constants = list(taken.initializers.values())
    taken.outputs.clear()
    taken.initializers.clear()
    taken.remove(nodes)
    for body in graph.bodies(node):
        body.initializers.clear()
        for inner in list(body):
            detach(inner)
            body.remove(inner)
    names = Names(editor.graph, *(body for inner in nodes for body in graph.bodies(inner)))
    for value in constants:
        _rename_constant(value, names(str(value.name)))
        editor.graph.register_initializer(value)
    for inner in nodes:
        inner.name = names(inner.name or inner.op_type)
        for value in inner.outputs:
            if value.name:
                value.name = names(value.name)
    editor.graph.insert_before(node, nodes)
    _hand_over(editor, node, results, set(nodes), names)


def _rename_constant(value: ir.Value, name: str) -> None:
    """A tensor may be that of the caller's own ModelProto, which a new name must not reach."""
    tensor = value.const_value
    if name != value.name and tensor is not None and tensor.dtype is not ir.DataType.STRING:
        value.const_value = ir.Tensor(tensor.numpy(), name=name)
    value.name = name


def _hand_over(
    editor: Editor, node: ir.Node, results: list[ir.Value], moved: set[ir.Node], names: Names
) -> None:
    """Let the branch's results stand where those of the If stood, and drop the If."""
    given = set[ir.Value]()
    for old, new in zip(node.outputs, results, strict=True):
        if new.producer() not in moved or new in given:
            # Seen by others under its own name, as a constant or a tensor from outside the branch is.
            copy = ir.node("Identity", [new], name=names(f"{old.name}_copy"))
            copy.outputs[0].name, copy.outputs[0].shape = names(f"{old.name}_value"), new.shape
            copy.outputs[0].type = new.type
            editor.graph.insert_before(node, copy)
            new = copy.outputs[0]
        given.add(new)
        shape, kind = new.shape, new.type
        editor.take_over(old, new)
        if not new.is_graph_output() and shape is not None:
            new.shape, new.type = shape, kind  # what the If declared holds for both branches
    editor.drop(node)
