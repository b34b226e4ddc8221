"""Equalization changes weights and nothing else: every case runs before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from equalize_cases import check_equalized
from helpers import build, feeds, node, normal
from roundel.improve.equalize import EqualizeReport, equalize
from roundel.passes.shapes import refresh_shapes
from roundel.recipe.settings import Equalize

X = {"x": (1, 3, 8, 8)}


def uneven(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Weights whose first axis has ranges that differ by up to 2**8."""
    factors = 2.0 ** np.random.default_rng(seed + 99).uniform(-4, 4, shape[0])
    return (normal(*shape, seed=seed) * factors.reshape(-1, *[1] * (len(shape) - 1))).astype(np.float32)


class Done:
    """A model before and after."""

    def __init__(self, proto: onnx.ModelProto, options: Mapping[str, Any], *, power_of_two: bool) -> None:
        self.before = ir.from_proto(proto)
        refresh_shapes(self.before)
        self.after = self.before.clone()
        settings = Equalize(**options)
        self.report: EqualizeReport = equalize(self.after, settings, power_of_two=power_of_two)
        onnx.checker.check_model(ir.to_proto(self.after), full_check=True)

    def weight(self, index: int, position: int = 1) -> NDArray[Any]:
        """The constant that the layer of this number reads now."""
        layers = [n for n in self.after.graph if n.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")]
        value = layers[index].inputs[position]
        assert value is not None
        assert value.const_value is not None
        return value.const_value.numpy()


def run(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Any],
    *,
    inputs: Mapping[str, Sequence[int]] = X,
    outputs: Sequence[str] = ("y",),
    power_of_two: bool = False,
    **options: Any,
) -> Done:
    """Equalize, and prove that nothing changed."""
    done = Done(build(nodes, inputs, outputs, constants), options, power_of_two=power_of_two)
    for scale in (0.01, 1.0, 100.0):
        assert check_equalized(done.before, done.after, feeds(inputs, 2, scale)) < 1e-5
    return done


def chain(
    *middle: onnx.NodeProto, source: str = "a", constants: Mapping[str, Any] | None = None, **rest: Any
) -> Done:
    """Conv, then these nodes (they read "a"), then a Conv that reads `source`."""
    nodes = [node("Conv", ["x", "w0", "b0"], ["a"]), *middle, node("Conv", [source, "w1", "b1"], ["y"])]
    own = {
        "w0": uneven(6, 3, 3, 3),
        "b0": uneven(6, seed=3),
        "w1": normal(4, 6, 3, 3, seed=1),
        "b1": normal(4, seed=2),
    }
    return run(nodes, {**own, **(constants or {})}, **rest)


def all_moved(done: Done, count: int) -> bool:
    """Every channel was balanced; the largest on both sides may have been so before."""
    return count - 1 <= done.report.channels <= count


def ranges(weight: NDArray[Any], axis: int) -> NDArray[Any]:
    return np.abs(weight).max(axis=tuple(i for i in range(weight.ndim) if i != axis))


def test_both_layers_end_with_the_same_ranges() -> None:
    done = chain(append_bias=False)
    rows, columns = ranges(done.weight(0), 0), ranges(done.weight(1), 1)
    np.testing.assert_allclose(rows / rows.max(), columns / columns.max(), rtol=1e-3)
    assert done.report.spaces == 1
    assert all_moved(done, 6)
    assert len(done.report.layers) == 2
    stored = done.before.graph.initializers["w0"].const_value
    assert stored is not None
    before = ranges(stored.numpy(), 0)
    assert rows.max() / np.median(rows) < before.max() / np.median(before) / 1.5


