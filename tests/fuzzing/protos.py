"""Models that read well and mean something impossible: one rule broken at a time, or a few."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import numpy as np
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

Bend = Callable[[ModelProto, Random], None]

INTEGERS = (0, 1, -1, 2, 3, 7, 255, 65536, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    1e-38,
    3.4e38,
    -3.4e38,
    1e30,
    float("inf"),
    -float("inf"),
    float("nan"),
)
NAMES = (
    "",
    "x",
    "y",
    "w",
    "nowhere",
    "a/b",
    "../up",
    "a:b",
    "имя",
    "a" * 5000,
    "roundel_Size:x",
    "x_quantized",
)
DIMS = (0, 1, 2, 5, -1, -7, 2**31, 2**40, 2**62, 2**63 - 1)
OPERATORS = (
    *("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul", "Relu", "Softmax", "LayerNormalization"),
    *("Concat", "Reshape", "Resize", "Pad", "Slice", "Gather", "Split", "Transpose", "Expand", "Tile"),
    *("ConstantOfShape", "Range", "Loop", "If", "Scan", "LSTM", "Constant", "Identity", "Cast", "Erf"),
    *("BatchNormalization", "InstanceNormalization", "SimplifiedLayerNormalization", "Clip", "NonZero"),
    *("QuantizeLinear", "DequantizeLinear", "Rleu", "ReduceMean", "AveragePool", "HardSwish", "PRelu"),
)


def bent(source: ModelProto, chance: Random) -> ModelProto:
    """A copy with one to three rules broken."""
    model = ModelProto()
    model.CopyFrom(source)
    for _ in range(chance.choice((1, 1, 2, 3))):
        with suppress(DecodeError):  # protobuf refuses to nest any deeper
            chance.choice(BENDS)(model, chance)
    return model


def _graphs(graph: GraphProto) -> list[GraphProto]:
    found = [graph]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found += _graphs(attribute.g)
    return found


def _node(model: ModelProto, chance: Random) -> NodeProto:
    graph = chance.choice(_graphs(model.graph))
    if not graph.node:
        graph.node.add(op_type="Identity", input=["x"], output=["extra"])
    return chance.choice(graph.node)


def _tensor_names(graph: GraphProto) -> list[str]:
    made = [name for node in graph.node for name in node.output]
    return [*made, *(v.name for v in graph.input), *(t.name for t in graph.initializer)] or ["x"]


def _rewire(model: ModelProto, chance: Random) -> None:
    node = _node(model, chance)
    if node.input:
        name = chance.choice((*_tensor_names(model.graph), chance.choice(NAMES)))
        node.input[chance.randrange(len(node.input))] = name


def _rename_output(model: ModelProto, chance: Random) -> None:
    node = _node(model, chance)
    if node.output:
        name = chance.choice((*_tensor_names(model.graph), chance.choice(NAMES)))
        node.output[chance.randrange(len(node.output))] = name


def _change_operator(model: ModelProto, chance: Random) -> None:
    node = _node(model, chance)
    if chance.random() < 0.8:
        node.op_type = chance.choice(OPERATORS)
    else:
        node.domain = chance.choice(("com.microsoft", "ai.onnx", "mine", "com.amd.quark", "", "a" * 300))


def _drop_node(model: ModelProto, chance: Random) -> None:
    graph = chance.choice(_graphs(model.graph))
    if graph.node:
        del graph.node[chance.randrange(len(graph.node))]


def _repeat_node(model: ModelProto, chance: Random) -> None:
    graph = chance.choice(_graphs(model.graph))
    if graph.node:
        copy = NodeProto()
        copy.CopyFrom(chance.choice(graph.node))
        if chance.random() < 0.7:
            for index in range(len(copy.output)):
                copy.output[index] += "_again"
            copy.name += "_again"
        graph.node.insert(chance.randrange(len(graph.node) + 1), copy)


def _shuffle_nodes(model: ModelProto, chance: Random) -> None:
    nodes = list(model.graph.node)
    chance.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _change_inputs(model: ModelProto, chance: Random) -> None:
    node = _node(model, chance)
    match chance.randrange(3):
        case 0 if node.input:
            del node.input[-1]
        case 1:
            node.input.append(chance.choice((*_tensor_names(model.graph), "")))
        case _ if node.input:
            node.input[chance.randrange(len(node.input))] = ""


def _change_outputs(model: ModelProto, chance: Random) -> None:
    node = _node(model, chance)
    if chance.random() < 0.5 and node.output:
        del node.output[-1]
    else:
        node.output.append(chance.choice((f"more{chance.randrange(3)}", "")))


def _change_attribute(model: ModelProto, chance: Random) -> None:
    node = _node(model, chance)
    if not node.attribute:
        name = chance.choice(
            ("axis", "axes", "perm", "group", "pads", "strides", "kernel_shape", "to", "alpha")
        )
        value = chance.choice((chance.choice(INTEGERS), [chance.choice(INTEGERS)], chance.choice(FLOATS)))
        node.attribute.append(helper.make_attribute(name, value))
        return
    attribute = chance.choice(node.attribute)
    match chance.randrange(4):
        case 0:
            node.attribute.remove(attribute)
        case 1:
            attribute.name = chance.choice(("", "axis", "unknown", "то"))
        case 2:
            attribute.type = chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 13))
        case _:
            _change_value(attribute, chance)


def _change_value(attribute: AttributeProto, chance: Random) -> None:
    if attribute.type == AttributeProto.INT:
        attribute.i = chance.choice(INTEGERS)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = chance.choice(FLOATS)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = chance.choice((b"", b"\xff\xfe", b"SAME_UPPER", b"linear", b"x" * 1000))
    elif attribute.type == AttributeProto.INTS:
        values = list(attribute.ints)
        if values and chance.random() < 0.6:
            values[chance.randrange(len(values))] = chance.choice(INTEGERS)
        else:
            values = [chance.choice(INTEGERS) for _ in range(chance.randrange(7))]
        del attribute.ints[:]
        attribute.ints.extend(values)
    elif attribute.type == AttributeProto.TENSOR:
        _bend_tensor(attribute.t, chance)


def _constant(model: ModelProto, chance: Random) -> None:
    graph = chance.choice(_graphs(model.graph))
    if graph.initializer:
        _bend_tensor(chance.choice(graph.initializer), chance)


def _bend_tensor(tensor: TensorProto, chance: Random) -> None:
    match chance.randrange(9):
        case 0 if tensor.dims:
            tensor.dims[chance.randrange(len(tensor.dims))] = chance.choice(DIMS)
        case 1:
            tensor.dims.append(chance.choice(DIMS))
        case 2:
            del tensor.dims[:]
        case 3:
            tensor.data_type = chance.choice((0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 14, 16, 17, 21, 22, 23, 99))
        case 4:
            tensor.raw_data = tensor.raw_data[: chance.randrange(len(tensor.raw_data) + 1)]
        case 5:
            tensor.float_data.extend([1.0, 2.0])
        case 6:
            tensor.name = chance.choice(NAMES)
        case 7:
            tensor.data_location = TensorProto.EXTERNAL
            _add_location(tensor, chance)
        case _:
            _set_numbers(tensor, chance)


def _set_numbers(tensor: TensorProto, chance: Random) -> None:
    try:
        array = numpy_helper.to_array(tensor).copy()
    except Exception:  # noqa: BLE001  an earlier wound; leave it
        return
    if array.dtype.kind not in "fiu" or not array.size:
        return
    choices = FLOATS if array.dtype.kind == "f" else INTEGERS
    with np.errstate(all="ignore"):
        flat = array.reshape(-1)
        value = chance.choice(choices)
        limits = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
        if limits is not None:
            value = min(max(int(value), limits.min), limits.max)
        if chance.random() < 0.3:
            flat[:] = value
        else:
            flat[chance.randrange(flat.size)] = value
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _add_location(tensor: TensorProto, chance: Random) -> None:
    locations = ("/etc/passwd", "../secret", "weights.bin", "link.bin", "", ".", "/dev/zero", "a\x00b", "..")
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=chance.choice(locations))
    if chance.random() < 0.7:
        wanted = ("0", "1", "-1", "4096", "x", "9" * 30, "1e3", "")
        tensor.external_data.add(key="offset", value=chance.choice(wanted))
        tensor.external_data.add(key="length", value=chance.choice(wanted))
    if chance.random() < 0.8:
        tensor.ClearField("raw_data")


def _change_value_info(model: ModelProto, chance: Random) -> None:
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    if not values:
        return
    value = chance.choice(values)
    kind = value.type.tensor_type
    match chance.randrange(6):
        case 0 if kind.shape.dim:
            chance.choice(kind.shape.dim).dim_value = chance.choice(DIMS)
        case 1 if kind.shape.dim:
            chance.choice(kind.shape.dim).dim_param = chance.choice(NAMES)
        case 2:
            kind.elem_type = chance.choice((0, 1, 2, 6, 7, 8, 9, 10, 11, 16, 17, 22, 99))
        case 3:
            kind.ClearField("shape")
        case 4:
            value.name = chance.choice((*NAMES, *_tensor_names(model.graph)))
        case _:
            value.ClearField("type")


def _change_interface(model: ModelProto, chance: Random) -> None:
    graph = model.graph
    match chance.randrange(5):
        case 0 if graph.input:
            del graph.input[chance.randrange(len(graph.input))]
        case 1 if graph.output:
            del graph.output[chance.randrange(len(graph.output))]
        case 2 if graph.output:
            graph.output.append(chance.choice(graph.output))
        case 3:
            name = chance.choice(_tensor_names(graph))
            graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        case _:
            name = chance.choice(_tensor_names(graph))
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]))


def _change_version(model: ModelProto, chance: Random) -> None:
    match chance.randrange(5):
        case 0 if model.opset_import:
            entry = chance.choice(model.opset_import)
            entry.version = chance.choice((-1, 0, 1, 5, 7, 9, 11, 13, 21, 24, 99, 2**40))
        case 1:
            del model.opset_import[:]
        case 2:
            model.opset_import.add(
                domain=chance.choice(("", "mine", "x" * 200)), version=chance.choice((1, 99))
            )
        case 3:
            model.ir_version = chance.choice((0, 1, 3, 7, 99, 2**40))
        case _:
            model.metadata_props.add(key=chance.choice(NAMES), value="x" * chance.choice((0, 10, 100000)))


def _nest(model: ModelProto, chance: Random) -> None:
    """The last node moves into branches in branches."""
    if not model.graph.node:
        return
    inner = NodeProto()
    inner.CopyFrom(model.graph.node[-1])
    for level in range(chance.choice((1, 2, 5, 30))):
        output = inner.output[0] if inner.output else "none"
        value = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        body = helper.make_graph([inner], f"level{level}", [], [value])
        inner = helper.make_node(
            "If", ["fuzz_flag"], [output], name=f"level{level}", then_branch=body, else_branch=body
        )
        if level > 8:  # both branches would double the size each time
            inner.attribute.remove(inner.attribute[1])
    model.graph.node[-1].CopyFrom(inner)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "fuzz_flag"))


def _sparse(model: ModelProto, chance: Random) -> None:
    values = numpy_helper.from_array(np.ones(2, np.float32), chance.choice((*NAMES, "w")))
    indices = numpy_helper.from_array(np.array([0, chance.choice((1, 2**40, -5))]), "i")
    dims = [chance.choice(DIMS), chance.choice(DIMS)]
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, dims))


def _function(model: ModelProto, chance: Random) -> None:
    """A function that calls itself, or one that shadows an operator."""
    name = chance.choice(("Loop1", "Relu", "Conv"))
    domain = chance.choice(("mine", ""))
    body = [helper.make_node(name, ["a"], ["b"], domain=domain)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    model.functions.append(helper.make_function(domain, name, ["a"], ["b"], body, imports))
    node = _node(model, chance)
    node.op_type, node.domain = name, domain


def _bytes_name(model: ModelProto, chance: Random) -> None:
    """Quotes and control characters in names; letters that are not UTF-8 need bent bytes."""
    name = chance.choice(("\n", "\x1b[31m", "'", '"', "\u202e", "\x00", "%s", "{x}", "*", "re:("))
    node = _node(model, chance)
    node.name = name
    if node.output and chance.random() < 0.5:
        old = node.output[0]
        for each in model.graph.node:
            for index, wanted in enumerate(each.input):
                if wanted == old:
                    each.input[index] = name
        node.output[0] = name


BENDS: tuple[Bend, ...] = (
    *(_rewire, _rename_output, _change_operator, _change_operator, _drop_node, _repeat_node, _shuffle_nodes),
    *(_change_inputs, _change_outputs, _change_attribute, _change_attribute, _change_attribute),
    *(_constant, _constant, _constant, _change_value_info, _change_value_info, _change_interface),
    *(_change_version, _nest, _sparse, _function, _bytes_name),
)
