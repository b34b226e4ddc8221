"""Turn a plan with its numbers into a graph with Q/DQ nodes."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.edit import Names, add_constant
from roundel.model.graph import constant_array, is_constant, opset_version, values_by_name, weight_bytes
from roundel.model.memory import budget
from roundel.numerics.affine import quantize
from roundel.plan.types import Role, Shared, TensorPlan
from roundel.qdq.floats import FloatCell, lift, put
from roundel.qdq.functions import attach
from roundel.qdq.functions.blocks import block_nodes
from roundel.qdq.nodes import (
    AFTER,
    BEFORE,
    CODES,
    MICROSOFT,
    QUARK,
    Chain,
    Dialect,
    Ends,
    add_constants,
    forget,
    insert_behind,
)
from roundel.recipe.settings import Recipe
from roundel.state import State
from roundel.targets.operators import is_operand
from roundel.types import BlockScheme, FloatScheme, QParams, Scheme


def dedicate_dequantizers(graph: ir.Graph) -> int:
    """Copy every DQ node that several inputs read, one for each; exact. Returns the number of copies."""
    names, copies = Names(graph), 0
    for node in [n for n in graph if n.op_type == "DequantizeLinear"]:
        value = node.outputs[0]
        uses = list(value.uses())
        # The original keeps its name for the first reader, or for the graph output that it is.
        for use in uses if value.is_graph_output() else uses[1:]:
            use.node.replace_input_with(use.idx, _copy(node, graph, names).outputs[0])
            copies += 1
    return copies


def _copy(node: ir.Node, graph: ir.Graph, names: Names) -> ir.Node:
    value = node.outputs[0]
    out = ir.Value(name=names(str(value.name)), shape=value.shape, type=value.type)
    name, attributes = names(str(node.name)), list(node.attributes.values())
    twin = ir.Node(node.domain, node.op_type, node.inputs, attributes=attributes, outputs=[out], name=name)
    graph.insert_after(node, twin)
    return twin


def write_qdq(model: ir.Model, state: State, recipe: Recipe) -> ir.Model:
    """A quantized copy of the prepared model, topologically sorted."""
    result = model.clone()
    writer = _Writer(result, state, recipe)
    writer.fold(state.plan.folded)
    for tensor in state.plan.tensors.values():
        writer.write(tensor)
    writer.finish()
    if recipe.floats.form == "plain":
        put(result.graph, lift(result.graph), "plain", half_weights=recipe.output.half_weights)
    return attach(result) if QUARK in result.graph.opset_imports else result


def weight_codes(array: NDArray[Any], tensor: TensorPlan, state: State) -> NDArray[Any]:
    """The integer content of a constant."""
    given = state.codes.get(tensor.name)
    if given is not None:
        return given
    content = state.values.get(tensor.name, array)
    # Symmetric constants leave out the lowest code, weights and biases alike: zero sits in the exact middle.
    return quantize(content, state.params[tensor.name], narrow=tensor.integer.symmetric)


class _Writer:
    def __init__(self, model: ir.Model, state: State, recipe: Recipe) -> None:
        self.model, self.graph, self.state, self.recipe = model, model.graph, state, recipe
        self.dialect = Dialect.of(recipe, opset_version(model))
        self.values = values_by_name(self.graph)
        self.names = Names(self.graph)
        self.dedicated = recipe.placement.dedicated_pairs
        self._lean = weight_bytes(model) > budget().lean
        self._constants: dict[str, tuple[QParams, Ends]] = {}
        self._cells: dict[str, FloatCell] = {}

    def fold(self, names: tuple[str, ...]) -> None:
        """Remove Relu/Clip nodes; their producer takes over their output's name."""
        chosen = set(names)
        for node in [n for n in self.graph if n.name in chosen]:
            source, out = node.inputs[0], node.outputs[0]
            assert source is not None
            name = str(out.name)
            out.replace_all_uses_with(source, replace_graph_outputs=True)
            bounds = node.inputs[1:]
            self.graph.remove(node, safe=True)
            forget(self.graph, *bounds)
            source.name = name
            self.values[name] = source

    def write(self, tensor: TensorPlan) -> None:
        """Nodes and constants for one tensor."""
        if tensor.role is Role.ACTIVATION:
            self._activation(tensor)
        else:
            self._constant(tensor)

    def finish(self) -> None:
        """Opset imports, producer, order."""
        if self.recipe.placement.dedicated_dequantizers:
            dedicate_dequantizers(self.graph)
        for domain in {node.domain for node in self.graph} & {MICROSOFT, QUARK}:
            self.graph.opset_imports.setdefault(domain, 1)
        self.graph.sort()

    def _constant(self, tensor: TensorPlan) -> None:
        value = self.values[tensor.name]
        array = constant_array(value)
        assert array is not None
        uses = [u for u in value.uses() if self._reads_quantized(u.node, u.idx)]
        leaves = len(uses) == len(value.uses()) and not value.is_graph_output()
        if isinstance(tensor.scheme, Scheme):
            nodes = self._integer_constant(tensor, array, leaves=leaves)
        else:
            nodes = self._short_constant(tensor, array, leaves=leaves)
        first = uses[0].node
        for use in uses:
            use.node.replace_input_with(use.idx, nodes[-1].outputs[0])
        self.graph.insert_before(first, nodes)

    def _integer_constant(self, tensor: TensorPlan, array: NDArray[Any], *, leaves: bool) -> list[ir.Node]:
        """Codes in the file, and a node that reads them; the float constant goes where nothing needs it."""
        params = self.state.params[tensor.name]
        codes_name = self.names(f"{tensor.name}{CODES}")
        codes = self._codes(codes_name, array, tensor)
        is_bias = tensor.role is Role.BIAS
        scales = self._scales(tensor, f"{tensor.name}{CODES}" if is_bias else tensor.name)
        if leaves:
            del self.graph.initializers[tensor.name]
        out_name = tensor.name if is_bias and leaves else self.names(f"{tensor.name}{AFTER}")
        chain = Chain(codes, self.names, tensor.name)
        chain.dequantize(self.dialect.domain(params.qtype), scales, params)
        return chain.end(out_name)

    def _codes(self, name: str, array: NDArray[Any], tensor: TensorPlan) -> ir.Value:
        """The stored content; that of a large model is computed when somebody reads it, one at a time."""
        if not self._lean or tensor.name in self.state.codes:
            return add_constant(self.graph, name, weight_codes(array, tensor, self.state))
        state = self.state
        dtype = ir.DataType.from_numpy(state.params[tensor.name].qtype.dtype)
        shape = ir.Shape(array.shape)
        lazy = ir.LazyTensor(
            lambda: ir.Tensor(weight_codes(array, tensor, state), name=name), dtype, shape, name=name
        )
        value = ir.Value(name=name, shape=lazy.shape, type=ir.TensorType(dtype), const_value=lazy)
        self.graph.register_initializer(value)
        return value

    def _short_constant(self, tensor: TensorPlan, array: NDArray[Any], *, leaves: bool) -> list[ir.Node]:
        """A short float or a block format: float32 in the file, unless 16 bits can hold it."""
        name, scheme = tensor.name, tensor.scheme
        content = self.state.values.get(name, array)
        out = self.names(f"{name}{AFTER}")
        if isinstance(scheme, FloatScheme) and self.recipe.output.half_weights:
            if leaves:
                del self.graph.initializers[name]
            return self._cell(tensor, scheme).stored(content, out)
        source = self.values[name]
        if content is not array and leaves:
            source.const_value = ir.Tensor(content, name=name)
        elif content is not array:
            source = add_constant(self.graph, self.names(f"{name}_tuned"), content)
        return self._chain(tensor, source, "", out)

    def _activation(self, tensor: TensorPlan) -> None:
        value = self.values[tensor.name]
        uses = [u for u in value.uses() if u.node.graph is self.graph]
        leaves = value.is_graph_output() and not value.is_graph_input()
        apart = self.dedicated and len(uses) > 1 and not value.is_graph_output()
        if leaves:
            value.name = self.names(f"{tensor.name}{BEFORE}")
        groups = [(f"_{index}", [use]) for index, use in enumerate(uses, 1)] if apart else [("", uses)]
        for suffix, readers in groups:
            name = tensor.name if leaves else self.names(f"{tensor.name}{AFTER}{suffix}")
            nodes = self._chain(tensor, value, suffix, name)
            insert_behind(self.graph, value, nodes)
            out = nodes[-1].outputs[0]
            for use in readers:
                use.node.replace_input_with(use.idx, self._read_again(tensor, out, use.node) or out)
        if leaves:
            out.shape, out.type = value.shape, value.type
            for index, old in enumerate(self.graph.outputs):
                if old is value:
                    self.graph.outputs[index] = out

    def _read_again(self, tensor: TensorPlan, stored: ir.Value, reader: ir.Node) -> ir.Value | None:
        """The stored tensor in the scale in which this reader alone takes it."""
        params = self.state.read_params(tensor.name, str(reader.name))
        if params is None:
            return None
        base = f"{tensor.name}_{reader.name}"
        ends = self._ends(base, params)
        chain = Chain(stored, self.names, base)
        chain.pair(self.dialect.domain(params.qtype), ends, params)
        self.graph.insert_before(reader, chain.nodes)
        return chain.value

    def _chain(self, tensor: TensorPlan, value: ir.Value, suffix: str, out_name: str) -> list[ir.Node]:
        """The nodes between a float tensor and its stored values, read back."""
        name, scheme = tensor.name, tensor.scheme
        if isinstance(scheme, FloatScheme):
            clip = self.recipe.floats.clip and tensor.role is Role.ACTIVATION
            return self._cell(tensor, scheme).there_and_back(value, out_name, clip=clip, suffix=suffix)
        chain = Chain(value, self.names, name, suffix)
        if isinstance(scheme, BlockScheme):
            return block_nodes(chain, scheme, self.recipe.blocks, out_name)
        params, scales = self.state.params[name], self._scales(tensor, name)
        chain.pair(self.dialect.domain(params.qtype), scales, params)
        return chain.end(out_name)

    def _cell(self, tensor: TensorPlan, scheme: FloatScheme) -> FloatCell:
        made = self._cells.get(tensor.name)
        if made is None:
            factor = self.state.float_scales.get(tensor.name)
            form = self.recipe.floats.form
            made = FloatCell(self.graph, self.names, tensor.name, scheme.ftype, factor, form)
            self._cells[tensor.name] = made
        return made

    def _scales(self, tensor: TensorPlan, base: str) -> Ends:
        """The leader's constants where one scale serves a group, else the tensor's own."""
        source = tensor.source
        owner = source.leaders[0] if isinstance(source, Shared) and len(source.leaders) == 1 else base
        params, made = self.state.params[tensor.name], self._constants.get(owner)
        if made is not None and made[0].same_as(params):
            return made[1]
        ends = self._ends(base, params)
        self._constants.setdefault(owner, (params, ends))
        return ends

    def _ends(self, base: str, params: QParams) -> Ends:
        parts = {"scale": params.scale, "zero_point": params.zero_point}
        scale, zero = add_constants(self.graph, self.names, base, **parts)
        return scale, zero

    def _reads_quantized(self, node: ir.Node, index: int) -> bool:
        plan = self.state.plan.nodes.get(str(node.name))
        chosen = node.graph is self.graph and plan is not None and plan.quantized
        return chosen and is_operand(node.op_type, index)


