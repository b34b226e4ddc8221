"""Random small graphs: whatever their shape, the quantized model is sound and close."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from helpers import activations, assert_sound, build, feeds, initializers, node, normal, quantize, run, sqnr

Shape = tuple[int, ...]
UNARY = ("Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "Neg", "Softmax", "Transpose", "Reshape")
IMAGE_ONLY = ("Conv", "Depthwise", "MaxPool", "AveragePool", "GlobalAveragePool")


@dataclass
class Sketch:
    """A graph in the making: the tensors that exist so far, with their shapes."""

    tensors: dict[str, Shape]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    def add(self, op: str, inputs: list[str], shape: Shape, **attributes: Any) -> None:
        out = f"t{len(self.nodes)}"
        self.nodes.append(node(op, inputs, [out], name=f"{op}_{len(self.nodes)}", **attributes))
        self.tensors[out] = shape

    def constant(self, shape: Shape, *, reuse: bool) -> str:
        """A weight; with `reuse` one of the same shape that another node has already."""
        known = [name for name, a in self.constants.items() if np.shape(a) == shape and name[0] == "w"]
        if reuse and known:
            return known[0]
        name = f"w{len(self.constants)}"
        fan = max(1, int(np.prod(shape[1:])))
        self.constants[name] = normal(*shape, seed=len(self.constants), scale=fan**-0.5)
        return name

    def raw(self, content: Any) -> str:
        """A constant that is no weight: a shape or a bound."""
        name = f"k{len(self.constants)}"
        self.constants[name] = np.asarray(content)
        return name


def _image(draw: st.DrawFn, sketch: Sketch, x: str, op: str) -> None:
    shape = sketch.tensors[x]
    n, c, h, w = shape
    if op in ("Conv", "Depthwise"):
        group = c if op == "Depthwise" else 1
        outs = c if group > 1 else draw(st.sampled_from([2, 4]))
        reuse = draw(st.booleans())
        inputs = [x, sketch.constant((outs, c // group, 3, 3), reuse=reuse)]
        if draw(st.booleans()):
            inputs.append(sketch.constant((outs,), reuse=reuse))
        sketch.add("Conv", inputs, (n, outs, h, w), pads=[1, 1, 1, 1], group=group)
    elif op == "GlobalAveragePool":
        sketch.add(op, [x], (n, c, 1, 1))
    elif h >= 2:
        sketch.add(op, [x], (n, c, h // 2, w // 2), kernel_shape=[2, 2], strides=[2, 2])


def _unary(draw: st.DrawFn, sketch: Sketch, x: str, op: str) -> None:
    shape = sketch.tensors[x]
    if op == "Transpose":
        order = list(range(len(shape)))
        if len(order) == 4:
            order[2], order[3] = 3, 2
        sketch.add(op, [x], tuple(shape[i] for i in order), perm=order)
    elif op == "Reshape":
        flat = (shape[0], int(np.prod(shape[1:])))
        sketch.add(op, [x, sketch.raw(np.int64(flat))], flat)
    elif op == "Clip":
        low, high = draw(st.sampled_from([(0.0, 6.0), (-1.0, 1.0), (0.0, 1.0), (0.25, 2.0)]))
        bounds = [sketch.raw(np.float32(low)), sketch.raw(np.float32(high))]
        sketch.add(op, [x, *bounds], shape)
    else:
        sketch.add(op, [x], shape)


def _binary(draw: st.DrawFn, sketch: Sketch, x: str) -> None:
    shape = sketch.tensors[x]
    op = draw(st.sampled_from(["Add", "Mul", "Concat"]))
    others = [name for name, other in sketch.tensors.items() if other == shape]
    second = draw(st.sampled_from(others))
    if op != "Concat" and draw(st.booleans()):
        second = sketch.constant((1,) * (len(shape) - 1) + shape[-1:], reuse=draw(st.booleans()))
    if op == "Concat":
        if shape[1] <= 8:
            sketch.add(op, [x, second], (shape[0], 2 * shape[1], *shape[2:]), axis=1)
    else:
        sketch.add(op, [x, second], shape)


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    inputs = {"x": (1, 4, 6, 6)} | ({"z": (1, 4, 6, 6)} if draw(st.booleans()) else {})
    sketch = Sketch(dict(inputs))
    for _ in range(draw(st.integers(1, 8))):
        x = draw(st.sampled_from(list(sketch.tensors)))
        rank = len(sketch.tensors[x])
        kind = draw(
            st.sampled_from(
                ["image", "image", "unary", "binary"] if rank == 4 else ["flat", "unary", "binary"]
            )
        )
        if kind == "image":
            _image(draw, sketch, x, draw(st.sampled_from(IMAGE_ONLY)))
        elif kind == "flat":
            weight = sketch.constant((sketch.tensors[x][1], 4), reuse=draw(st.booleans()))
            bias = [sketch.constant((4,), reuse=draw(st.booleans()))] if draw(st.booleans()) else []
            sketch.add("Gemm", [x, weight, *bias], (1, 4))
        elif kind == "unary":
            _unary(draw, sketch, x, draw(st.sampled_from(UNARY)))
        else:
            _binary(draw, sketch, x)
    if not sketch.nodes:
        sketch.add("Relu", ["x"], inputs["x"])
    made = [out for n in sketch.nodes for out in n.output]
    read = {name for n in sketch.nodes for name in n.input}
    inner = draw(st.sets(st.sampled_from(made), max_size=2))
    outputs = {name: sketch.tensors[name] for name in made if name not in read or name in inner}
    constants = {name: a for name, a in sketch.constants.items() if name in read}
    return build(sketch.nodes, inputs, outputs, constants)


RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "a8w8": ("a8w8", {}),
    "u8s8_aaws": ("u8s8_aaws", {}),
    "s8s8_aaws-aligned": ("s8s8_aaws", {"placement": {"align_concat": True, "align_pool": True}}),
    "a16w8-dedicated": ("a16w8", {"placement": {"dedicated_pairs": True}}),
    "per-channel": ("a8w8", {"weights": {"per_channel": True}}),
}


@pytest.mark.parametrize("name", RECIPES)
@given(model=graphs(), pick=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
def test_random_graphs(name: str, model: onnx.ModelProto, pick: Any) -> None:
    recipe, changes = RECIPES[name]
    data = feeds({v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input})
    result = quantize(model, recipe, data, **changes)
    assert_sound(model, result.model)
    note(onnx.printer.to_text(model))
    event("quantized" if result.record.quantized else "passed through")
    for feed in data:
        for a, b in zip(run(model, feed), run(result.model, feed), strict=True):
            assert a.shape == b.shape
            assert np.isfinite(b).all()
    # Eight layers deep, an 8-bit model is still far from noise; a lost Relu or a wrong scale is not.
    # Where the inputs of a Concat share a scale, a small one among them keeps few of its bits.
    assert sqnr(model, result, data) > (5 if name.endswith("aligned") else 14)


@given(model=graphs(), pick=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
def test_excluded_nodes_keep_their_float_weights(model: onnx.ModelProto, pick: Any) -> None:
    chosen = pick.choice([n.name for n in model.graph.node])
    plain = {"fold_batch_norm": False, "fold_constants": False, "unshare_biases": False}
    result = quantize(model, "a8w8", selection={"exclude": [chosen]}, prepare=plain)
    assert_sound(model, result.model)
    before, after = initializers(model), initializers(result.model)
    [old] = [n for n in model.graph.node if n.name == chosen]
    [new] = [n for n in result.model.graph.node if n.name == chosen]
    for was, now in zip(old.input, new.input, strict=True):
        if was in before:
            assert was == now
            np.testing.assert_array_equal(before[was], after[now])


@given(model=graphs())
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
def test_the_same_model_and_data_give_the_same_file(model: onnx.ModelProto) -> None:
    first, second = (quantize(model, "a8w8").model for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert activations(first).keys() == activations(second).keys()