CARRIERS: dict[str, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
    "relu": ([node("Relu", ["a"], ["s"])], {}),
    "leaky": ([node("LeakyRelu", ["a"], ["s"], alpha=0.2)], {}),
    "leaky above one": ([node("LeakyRelu", ["a"], ["s"], alpha=-1.7)], {}),
    "prelu": ([node("PRelu", ["a", "p"], ["s"])], {"p": normal(6, 1, 1)}),
    "prelu scalar": ([node("PRelu", ["a", "p"], ["s"])], {"p": np.float32([0.3])}),
    "max pool": ([node("MaxPool", ["a"], ["s"], kernel_shape=[2, 2], pads=[1, 1, 0, 0])], {}),
    "max pool indices": ([node("MaxPool", ["a"], ["s", "i"], kernel_shape=[2, 2])], {}),
    "average pool": (
        [node("AveragePool", ["a"], ["s"], kernel_shape=[2, 2], pads=[1] * 4, count_include_pad=1)],
        {},
    ),
    "zero pad": ([node("Pad", ["a", "p"], ["s"])], {"p": np.int64([0, 0, 1, 1, 0, 0, 1, 1])}),
    "mirror": ([node("Pad", ["a", "p"], ["s"], mode="reflect")], {"p": np.int64([0, 0, 1, 1, 0, 0, 1, 1])}),
    "identity": ([node("Identity", ["a"], ["s"])], {}),
    "dropout": ([node("Dropout", ["a"], ["s"])], {}),
    "resize": ([node("Resize", ["a", "", "r"], ["s"], mode="linear")], {"r": np.float32([1, 1, 2, 2])}),
    "cubic": ([node("Resize", ["a", "", "r"], ["s"], mode="cubic")], {"r": np.float32([1, 1, 2, 2])}),
    "constant gain": ([node("Mul", ["a", "k"], ["s"])], {"k": normal(1, 6, 1, 1)}),
    "twice itself": ([node("Add", ["a", "a"], ["s"])], {}),
    "there and back": (
        [
            node("Transpose", ["a"], ["t"], perm=[0, 2, 3, 1]),
            node("Transpose", ["t"], ["s"], perm=[0, 3, 1, 2]),
        ],
        {},
    ),
}


@pytest.mark.parametrize("case", CARRIERS)
def test_goes_through(case: str) -> None:
    nodes, constants = CARRIERS[case]
    done = chain(*nodes, source="s", constants=constants)
    assert all_moved(done, 6)


BREAKERS: dict[str, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
    "sigmoid": ([node("Sigmoid", ["a"], ["s"])], {}),
    "softmax": ([node("Softmax", ["a"], ["s"], axis=1)], {}),
    "filled pad": (
        [node("Pad", ["a", "p", "v"], ["s"])],
        {"p": np.int64([0, 0, 1, 1, 0, 0, 1, 1]), "v": np.float32(0.5)},
    ),
    "relu6": ([node("Clip", ["a", "lo", "hi"], ["s"])], {"lo": np.float32(0), "hi": np.float32(6)}),
    "clip above zero": ([node("Clip", ["a", "lo", "hi"], ["s"])], {"lo": np.float32(1), "hi": np.float32(6)}),
    "clip below zero": ([node("Clip", ["a", "", "hi"], ["s"])], {"hi": np.float32(-1)}),
    "constant shift": ([node("Add", ["a", "k"], ["s"])], {"k": normal(1, 6, 1, 1)}),
    "square": ([node("Mul", ["a", "a"], ["s"])], {}),
    "swish": ([node("Sigmoid", ["a"], ["g"]), node("Mul", ["a", "g"], ["s"])], {}),
    "shuffle": (
        [
            node("Reshape", ["a", "to"], ["t"]),
            node("Transpose", ["t"], ["u"], perm=[0, 2, 1, 3, 4]),
            node("Reshape", ["u", "back"], ["s"]),
        ],
        {"to": np.int64([1, 2, 3, 6, 6]), "back": np.int64([1, 6, 6, 6])},
    ),
    "norm": (
        [node("InstanceNormalization", ["a", "g", "h"], ["s"])],
        {"g": normal(6, seed=5), "h": normal(6, seed=6)},
    ),
    "crop": (
        [
            node(
                "Resize",
                ["a", "roi", "r"],
                ["s"],
                mode="linear",
                extrapolation_value=2.0,
                coordinate_transformation_mode="tf_crop_and_resize",
            )
        ],
        {"roi": np.float32([0, 0, -1, -1, 1, 1, 1, 1]), "r": np.float32([1, 1, 1, 1])},
    ),
}


@pytest.mark.parametrize("case", BREAKERS)
def test_stops_at(case: str) -> None:
    nodes, constants = BREAKERS[case]
    done = chain(*nodes, source="s", constants=constants)
    assert done.report.channels == 0
    assert done.report.layers == ()


