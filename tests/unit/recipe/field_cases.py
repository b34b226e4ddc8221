"""For every field of the recipe: a model on which the field makes a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx

from helpers import build, feeds, node, normal, rng
from transformer_models import residual_sum, rows_of_noise, tokens, transformer

X = {"x": [1, 3, 8, 8]}
W3, W4 = normal(4, 3, 3, 3), normal(4, 4, 1, 1, seed=1)


@dataclass(frozen=True, slots=True)
class Case:
    """Two recipes that differ in one field, and the model and data that show it."""

    model: Callable[[], onnx.ModelProto]
    after: Any
    before: Any = None  # None: the field is left out
    base: dict[str, Any] = field(default_factory=dict)
    recipe: str = "a8w8_minmax"
    data: Callable[[], Any] | None = None


def silu() -> onnx.ModelProto:
    """x * sigmoid(x) between two layers, where XINT8 has HardSigmoid."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Sigmoid", ["c"], ["s"], name="sigmoid"),
        node("Mul", ["c", "s"], ["m"], name="mul"),
        node("Conv", ["m", "k"], ["y"], name="conv2"),
    ]
    constants = {"w": normal(4, 3, 3, 3), "b": normal(4, seed=2), "k": W4}
    return build(nodes, X, ["y"], constants)


def uneven() -> onnx.ModelProto:
    """Channels of very different ranges: what the improving steps are for."""
    spread = np.exp2(rng(5).uniform(-5, 3, (8, 1, 1, 1))).astype(np.float32)
    nodes = [
        node("Sigmoid", ["x"], ["s"], name="sigmoid"),
        node("Conv", ["s", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "k", "d"], ["t"], name="conv2"),
        node("Relu", ["t"], ["u"], name="relu2"),
        node("Conv", ["u", "m"], ["y"], name="conv3"),
    ]
    constants = {
        "w": normal(8, 3, 3, 3) * spread,
        "b": np.linspace(-2, 30, 8, dtype=np.float32),
        "k": np.abs(normal(8, 8, 1, 1, seed=2)) * spread.reshape(1, 8, 1, 1)[:, ::-1],
        "d": np.linspace(1, 9, 8, dtype=np.float32),
        "m": normal(4, 8, 1, 1, seed=3),
    }
    return build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)


def spectral() -> onnx.ModelProto:
    """The logarithm of a power spectrum, and a network behind it."""
    nodes = [
        node("Conv", ["x", "w"], ["wave"], name="transform"),
        node("Mul", ["wave", "wave"], ["power"], name="square"),
        node("Add", ["power", "floor"], ["safe"], name="floor"),
        node("Log", ["safe"], ["spectrum"], name="log"),
        node("Conv", ["spectrum", "k"], ["y"], name="network"),
    ]
    constants = {"w": W3, "floor": np.float32(1e-6), "k": W4}
    return build(nodes, X, ["y"], constants)


def boxes() -> onnx.ModelProto:
    """Boxes and scores in one tensor."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="layer"),
        node("Sigmoid", ["c"], ["scores"], name="scores"),
        node("Concat", ["c", "scores"], ["y"], name="join", axis=1),
    ]
    return build(nodes, X, ["y"], {"w": W3})


def row_norm() -> onnx.ModelProto:
    """Rows divided by the root of their mean square, as no pass fuses it."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="layer"),
        node("Mul", ["c", "c"], ["squares"], name="square"),
        node("ReduceMean", ["squares"], ["power"], name="mean", axes=[2]),
        node("Add", ["power", "floor"], ["safe"], name="floor"),
        node("Sqrt", ["safe"], ["root"], name="root"),
        node("Div", ["c", "root"], ["y"], name="divide"),
    ]
    return build(nodes, X, ["y"], {"w": W3, "floor": np.float32(1e-3)})