def share_codes(graph: ir.Graph) -> int:
    """Let DequantizeLinear nodes read one constant where codes, scales and zero points are all equal; exact.

    Layers that shared a weight got copies of it, so that each could have scales of its own. Where they ended
    with the same, the copies say nothing. Returns the number of constants that went.
    """
    groups: dict[tuple[object, ...], list[ir.Node]] = defaultdict(list)
    for node in graph:
        if node.op_type == "DequantizeLinear" and is_constant(node.inputs[0]):
            groups[_outside(node)].append(node)
    replaced: set[ir.Value] = set()
    # The codes, which may be large, are looked at only where all else is equal.
    for alike in (nodes for nodes in groups.values() if len(nodes) > 1):
        first: dict[object, ir.Node] = {}
        for node in alike:
            replaced |= _share(node, first.setdefault(_content(node.inputs[0]), node))
    before = len(graph.initializers)
    forget(graph, *replaced)
    return before - len(graph.initializers)


def _share(node: ir.Node, first: ir.Node) -> set[ir.Value]:
    """Read the first node's constants; the own ones that this replaces."""
    own = [(index, value) for index, value in enumerate(node.inputs) if value is not first.inputs[index]]
    for index, _ in own:
        node.replace_input_with(index, first.inputs[index])
    return {value for _, value in own if value is not None}


def _outside(node: ir.Node) -> tuple[object, ...]:
    """All but the codes: operator, attributes, type and shape, scales and zero points."""
    attributes = tuple(sorted((name, str(attr.value)) for name, attr in node.attributes.items()))
    codes = node.inputs[0].const_value if node.inputs[0] is not None else None
    shape = None if codes is None else (codes.dtype, tuple(codes.shape.numpy()))
    return (node.domain, attributes, shape, *map(_content, node.inputs[1:]))


def _content(value: ir.Value | None) -> object:
    if value is None or value.const_value is None:
        return value
    tensor = value.const_value
    return tensor.dtype, tuple(tensor.shape.numpy()), hashlib.sha256(tensor.tobytes()).digest()