def test_a_padded_channel_axis_stops_it() -> None:
    pads = np.int64([0, 1, 0, 0, 0, 1, 0, 0])
    done = chain(node("Pad", ["a", "p"], ["s"]), source="s", constants={"p": pads, "w1": normal(4, 8, 3, 3)})
    assert done.report.channels == 0


def test_a_graph_output_keeps_its_values() -> None:
    done = chain(node("Relu", ["a"], ["s"]), source="s", outputs=("y", "s"))
    assert done.report.channels == 0
    assert chain(node("Relu", ["a"], ["s"]), source="s", outputs=("y", "a")).report.channels == 0


def test_a_body_sees_what_it_saw() -> None:
    seen = helper.make_tensor_value_info("seen", TensorProto.FLOAT, None)
    branches = [helper.make_graph([node(op, ["a"], ["seen"])], op, [], [seen]) for op in ("Relu", "Identity")]
    choice = node("If", ["yes"], ["z"], then_branch=branches[0], else_branch=branches[1])
    done = chain(choice, constants={"yes": np.bool_(True)}, outputs=("y", "z"))
    assert done.report.channels == 0


def test_a_bound_computed_at_run_time_stops_it() -> None:
    nodes = [node("ReduceMax", ["x"], ["hi"], keepdims=0), node("Clip", ["a", "", "hi"], ["s"])]
    assert chain(*nodes, source="s").report.channels == 0


def test_a_weight_that_a_caller_can_feed_stays() -> None:
    nodes = [node("Conv", ["x", "w0"], ["a"]), node("Conv", ["a", "w1"], ["y"])]
    inputs = {**X, "w1": (4, 6, 3, 3)}
    assert run(nodes, {"w0": uneven(6, 3, 3, 3)}, inputs=inputs).report.channels == 0


