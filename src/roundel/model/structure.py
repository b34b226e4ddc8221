"""Whether a graph hangs together: what onnx-ir reads without complaint and later steps would stumble over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir

from roundel.errors import ModelError, RoundelError, VerifyError
from roundel.model.files import self_contained
from roundel.model.graph import op_key
from roundel.model.session import open_session

_MOST = 2**31 - 1
# Exporters leave its region and its scales empty where ONNX made them optional only later.
_LENIENT = frozenset({"Resize"})
_COUNTS = frozenset(
    {
        *("group", "offset_group", "num_groups", "strides", "dilations", "kernel_shape", "size", "blocksize"),
        *("hidden_size", "q_num_heads", "kv_num_heads", "num_outputs", "num_scan_inputs", "sample_size"),
        *("output_height", "output_width", "pooled_shape"),
    }
)
_BROKEN = "The file may be damaged: export or download the model again."


def check_structure(model: ir.Model, where: object) -> None:
    """Refuse a model whose names, connections, attributes or weights contradict each other.

    Raises:
        ModelError: with the node or tensor concerned.
    """
    imports = model.graph.opset_imports
    _check_text((*imports, *model.graph.initializers), "domain or initializer name", where)
    for function in model.functions.values():
        _check_text((*function.opset_imports, function.name, function.domain), "function's name", where)
    if not 1 <= model.ir_version <= _MOST:
        raise _broken(where, f"IR version {model.ir_version}", "3 or more")
    for domain, version in imports.items():
        if not 1 <= version <= _MOST:
            raise _broken(where, f"version {version} of operator set '{domain}'", "1 or more")
    for graph in model.graphs():
        _check_names(graph, where)
        for node in graph:
            _check_node(node, imports, f"{where}, {op_key(node)} node '{node.name}'")
    for value in model.graph.inputs:
        if value.type is None:
            raise _broken(f"{where}, graph input '{value.name}'", "no type", "a type")
    for value in model.graph.outputs:
        if _undefined(value):
            raise _broken(
                f"{where}, graph output '{value.name}'", "nothing makes it", "a node's output or an input"
            )
    for value in model.graph.initializers.values():
        _check_size(value, where)


def _check_names(graph: ir.Graph | ir.Function, where: object) -> None:
    made = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for name, count in Counter(value.name for value in made if value.name).items():
        _check_text((name,), "tensor name", where)
        if count > 1:
            raise _broken(f"{where}, tensor '{name}'", f"{count} nodes or inputs make it", "exactly one")


def _check_text(texts: Iterable[object], what: str, where: object) -> None:
    # Protobuf hands out bytes where a string is not UTF-8.
    for text in texts:
        if isinstance(text, bytes):
            raise _broken(where, f"the {what} {text!r}", "UTF-8 text")


def _check_node(node: ir.Node, imports: dict[str, int], place: str) -> None:
    _check_text((node.name, node.op_type, node.domain), "node name or type", place)
    for value in node.inputs:
        if value is not None and _undefined(value):
            raise _broken(
                place,
                f"it reads tensor '{value.name}', which nothing makes",
                "a graph input, an initializer or another node's output",
            )
    schema = _schema(node, imports)
    _check_attributes(node, schema, place)
    _check_required(node, schema, place)
    _check_what_ends_the_process(node, place)


def _undefined(value: ir.Value) -> bool:
    return value.producer() is None and not value.is_graph_input() and not value.is_initializer()


def _check_attributes(node: ir.Node, schema: onnx.defs.OpSchema | None, place: str) -> None:
    """Names, types where ONNX has a schema for the operator, and counts; ONNX Runtime judges the rest."""
    known = schema.attributes if schema is not None else {}
    for name, attr in node.attributes.items():
        _check_text((name,), "attribute name", place)
        seen = attr.type.name
        if not name or attr.type is ir.AttributeType.UNDEFINED:
            raise _broken(place, f"an attribute named {name!r} of type {seen}", "a name and a type")
        if attr.is_ref():
            continue
        wanted = str(known[name].type).rpartition(".")[2] if name in known else seen
        if seen != wanted:
            raise _broken(place, f"attribute '{name}' has type {seen}", f"type {wanted}")
        if name in _COUNTS and seen in ("INT", "INTS"):
            numbers = [attr.as_int()] if seen == "INT" else list(attr.as_ints())
            # ONNX Runtime divides by these without looking: zero ends the whole process, not only the run.
            if not all(1 <= number <= _MOST for number in numbers):
                told = numbers[0] if seen == "INT" else numbers
                raise _broken(place, f"attribute '{name}' is {told}", "1 or more")


def _schema(node: ir.Node, imports: dict[str, int]) -> onnx.defs.OpSchema | None:
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        return onnx.defs.get_schema(node.op_type, imports.get(domain, imports.get("ai.onnx", 1)), domain)
    except onnx.defs.SchemaError:
        return None


def _check_required(node: ir.Node, schema: onnx.defs.OpSchema | None, place: str) -> None:
    """ONNX and ONNX Runtime both read inputs that must be there without looking whether they are."""
    if schema is None or node.op_type in _LENIENT:
        return
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    formal = schema.inputs
    for index, value in enumerate(node.inputs):
        if value is None and formal and formal[min(index, len(formal) - 1)].option != optional:
            raise _broken(place, f"input {index} is empty", "a tensor")


def _check_what_ends_the_process(node: ir.Node, place: str) -> None:
    """ONNX Runtime ends the whole process over these nodes, instead of refusing them."""
    # ONNX allows the empty name for no bias.
    if node.op_type == "LayerNormalization" and len(node.inputs) > 2 and node.inputs[2] is None:
        raise ModelError(
            "ONNX Runtime cannot load a LayerNormalization whose bias is an empty name.",
            where=place,
            expected="two inputs, or a bias",
            hint="Take the empty third input out of the node.",
        )
    # A batch or a sequence of no length.
    first = node.inputs[0] if node.op_type in ("LSTM", "GRU", "RNN") and node.inputs else None
    if first is not None and first.shape is not None and 0 in first.shape:
        raise _broken(place, f"input {first.shape}", "no empty axis")
    if node.op_type != "Split":
        return
    said, count = node.attributes.get("num_outputs"), len(node.outputs)
    if said is not None and not said.is_ref() and said.as_int() < count:
        raise _broken(place, f"{count} outputs, num_outputs {said.as_int()}", "as many as num_outputs says")
    if not all(value.name for value in node.outputs):
        raise _broken(place, "an output without a name", "a name for each part")


def _check_size(value: ir.Value, where: object) -> None:
    tensor = value.const_value
    if not isinstance(tensor, ir.TensorProtoTensor) or tensor.dtype is ir.DataType.STRING:
        return
    try:
        tensor.numpy()
    except (ValueError, TypeError, AssertionError) as error:  # onnx-ir asserts which field holds the data
        raise _broken(
            f"{where}, initializer '{value.name}'",
            str(error) or "data in a field of another type",
            f"the data of {tensor.dtype.name.lower()} {tensor.shape}",
        ) from error


def _broken(where: object, observed: object, expected: object) -> ModelError:
    return ModelError(
        "The model contradicts itself.", where=where, observed=observed, expected=expected, hint=_BROKEN
    )


ModelSource = str | Path | bytes | onnx.ModelProto | ir.Model

# ONNX's checker does not know ONNX Runtime's own operators in ONNX's domain; that makes no model broken.
_NOT_A_FAULT = "No Op registered for"


@contextmanager
def blaming(source: ModelSource) -> Iterator[None]:
    """Turn a failure in the block into a `ModelError` where the model as given is not valid.

    A damaged model can get far before a step stumbles over it. Asking ONNX and ONNX Runtime about every model
    first would cost time and memory; asking when something has failed costs nothing. Where they find nothing
    to blame, the failure passes through as it is: then it is Roundel's own.
    """
    try:
        yield
    except MemoryError as error:
        raise ModelError(
            "The memory does not suffice for this model and these data.",
            where=source if isinstance(source, str | Path) else "the model passed in",
            observed=error,
            hint="Give smaller shapes or fewer samples, or more memory.",
        ) from error
    except Exception as error:
        if isinstance(error, RoundelError) and not isinstance(error, VerifyError):
            raise
        found = fault(source)
        if found is None:
            raise
        raise ModelError(
            "The model is not valid.",
            where=source if isinstance(source, str | Path) else "the model passed in",
            observed=found,
            expected="a model that onnx.checker.check_model accepts and ONNX Runtime loads",
            hint=_BROKEN,
        ) from error


def fault(source: ModelSource) -> str | None:
    """What ONNX Runtime or ONNX's checker refuses about a model, or None."""
    try:
        whole: bytes | Path = _whole(source)
    except (ValueError, TypeError, RuntimeError) as error:  # protobuf cannot even write it
        return _short(error)
    try:
        open_session(whole)
    except ModelError as error:
        return error.observed
    try:
        onnx.checker.check_model(whole if isinstance(whole, bytes) else str(whole))
    except onnx.checker.ValidationError as error:
        return None if _NOT_A_FAULT in str(error) else _short(error)
    return None


def _whole(source: ModelSource) -> bytes | Path:
    if isinstance(source, str | Path):
        return Path(source)
    if isinstance(source, ir.Model):
        source = ir.to_proto(self_contained(source))
    return source if isinstance(source, bytes) else bytes(source.SerializeToString())


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
