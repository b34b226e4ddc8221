"""The modes that store weights only: matrices in few bits, and dynamic quantization.

The former are MatMulNBits, or DequantizeLinear with blocks before the product; the latter measures values
of activations at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.errors import ModelError, RecipeError
from roundel.model.edit import Names, add_constant
from roundel.model.graph import attribute_float, attribute_int, constant_array, op_key, opset_version
from roundel.model.session import open_session
from roundel.numerics.affine import quantize, weight_params
from roundel.numerics.packed import Packed, in_blocks, in_bytes, round_packed
from roundel.plan.build import WeightLayer
from roundel.qdq.nodes import AFTER, MICROSOFT, add_constants, forget, replace_node
from roundel.recipe.settings import Recipe, WeightOnly
from roundel.types import Scheme

BLOCKED_OPSET = 21
_BLOCKED_IR_VERSION = 10


def write_weights(
    model: ir.Model,
    layers: tuple[WeightLayer, ...],
    packed: Mapping[tuple[str, bool], Packed],
    options: WeightOnly,
) -> ir.Model:
    """A copy of the prepared model whose layers read the packed weights.

    Args:
        model: the prepared float model.
        layers: what to change.
        packed: the weight of each layer, by the layer's key; layers with one key share it.
        options: format and accuracy level.
    """
    result = model.clone()
    nodes = {str(node.name): node for node in result.graph}
    writer = _blocked(result, packed) if options.format == "qdq" else _Packer(result, packed, options)
    for layer in layers:
        writer.rewrite(nodes[layer.node], layer)
    forget(result.graph, *(result.graph.initializers[name] for name in {each.weight for each in layers}))
    result.graph.sort()
    return result


def check_kernel(recipe: Recipe) -> None:
    """Refuse a format that the installed ONNX Runtime does not compute, before any work is done."""
    if recipe.mode != "weight_only":
        return
    scheme = recipe.weight_only.scheme
    layer = WeightLayer("product", "MatMul", "x", "w", "y", transposed=False)
    stored = round_packed(np.ones((1, scheme.size), np.float32), scheme, search=False)
    real = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape([1, scheme.size]), type=real)
    y = ir.Value(name="y", shape=ir.Shape([1, 1]), type=real)
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": BLOCKED_OPSET})
    weight = add_constant(graph, "w", np.ones((scheme.size, 1), np.float32))
    graph.append(ir.Node("", "MatMul", [x, weight], outputs=[y], name="product"))
    graph.outputs.append(y)
    model = ir.Model(graph, ir_version=_BLOCKED_IR_VERSION)
    try:
        open_session(write_weights(model, (layer,), {layer.key: stored}, recipe.weight_only))
    except ModelError as error:
        raise RecipeError(
            "The installed ONNX Runtime does not compute this format.",
            where=f"weight_only: {scheme}, {recipe.weight_only.format}",
            observed=error.observed,
            hint="Update onnxruntime, or use 4 bits.",
        ) from error


def _blocked(model: ir.Model, packed: Mapping[tuple[str, bool], Packed]) -> _Dequantizer:
    opset = opset_version(model)
    if opset < BLOCKED_OPSET:
        raise ModelError(
            "The model cannot hold DequantizeLinear with blocks.",
            where="weight_only.format: qdq",
            observed=f"opset {opset}, which ONNX's converter could not raise",
            expected=f"opset {BLOCKED_OPSET}",
            hint="Export the model at opset 21, or use weight_only.format: matmul_nbits.",
        )
    model.ir_version = max(model.ir_version or 0, _BLOCKED_IR_VERSION)
    return _Dequantizer(model, packed)


class _Packer:
    """Puts MatMulNBits in the place of a product."""

    def __init__(
        self, model: ir.Model, packed: Mapping[tuple[str, bool], Packed], options: WeightOnly
    ) -> None:
        self.graph, self.packed, self.options = model.graph, packed, options
        self.names = Names(model.graph)
        self.graph.opset_imports.setdefault(MICROSOFT, 1)
        self._made: dict[tuple[str, bool], list[ir.Value]] = {}

    def rewrite(self, node: ir.Node, layer: WeightLayer) -> None:
        """The product by codes; what Gemm adds is added behind it."""
        outputs, inputs = self.packed[layer.key].codes.shape
        sizes = {"K": inputs, "N": outputs, "bits": self.options.bits, "block_size": self.options.group_size}
        if self.options.accuracy_level:
            sizes["accuracy_level"] = self.options.accuracy_level
        old = node.outputs[0]
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        out = ir.Value(name=self.names(f"{layer.node}_product"), shape=old.shape, type=old.type)
        attributes = [ir.AttrInt64(name, value) for name, value in sizes.items()]
        operands = [node.inputs[0], *self._constants(layer)]
        product = ir.Node(
            MICROSOFT, "MatMulNBits", operands, attributes=attributes, outputs=[out], name=layer.node
        )
        new = [product]
        if bias is not None:
            name = self.names(f"{layer.node}_bias")
            out = ir.Value(name=self.names(f"{name}_sum"), shape=old.shape, type=old.type)
            new.append(ir.Node("", "Add", [product.outputs[0], bias], outputs=[out], name=name))
        self.graph.insert_before(node, new)
        replace_node(self.graph, node, out)

    def _constants(self, layer: WeightLayer) -> list[ir.Value]:
        """Codes, scales and, where they differ from the middle code, zero points; made once for each key."""
        if layer.key in self._made:
            return self._made[layer.key]
        stored = self.packed[layer.key]
        scheme, params = stored.scheme, stored.params
        blocks = in_blocks(stored.codes, scheme.size)
        missing = blocks[0].size - stored.codes.shape[1]
        if missing:
            blocks[:, -1, -missing:] = params.zero[:, -1:]  # codes of zero weights, whatever reads them
        parts: dict[str, NDArray[Any]] = {"packed": in_bytes(blocks, scheme.bits), "scales": params.scale}
        if not scheme.symmetric:
            parts["zero_points"] = in_bytes(params.zero, scheme.bits)
        made = add_constants(self.graph, self.names, layer.weight, **parts)
        return self._made.setdefault(layer.key, made)


class _Dequantizer:
    """Puts DequantizeLinear before a product."""

    def __init__(self, model: ir.Model, packed: Mapping[tuple[str, bool], Packed]) -> None:
        self.graph, self.packed, self.names = model.graph, packed, Names(model.graph)
        self._made: dict[tuple[str, bool], ir.Value] = {}

    def rewrite(self, node: ir.Node, layer: WeightLayer) -> None:
        """The product stays as it is and reads restored weights."""
        if layer.key not in self._made:
            self._made[layer.key] = self._restored(node, layer)
        node.replace_input_with(1, self._made[layer.key])

    def _restored(self, node: ir.Node, layer: WeightLayer) -> ir.Value:
        stored = self.packed[layer.key]
        scheme, params = stored.scheme, stored.params
        kind = ir.DataType[f"{'INT' if scheme.symmetric else 'UINT'}{scheme.bits}"].numpy()
        shift = scheme.middle if scheme.symmetric else 0
        codes = (stored.codes.astype(np.int16) - shift).astype(kind)
        parts: dict[str, NDArray[Any]] = {"quantized": codes, "scale": params.scale}
        if not scheme.symmetric:
            parts["zero_point"] = params.zero.astype(kind)
        parts = {part: layer.tensor(array) for part, array in parts.items()}
        constants = add_constants(self.graph, self.names, layer.weight, **parts)
        name, real = self.names(f"{layer.weight}{AFTER}"), ir.TensorType(ir.DataType.FLOAT)
        out = ir.Value(name=name, shape=constants[0].shape, type=real)
        where = {"axis": 1 if layer.transposed else 0, "block_size": scheme.size}
        attributes = [ir.AttrInt64(name, value) for name, value in where.items()]
        name = self.names(f"{layer.weight}_DequantizeLinear")
        made = ir.Node("", "DequantizeLinear", constants, attributes=attributes, outputs=[out], name=name)
        self.graph.insert_before(node, made)
        return out


_DYNAMIC_OPS = ("MatMul", "Gemm", "Conv")
_Three = tuple[ir.Value, ir.Value, ir.Value]  # codes, scale and zero point


def write_dynamic(model: ir.Model, recipe: Recipe, chosen: frozenset[str]) -> tuple[ir.Model, int]:
    """A copy whose chosen nodes compute in integers; returns it with the number of nodes changed.

    Args:
        model: the prepared float model.
        recipe: gives the weights' type.
        chosen: names of the nodes to change; those with computed weights are left alone.
    """
    result = model.clone()
    writer = _DynamicWriter(result.graph, recipe)
    changed = sum(writer.rewrite(node) for node in list(result.graph) if node.name in chosen)
    forget(result.graph, *writer.replaced)
    result.graph.sort()
    return result, changed


class _DynamicWriter:
    def __init__(self, graph: ir.Graph, recipe: Recipe) -> None:
        self.graph, self.recipe, self.names = graph, recipe, Names(graph)
        self._activations: dict[ir.Value, _Three] = {}
        self._weights: dict[tuple[ir.Value, bool], _Three] = {}
        self.replaced: set[ir.Value] = set()  # float weights and biases that may have lost all readers

    def rewrite(self, node: ir.Node) -> bool:
        """Replace one node by its integer form, if its weight is a constant."""
        if op_key(node) not in _DYNAMIC_OPS or not self._supported(node):
            return False
        data, weight = node.inputs[0], node.inputs[1]
        assert data is not None
        assert weight is not None
        codes, scale, zero = self._activation(data)
        transposed = bool(node.op_type == "Gemm" and attribute_int(node, "transB", 0))
        w_codes, w_scale, w_zero = self._weight(weight, transposed)
        integer = "ConvInteger" if node.op_type == "Conv" else "MatMulInteger"
        attributes = [a for a in node.attributes.values() if node.op_type == "Conv"]
        product = self._node(node, integer, [codes, w_codes, zero, w_zero], attributes)
        real = self._node(node, "Cast", [product], [ir.AttrInt64("to", ir.DataType.FLOAT.value)])
        scales = self._node(node, "Mul", [scale, w_scale])
        out = self._node(node, "Mul", [real, scales])
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None:
            out = self._node(node, "Add", [out, self._shaped_bias(node, bias)])
        replace_node(self.graph, node, out)
        return True

    def _supported(self, node: ir.Node) -> bool:
        weight = constant_array(node.inputs[1])
        if weight is None or weight.dtype != np.float32 or weight.size == 0:
            return False
        if node.op_type == "Gemm":
            plain = attribute_float(node, "alpha", 1.0) == attribute_float(node, "beta", 1.0) == 1.0
            return plain and not attribute_int(node, "transA", 0)
        return weight.ndim == 4 if node.op_type == "Conv" else weight.ndim >= 2

    def _activation(self, value: ir.Value) -> _Three:
        """DynamicQuantizeLinear, once for each tensor."""
        if value not in self._activations:
            codes, scale, zero = (
                ir.Value(name=self.names(f"{value.name}_{part}")) for part in ("quantized", "scale", "zero")
            )
            name = self.names(f"{value.name}_QuantizeLinear")
            self.graph.append(
                ir.Node("", "DynamicQuantizeLinear", [value], outputs=[codes, scale, zero], name=name)
            )
            self._activations[value] = codes, scale, zero
        return self._activations[value]

    def _weight(self, value: ir.Value, transposed: bool) -> _Three:
        key = (value, transposed)
        if key not in self._weights:
            self.replaced.add(value)
            array = constant_array(value)
            assert array is not None
            scheme = self.recipe.weights.scheme
            assert isinstance(scheme, Scheme)
            params = weight_params(array, scheme)
            codes = quantize(array, params, narrow=self.recipe.weights.symmetric)
            codes = np.ascontiguousarray(codes.T) if transposed else codes
            parts = {"quantized": codes, "scale": params.scale, "zero_point": params.zero_point}
            one, two, three = add_constants(self.graph, self.names, str(value.name), **parts)
            self._weights[key] = one, two, three
        return self._weights[key]

    def _shaped_bias(self, node: ir.Node, bias: ir.Value) -> ir.Value:
        array = constant_array(bias)
        if node.op_type != "Conv" or array is None:
            return bias
        self.replaced.add(bias)
        return add_constant(self.graph, self.names(f"{bias.name}_shaped"), array.reshape(1, -1, 1, 1))

    def _node(
        self, origin: ir.Node, op: str, inputs: list[ir.Value], attributes: list[ir.Attr] | None = None
    ) -> ir.Value:
        name = self.names(f"{origin.name}_{op}")
        out = ir.Value(name=self.names(f"{name}_Output"))
        self.graph.append(ir.Node("", op, inputs, attributes=attributes or [], outputs=[out], name=name))
        return out