def carried() -> onnx.ModelProto:
    """A Reshape in front of a Softplus, which stays in float; and a layer."""
    nodes = [
        node("Reshape", ["x", "shape"], ["r"], name="reshape"),
        node("Softplus", ["r"], ["s"], name="softplus"),
        node("MatMul", ["s", "w"], ["y"], name="layer"),
    ]
    return build(nodes, X, ["y"], {"shape": np.array([1, -1, 64]), "w": normal(64, 8)})


def loud() -> onnx.ModelProto:
    """One channel is a hundred times as large as the others, and hardly counts."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "k"], ["y"], name="conv2"),
    ]
    first, second = normal(8, 3, 3, 3), normal(8, 8, 1, 1, seed=2)
    first[0] *= 100
    second[:, 0] *= 1e-5
    return build(nodes, {"x": [1, 3, 8, 8]}, ["y"], {"w": first, "b": np.zeros(8, np.float32), "k": second})


def residual() -> onnx.ModelProto:
    """Sums whose results lie in the middle between two codes, half of the time."""
    nodes = [node("Conv", ["x", "w"], ["c0"], name="conv0", pads=[1, 1, 1, 1])]
    for block in range(1, 4):
        nodes += [
            node("Conv", [f"c{block - 1}", f"w{block}"], [f"r{block}"], name=f"conv{block}", pads=[1] * 4),
            node("Add", [f"c{block - 1}", f"r{block}"], [f"c{block}"], name=f"sum{block}"),
        ]
    constants = {f"w{block}": normal(8, 8, 3, 3, seed=block, scale=0.1) for block in range(1, 4)}
    return build(nodes, {"x": [1, 3, 8, 8]}, ["c3"], {"w": normal(8, 3, 3, 3), **constants})


def many() -> Any:
    """Enough samples for a step to learn from some and be judged by others."""
    return feeds({"x": [1, 3, 8, 8]}, count=12)


FAST = {"effort": "fast"}
SMOOTH = {"improve": {"smooth": {"enabled": True}}}
ROTATE = {"improve": {"rotate": {"enabled": True}}}
pre_norm = partial(transformer, blocks=1)
headless = partial(transformer, blocks=1, head=False)
outlying = partial(residual_sum, 40.0)
spiky = partial(transformer, blocks=1, spiky=True)
spiky_post_norm = partial(transformer, blocks=1, spiky=True, post=True)


def matrix() -> onnx.ModelProto:
    """For weights in few bits."""
    return build([node("MatMul", ["x", "k"], ["y"])], {"x": [8, 64]}, ["y"], {"k": normal(64, 8)})


def entangled() -> list[dict[str, np.ndarray]]:
    """Inputs that depend on each other: what GPTQ is for."""
    return [{"x": normal(8, 6, seed=index) @ normal(6, 64, seed=99)} for index in range(8)]


def cnn() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "k"], ["y"], name="conv2"),
    ]
    return build(nodes, X, ["y"], {"w": W3, "b": normal(4, seed=2), "k": W4})


def two_outputs() -> onnx.ModelProto:
    """The first output comes from one layer, the second from both."""
    nodes = [
        node("Conv", ["x", "w"], ["y"], name="conv"),
        node("Conv", ["y", "k"], ["z"], name="conv2"),
    ]
    return build(nodes, X, ["y", "z"], {"w": W3, "k": 100 * W4})


ONE_OUTPUT = {"mixed": {"type": "int16", "threshold": 10.0, "goal": "quality"}}


def heavy_weights() -> onnx.ModelProto:
    """It pays to cut the largest."""
    weight = rng().standard_t(3, (10, 100)).astype(np.float32)
    return build([node("MatMul", ["x", "k"], ["y"])], {"x": [2, 10]}, ["y"], {"k": weight})


def chain(*nodes: onnx.NodeProto, opset: int = 17, inputs: Any = None, **constants: Any) -> Any:
    """A model from x to y."""
    return lambda: build(nodes, inputs or X, ["y"], constants, opset=opset)


def heavy_tails() -> list[dict[str, np.ndarray]]:
    generator = rng(3)
    return [{"x": generator.standard_t(2, (1, 3, 8, 8)).astype(np.float32)} for _ in range(4)]


def lopsided() -> list[dict[str, np.ndarray]]:
    return [{"x": np.exp(sample["x"]) - 1} for sample in feeds(X, 4)]


def growing() -> list[dict[str, np.ndarray]]:
    return [{"x": sample["x"] * (1 + i)} for i, sample in enumerate(feeds(X, 5))]


def pixels() -> list[np.ndarray]:
    return [rng(i).integers(0, 256, (12, 10, 3), dtype=np.uint8) for i in range(3)]


def square_pixels() -> list[np.ndarray]:
    return [image[:10] for image in pixels()]


open_image = chain(node("Mul", ["x", "k"], ["y"]), inputs={"x": [1, 3, "h", "w"]}, k=np.float32(2))
any_layout = chain(node("Mul", ["x", "k"], ["y"]), inputs={"x": [1, "a", "b", "c"]}, k=np.float32(2))

HALF = {"scale": "unit"}
POWER = {
    "activations": {"scale": "power_of_two"},
    "weights": {"scale": "power_of_two"},
    "calibration": {"method": "mse"},
}


def layer_norm(axes: list[int], gamma: list[int]) -> Any:
    return chain(
        node("ReduceMean", ["x"], ["mean"], axes=axes),
        node("Sub", ["x", "mean"], ["centered"]),
        node("Mul", ["centered", "centered"], ["square"]),
        node("ReduceMean", ["square"], ["variance"], axes=axes),
        node("Add", ["variance", "eps"], ["padded"]),
        node("Sqrt", ["padded"], ["root"]),
        node("Div", ["centered", "root"], ["normal"]),
        node("Mul", ["normal", "gamma"], ["scaled"]),
        node("Add", ["scaled", "beta"], ["y"]),
        eps=np.float32(1e-5),
        gamma=normal(*gamma),
        beta=normal(*gamma, seed=1),
    )


BATCH_NORM = {
    "g": normal(3),
    "h": normal(3, seed=1),
    "m": normal(3, seed=2),
    "v": np.ones(3, np.float32),
}
shared_layers = {"w": normal(3, 3, 1, 1), "b": normal(3, seed=2)}
hard = {"alpha": 1 / 6, "beta": 0.5}


def two_scales() -> onnx.ModelProto:
    """An Add whose inputs lie far apart."""
    nodes = [
        node("Mul", ["x", "tiny"], ["t"], name="shrink"),
        node("Add", ["x", "t"], ["s"], name="add"),
        node("Conv", ["s", "w"], ["y"], name="conv"),
    ]
    return build(nodes, X, ["y"], {"tiny": np.float32(2.0**-12), "w": W3})


def wide_layer(weight: float, bias: float) -> Any:
    return chain(
        node("Conv", ["x", "w", "b"], ["y"], name="conv"),
        w=W3 * np.float32(weight),
        b=normal(4, seed=2) * np.float32(bias),
    )


CASES: dict[str, Case] = {
    "mode": Case(
        chain(node("MatMul", ["x", "k"], ["y"]), inputs={"x": [2, 4]}, k=normal(4, 3)), "dynamic", "static"
    ),
    "activations.type": Case(cnn, "uint8"),
    "activations.symmetric": Case(cnn, False),
    "activations.scale": Case(cnn, "power_of_two"),
    "activations.scaled": Case(cnn, True, recipe="bf16"),
    "weights.type": Case(cnn, "int16"),
    "weights.symmetric": Case(cnn, False),
    "weights.scale": Case(cnn, "power_of_two"),
    "weights.per_channel": Case(cnn, True),
    "weights.reduce_range": Case(cnn, True),
    "weights.method": Case(heavy_weights, "mse"),
    "weights.scaled": Case(cnn, True, recipe="bf16"),
    "bias.type": Case(cnn, "float"),
    "calibration.method": Case(cnn, "entropy"),
    "calibration.percentile": Case(cnn, 90.0, base={"calibration": {"method": "percentile"}}),
    "calibration.candidates": Case(cnn, [80.0], base={"calibration": {"method": "layerwise_percentile"}}),
    "calibration.metric": Case(
        cnn,
        "mse",
        base={
            "activations": {"type": "uint8"},
            "calibration": {"method": "layerwise_percentile", "candidates": [90, 95, 99, 99.9, 99.99]},
        },
        data=heavy_tails,
    ),
    "calibration.scenario": Case(cnn, "p3", base={"calibration": {"method": "distribution"}}),
    "calibration.symmetric_range": Case(
        cnn,
        False,
        base={
            "activations": {"symmetric": False},
            "calibration": {"method": "percentile", "percentile": 95},
        },
        data=lopsided,
    ),
    "calibration.mode": Case(cnn, "most_common", base=POWER, data=growing),
    "calibration.moving_average": Case(cnn, "mean", data=growing),
    "calibration.margin": Case(cnn, 2.0),
    "selection.op_types": Case(cnn, ["Relu"]),
    "selection.extra_op_types": Case(
        chain(node("Conv", ["x", "w"], ["c"]), node("Exp", ["c"], ["y"]), w=W3), ["Exp"]
    ),
    "selection.all_op_types": Case(
        chain(node("Conv", ["x", "w"], ["c"]), node("Exp", ["c"], ["y"]), w=W3), True
    ),
    "selection.include": Case(cnn, ["conv2"]),
    "selection.exclude": Case(cnn, ["conv2"]),
    "selection.exclude_subgraphs": Case(cnn, [{"inputs": ["relu"], "outputs": ["conv2"]}]),
    "selection.exclude_subgraphs.inputs": Case(
        cnn, [{"inputs": ["conv"], "outputs": ["conv2"]}], [{"inputs": ["conv2"], "outputs": ["conv2"]}]
    ),
    "selection.exclude_subgraphs.outputs": Case(
        cnn, [{"inputs": ["conv"], "outputs": ["conv2"]}], [{"inputs": ["conv"], "outputs": ["conv"]}]
    ),
    "overrides": Case(cnn, [{"tensors": ["x"], "type": "int16"}]),
    "overrides.tensors": Case(
        cnn, [{"tensors": ["x"], "type": "int16"}], [{"tensors": ["y"], "type": "int16"}]
    ),
    "overrides.nodes": Case(
        cnn, [{"nodes": ["conv"], "type": "int16"}], [{"nodes": ["conv2"], "type": "int16"}]
    ),
    "overrides.type": Case(cnn, [{"tensors": ["x"], "type": "float"}], [{"tensors": ["x"], "type": "int16"}]),
    "overrides.symmetric": Case(cnn, [{"tensors": ["x"], "symmetric": False}], []),
    "overrides.per_channel": Case(cnn, [{"nodes": ["conv"], "per_channel": True}], []),
    "overrides.range": Case(cnn, [{"tensors": ["x"], "range": [-9, 9]}], []),
    "data.samples": Case(cnn, 2),
    "data.mean": Case(cnn, [0.5, 0.4, 0.3], base={"data": HALF}, data=pixels),
    "data.std": Case(cnn, [0.5, 0.4, 0.3], base={"data": HALF}, data=pixels),
    "data.scale": Case(cnn, "raw", "unit", data=pixels),
    "data.resize": Case(cnn, [8, 8], 9, data=pixels),
    "data.crop": Case(open_image, 6, base={"data": {"resize": 8}}, data=pixels),
    "data.layout": Case(any_layout, "nhwc", "nchw", base={"data": HALF}, data=square_pixels),
    "data.bgr": Case(cnn, True, base={"data": HALF}, data=pixels),
    "data.letterbox": Case(cnn, True, base={"data": HALF}, data=pixels),
    "data.interpolation": Case(cnn, "nearest", base={"data": HALF}, data=pixels),
    "prepare.fold_constants": Case(
        chain(node("Sqrt", ["p"], ["k"]), node("Mul", ["x", "k"], ["y"]), p=np.float32([4.0])), False
    ),
    "prepare.fold_batch_norm": Case(
        chain(
            node("Conv", ["x", "w"], ["c"]),
            node("BatchNormalization", ["c", "g", "h", "m", "v"], ["y"]),
            w=normal(3, 3, 1, 1),
            **BATCH_NORM,
        ),
        False,
    ),
    "prepare.fuse_instance_norm": Case(layer_norm([2, 3], [1, 3, 1, 1]), False),
    "prepare.fuse_layer_norm": Case(layer_norm([-1], [8]), False),
    "prepare.fuse_gelu": Case(
        chain(
            node("Div", ["x", "root"], ["d"]),
            node("Erf", ["d"], ["e"]),
            node("Add", ["e", "one"], ["o"]),
            node("Mul", ["x", "o"], ["p"]),
            node("Mul", ["p", "half"], ["y"]),
            opset=20,
            root=np.float32(2**0.5),
            one=np.float32(1),
            half=np.float32(0.5),
        ),
        False,
    ),
    "prepare.fuse_l2_norm": Case(
        chain(
            node("ReduceL2", ["x"], ["n"], axes=[1]),
            node("Clip", ["n", "tiny"], ["s"]),
            node("Div", ["x", "s"], ["y"]),
            tiny=np.float32(1e-12),
        ),
        False,
    ),
    "prepare.fold_pad": Case(
        chain(
            node("Pad", ["x", "pads"], ["p"]),
            node("Conv", ["p", "w"], ["y"]),
            pads=np.int64([0, 0, 1, 1, 0, 0, 1, 1]),
            w=W3,
        ),
        False,
    ),
    "prepare.decompose_hard_swish": Case(chain(node("HardSwish", ["x"], ["y"])), False),
    "prepare.unshare_biases": Case(
        chain(
            node("Conv", ["x", "w", "b"], ["c"]),
            node("Conv", ["c", "k", "b"], ["y"]),
            **shared_layers,
            k=normal(3, 3, 1, 1, seed=5),
        ),
        False,
    ),
    "prepare.unshare_weights": Case(
        chain(node("Conv", ["x", "w", "b"], ["c"]), node("Conv", ["c", "w", "b"], ["y"]), **shared_layers),
        True,
    ),
    "prepare.scale_clip_bounds": Case(
        chain(
            node("Conv", ["x", "w"], ["c"]),
            node("Clip", ["c", "low", "high"], ["r"]),
            node("Conv", ["r", "k"], ["y"]),
            w=W3,
            k=W4,
            low=np.float32(0),
            high=np.float32(6),
        ),
        True,
    ),
    "prepare.explicit_conv_attributes": Case(cnn, False),
    "prepare.split_to_slice": Case(
        chain(
            node("Split", ["x", "sizes"], ["a", "b"], axis=1),
            node("Concat", ["b", "a"], ["y"], axis=1),
            sizes=np.int64([1, 2]),
        ),
        False,
    ),
    "prepare.batch_norm_to_conv": Case(
        chain(node("BatchNormalization", ["x", "g", "h", "m", "v"], ["y"]), **BATCH_NORM), False
    ),
    "prepare.reduce_mean_to_global_average_pool": Case(
        chain(node("ReduceMean", ["x"], ["y"], axes=[2, 3])), False
    ),
    "prepare.split_large_pools": Case(
        chain(node("GlobalAveragePool", ["x"], ["y"]), inputs={"x": [1, 3, 32, 32]}), False
    ),
    "prepare.nchw_to_nhwc": Case(
        # Height, width and channels alike: the data fit either way.
        chain(node("Conv", ["x", "k"], ["y"]), inputs={"x": [1, 4, 4, 4]}, k=W4),
        True,
    ),
    "prepare.cut_head": Case(
        chain(
            node("Conv", ["x", "w"], ["c"]),
            node("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1]),
            inputs={"x": [1, 3, 8, 8]},
            w=W3,
        ),
        True,
    ),
    "prepare.fixed_shapes": Case(
        chain(node("Conv", ["x", "w"], ["y"]), inputs={"x": ["n", 3, 8, 8]}, w=W3),
        {"x": [2, 3, 8, 8]},
        data=lambda: feeds({"x": (2, 3, 8, 8)}),
    ),
    "prepare.fixed_inputs": Case(
        chain(node("Mul", ["x", "gain"], ["y"]), inputs={"x": [1, 3, 8, 8], "gain": []}),
        {"gain": 2.0},
        data=lambda: [{**sample, "gain": np.asarray(2, np.float32)} for sample in feeds(X, 4)],
    ),
    "placement.operators": Case(cnn, "matmul"),
    "placement.domain": Case(cnn, "ai.onnx"),
    "placement.quantize_passthrough_inputs": Case(
        chain(node("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]), node("Exp", ["t"], ["y"])), False
    ),
    "placement.fold_relu": Case(cnn, False, True, recipe="u8s8_aaws"),
    "placement.fuse_activations": Case(cnn, False),
    "placement.keep_pair_before": Case(cnn, ["Relu"]),
    "placement.no_pair_between": Case(
        chain(
            node("Mul", ["x", "k"], ["m"]),
            node("Add", ["k", "m"], ["y"]),
            k=normal(1, 3, 1, 1),
        ),
        [["Mul", "Add"]],
    ),
    "placement.align_concat": Case(
        chain(node("Mul", ["x", "k"], ["m"]), node("Concat", ["x", "m"], ["y"], axis=1), k=np.float32([7])),
        False,
    ),
    "placement.align_pool": Case(chain(node("AveragePool", ["x"], ["y"], kernel_shape=[2, 2])), True),
    "placement.align_slice": Case(
        chain(
            node("Slice", ["x", "start", "end", "axes"], ["y"]),
            start=np.int64([0]),
            end=np.int64([1]),
            axes=np.int64([1]),
        ),
        True,
    ),
    "placement.align_pad": Case(
        chain(
            node("Pad", ["x", "pads", "fill"], ["p"]),
            node("Mul", ["p", "k"], ["y"]),
            pads=np.int64([0, 0, 1, 1, 0, 0, 1, 1]),
            fill=np.float32(20),
            k=np.float32([2]),
        ),
        True,
    ),
    "placement.constants_as_activations": Case(
        chain(node("Mul", ["x", "k"], ["y"]), k=normal(1, 3, 1, 1)), False, True, recipe="a16w8_minmax"
    ),
    "placement.matmul_const_only": Case(chain(node("MatMul", ["x", "x"], ["y"])), True),
    "placement.weights_only": Case(cnn, True),
    "placement.dedicated_pairs": Case(
        chain(
            node("Conv", ["x", "w"], ["a"]),
            node("Conv", ["x", "v"], ["b"]),
            node("Add", ["a", "b"], ["y"]),
            w=W3,
            v=normal(4, 3, 3, 3, seed=9),
        ),
        True,
    ),
    "placement.dedicated_dequantizers": Case(
        chain(
            node("Conv", ["x", "w"], ["a"]),
            node("Conv", ["x", "v"], ["b"]),
            node("Add", ["a", "b"], ["y"]),
            w=W3,
            v=normal(4, 3, 3, 3, seed=9),
        ),
        True,
    ),
    "placement.skip_output_op_types": Case(cnn, ["Conv"]),
    "floats.form": Case(cnn, "cast", recipe="bf16"),
    "floats.clip": Case(cnn, True, recipe="bf16"),
    "mixed.type": Case(cnn, "int16"),
    "mixed.op_types": Case(cnn, ["Relu"], base={"mixed": {"type": "int16"}}),
    "mixed.weights": Case(cnn, "int8", base={"mixed": {"type": "int16"}}),
    "mixed.include": Case(cnn, ["conv2"], base={"mixed": {"type": "int16"}}),
    "mixed.exclude": Case(cnn, ["conv2"], base={"mixed": {"type": "int16"}}),
    "mixed.threshold": Case(cnn, 0.0, base={"mixed": {"type": "int16"}}),
    "mixed.goal": Case(cnn, "quality", base={"mixed": {"type": "int16", "threshold": 0.0}}),
    "mixed.metric": Case(cnn, "sqnr", base={"mixed": {"type": "int16", "threshold": 0.1}}),
    "mixed.output": Case(two_outputs, 1, base=ONE_OUTPUT),
    "blocks.rounding": Case(cnn, "half_up", recipe="bfp16"),
    "blocks.block_size": Case(cnn, 4, recipe="mxint8"),
    "blocks.axis": Case(cnn, 0, recipe="bfp16"),
    "blocks.refine_axis": Case(heavy_weights, False, recipe="bfp16", data=lambda: feeds({"x": [2, 10]})),
    "blocks.bit_width": Case(cnn, 12, recipe="bfp16"),
    "blocks.sub_block_size": Case(cnn, 4, recipe="mx9"),
    "blocks.sub_block_shift_bits": Case(cnn, 2, recipe="mx9"),
    "blocks.compiler": Case(cnn, True, recipe="bfp16"),
    "blocks.bfloat16_first": Case(cnn, True, recipe="mx6"),
    "npu.adjust_shift_read": Case(two_scales, False, True, recipe="xint8_plain"),
    "npu.adjust_shift_write": Case(
        chain(node("Add", ["x", "k"], ["y"]), k=np.float32([-100])),
        False,
        True,
        recipe="xint8_plain",
        data=lambda: [{"x": 100 + sample["x"] / 1000} for sample in feeds(X)],
    ),
    "npu.adjust_shift_cut": Case(
        # A layer with tiny weights whose output shares the scale of something large.
        chain(
            node("Conv", ["x", "w"], ["c"]),
            node("Concat", ["c", "x"], ["y"], axis=1),
            w=normal(3, 3, 1, 1) * np.float32(2.0**-20),
        ),
        False,
        True,
        recipe="xint8_plain",
    ),
    "npu.adjust_shift_bias": Case(wide_layer(1, 2.0**14), False, True, recipe="xint8_plain"),
    "npu.adjust_hard_sigmoid": Case(
        chain(node("HardSigmoid", ["x"], ["h"], **hard), node("Conv", ["h", "w"], ["y"]), w=W3),
        False,
        True,
        recipe="xint8_plain",
        data=lambda: feeds(X, scale=4096),
    ),
    "npu.adjust_shift_swish": Case(
        # The product shares the scale of something large.
        chain(
            node("HardSigmoid", ["x"], ["h"], **hard),
            node("Mul", ["x", "h"], ["p"]),
            node("Mul", ["x", "k"], ["big"]),
            node("Concat", ["p", "big"], ["y"], axis=1),
            k=np.float32([4096]),
        ),
        False,
        True,
        recipe="xint8_plain",
    ),
    "npu.leaky_relu": Case(chain(node("LeakyRelu", ["x"], ["y"], alpha=0.1)), False, recipe="xint8_plain"),
    "npu.sigmoid_to_hard_sigmoid": Case(chain(node("Sigmoid", ["x"], ["y"])), False, recipe="xint8_plain"),
    "npu.hard_sigmoid": Case(
        chain(node("HardSigmoid", ["x"], ["h"], **hard), node("Conv", ["h", "w"], ["y"]), w=W3),
        False,
        recipe="xint8_plain",
    ),
    "npu.average_pool": Case(
        chain(node("AveragePool", ["x"], ["p"], kernel_shape=[3, 3]), node("Conv", ["p", "w"], ["y"]), w=W3),
        False,
        recipe="xint8_plain",
    ),
    "npu.reduce_mean": Case(
        chain(node("ReduceMean", ["x"], ["m"], axes=[1]), node("Mul", ["m", "k"], ["y"]), k=np.float32([2])),
        False,
        recipe="xint8_plain",
    ),
    "npu.softmax": Case(chain(node("Softmax", ["x"], ["y"], axis=-1)), True, recipe="xint8_plain"),
    "npu.instance_norm": Case(
        chain(
            node("InstanceNormalization", ["x", "g", "h"], ["y"]),
            g=np.ones(3, np.float32),
            h=np.zeros(3, np.float32),
        ),
        True,
        recipe="xint8_plain",
    ),
    "npu.clip": Case(
        chain(
            node("Conv", ["x", "w"], ["c"]),
            node("Clip", ["c", "low", "high"], ["y"]),
            w=W3,
            low=np.float32(-1.5),
            high=np.float32(1.7),
        ),
        True,
        recipe="xint8_plain",
    ),
    "npu.halves_up": Case(residual, True, base=FAST, recipe="xint8_plain", data=many),
    "npu.clip_to_relu": Case(
        chain(
            node("Conv", ["x", "w"], ["c"]),
            node("Clip", ["c", "low", "high"], ["y"]),
            w=W3,
            low=np.float32(0),
            high=np.float32(6),
        ),
        True,
    ),
    "output.external_data": Case(
        chain(node("Gemm", ["x", "k"], ["y"]), inputs={"x": [1, 64]}, k=normal(64, 64)), True
    ),
    "output.opset": Case(cnn, 21),
    "output.half_weights": Case(cnn, True, recipe="bf16"),
    "output.strip_functions": Case(cnn, True, recipe="bf16"),
    "effort": Case(uneven, "fast", data=many),
    "improve.samples": Case(uneven, 4, base=FAST, data=many),
    "improve.front_end": Case(spectral, False, base=FAST),
    "improve.detection_head": Case(boxes, False, base=FAST),
    "improve.delicate": Case(row_norm, False, base=FAST),
    "improve.carriers": Case(carried, False, base=FAST),
    "improve.goal": Case(outlying, 0.0, base=FAST, recipe="a8w8", data=rows_of_noise),
    "improve.transformer_goal": Case(outlying, 0.0, base=FAST, recipe="a8w8", data=rows_of_noise),
    "improve.ranges": Case(
        loud, False, base={**FAST, "improve": {"equalize": {"enabled": False}}}, data=many
    ),
    "improve.rounding": Case(uneven, False, base=FAST, data=many),
    "improve.activations": Case(silu, False, base=FAST, recipe="xint8_plain", data=many),
    "improve.equalize.enabled": Case(uneven, False, base=FAST, data=many),
    "improve.equalize.steps": Case(uneven, 1, base=FAST, data=many),
    "improve.equalize.threshold": Case(uneven, 1e3, base=FAST, data=many),
    "improve.equalize.append_bias": Case(uneven, False, base=FAST, data=many),
    "improve.smooth.enabled": Case(spiky, True, recipe="int8_transformer_default", data=tokens),
    "improve.smooth.alpha": Case(spiky, "auto", base=SMOOTH, recipe="int8_transformer_default", data=tokens),
    "improve.smooth.insert": Case(
        spiky_post_norm, True, base=SMOOTH, recipe="int8_transformer_default", data=tokens
    ),
    "improve.rotate.enabled": Case(pre_norm, True, data=tokens),
    "improve.rotate.insert": Case(headless, True, base=ROTATE, data=tokens),
    "verify.samples": Case(cnn, 1),
    "weight_only.bits": Case(matrix, 8, recipe="matmul_nbits"),
    "weight_only.group_size": Case(matrix, 16, recipe="matmul_nbits"),
    "weight_only.symmetric": Case(matrix, False, recipe="matmul_nbits"),
    "weight_only.range": Case(matrix, "minmax", recipe="matmul_nbits"),
    "weight_only.algorithm": Case(matrix, "gptq", recipe="matmul_nbits", data=entangled),
    "weight_only.percdamp": Case(matrix, 0.5, recipe="matmul_nbits_gptq", data=entangled),
    "weight_only.act_order": Case(matrix, False, recipe="matmul_nbits_gptq", data=entangled),
    "weight_only.format": Case(
        matrix, "qdq", base={"weight_only": {"accuracy_level": 0}}, recipe="matmul_nbits"
    ),
    "weight_only.accuracy_level": Case(matrix, 4, recipe="matmul_nbits"),
}