def test_gate_of_squeeze_and_excite() -> None:
    nodes = [
        node("Conv", ["x", "w0"], ["a"]),
        node("Relu", ["a"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Conv", ["p", "down"], ["d"]),
        node("Relu", ["d"], ["e"]),
        node("Conv", ["e", "up"], ["u"]),
        node("Sigmoid", ["u"], ["g"]),
        node("Mul", ["r", "g"], ["m"]),
        node("Conv", ["m", "w1"], ["y"]),
    ]
    constants = {
        "w0": uneven(6, 3, 3, 3),
        "down": uneven(2, 6, 1, 1, seed=1),
        "up": normal(6, 2, 1, 1, seed=2),
        "w1": normal(4, 6, 3, 3, seed=3),
    }
    done = run(nodes, constants)
    assert done.report.spaces == 2  # before the gate, and inside it
    assert done.report.channels > 6


def test_a_product_that_widens_the_channels_stops_it() -> None:
    nodes = [
        node("Conv", ["x", "w0"], ["a"]),
        node("Mul", ["a", "k"], ["m"]),
        node("Conv", ["m", "w1"], ["y"]),
    ]
    constants = {"w0": uneven(1, 3, 3, 3), "k": normal(1, 5, 1, 1), "w1": normal(2, 5, 1, 1, seed=1)}
    assert run(nodes, constants).report.channels == 0


def test_concat_is_read_by_one_layer() -> None:
    nodes = [
        node("Conv", ["x", "w0", "b0"], ["a"]),
        node("Conv", ["x", "w1"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("Concat", ["a", "x1", "c"], ["d"], axis=1),
        node("Conv", ["d", "w2"], ["y"]),
    ]
    constants = {
        "w0": uneven(4, 3, 3, 3),
        "b0": normal(4),
        "w1": uneven(5, 3, 3, 3, seed=4),
        "w2": normal(2, 11, 3, 3, seed=5),
    }
    done = run(nodes, constants, inputs={**X, "x1": (1, 2, 6, 6)})
    assert 7 <= done.report.channels <= 9  # the two of x1 stay
    assert done.report.spaces == 2


def test_two_readers_and_a_residual_share_factors() -> None:
    nodes = [
        node("Conv", ["x", "w0", "b0"], ["a"]),
        node("Conv", ["a", "w1"], ["b"], pads=[1] * 4),
        node("Relu", ["b"], ["c"]),
        node("Conv", ["c", "w2"], ["d"]),
        node("Add", ["d", "a"], ["e"]),
        node("Conv", ["e", "w3"], ["y"]),
        node("Conv", ["a", "w4"], ["z"]),
    ]
    constants = {
        "w0": uneven(6, 3, 3, 3),
        "b0": normal(6),
        "w1": uneven(5, 6, 3, 3, seed=1),
        "w2": uneven(6, 5, 1, 1, seed=2),
        "w3": normal(2, 6, 3, 3, seed=3),
        "w4": normal(2, 6, 1, 1, seed=4),
    }
    done = run(nodes, constants, outputs=("y", "z"))
    assert 9 <= done.report.channels <= 11
    assert done.report.spaces == 2


def test_an_add_to_something_unscaled_stops_it() -> None:
    nodes = [node("Add", ["a", "x1"], ["s"])]
    assert chain(*nodes, source="s", inputs={**X, "x1": (1, 6, 6, 6)}).report.channels == 0
    assert chain(*nodes, source="s", inputs={**X, "x1": (1, 1, 1, 1)}).report.channels == 0


def test_shared_weights_are_changed_for_one_reader_only() -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"]),
        node("Conv", ["a", "w1", "b1"], ["y"]),
        node("Conv", ["x", "w", "b"], ["z"]),
    ]
    constants = {"w": uneven(6, 3, 3, 3), "b": normal(6), "w1": normal(6, 6, 1, 1, seed=1), "b1": normal(6)}
    done = run(nodes, constants, outputs=("y", "z"))
    assert all_moved(done, 6)
    np.testing.assert_array_equal(done.weight(2), constants["w"])


def test_weights_shared_by_two_layers_in_a_row() -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["a"]), node("Conv", ["a", "w", "b"], ["y"])]
    done = run(nodes, {"w": uneven(3, 3, 3, 3), "b": normal(3)})
    assert all_moved(done, 3)


def test_names_may_be_missing() -> None:
    proto = build(
        [node("Conv", ["x", "w0"], ["a"]), node("Relu", ["a"], ["r"]), node("Conv", ["r", "w1"], ["y"])],
        X,
        ["y"],
        {"w0": uneven(6, 3, 3, 3), "w1": normal(4, 6, 3, 3)},
    )
    model = ir.from_proto(proto)
    for item in model.graph:
        item.name = None
        if not item.outputs[0].is_graph_output():
            item.outputs[0].name = None
    before = ir.from_proto(proto)
    report = equalize(model, Equalize(), power_of_two=True)
    assert report.channels == 6
    ir.passes.common.NameFixPass()(model)
    assert check_equalized(before, model, feeds(X, 2)) < 1e-5


def test_channels_without_weights_stay() -> None:
    first, second = uneven(6, 3, 3, 3), normal(4, 6, 3, 3, seed=1)
    first[2], second[:, 4] = 0, 0
    done = chain(constants={"w0": first, "w1": second})
    assert all_moved(done, 4)
    assert np.isfinite(done.weight(0)).all()


def test_a_model_without_layers() -> None:
    report = run([node("Relu", ["x"], ["y"])], {}).report
    assert (report.spaces, report.rounds, report.layers) == (0, 0, ())


def test_broken_weights_are_left_alone() -> None:
    weight = uneven(6, 3, 3, 3)
    weight[0, 0, 0, 0] = np.nan
    proto = build(
        [node("Conv", ["x", "w0"], ["a"]), node("Conv", ["a", "w1"], ["y"])],
        X,
        ["y"],
        {"w0": weight, "w1": normal(4, 6, 3, 3)},
    )
    assert Done(proto, {}, power_of_two=False).report.channels == 0


def test_a_large_bias_counts() -> None:
    bias = np.float32([0, 0, 0, 0, 0, 50])
    apart = [chain(constants={"b0": bias}, append_bias=flag).weight(0, 2)[5] for flag in (False, True)]
    assert abs(apart[1]) < abs(apart[0])


def test_rounds_end_by_number_or_by_threshold() -> None:
    assert chain(steps=1).report.rounds == 1
    assert chain(threshold=1e3).report.rounds == 1
    assert chain(steps=100, threshold=1e-4).report.rounds < 100


def test_powers_of_two_are_filled() -> None:
    def waste(done: Done) -> float:
        tops = [np.log2(np.abs(done.weight(i)).max() / 127) for i in range(2)]
        return float(sum(np.ceil(t) - t for t in tops))

    assert waste(chain(power_of_two=True)) <= waste(chain(power_of_two=False))
