"""The list of passes as a whole."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from roundel.errors import RecipeError
from roundel.passes import PassReport, prepare
from roundel.recipe.settings import Prepare

SHARED = Path(__file__).resolve().parents[4] / "shared" / "models"
MODELS = (
    *("cifar10_resnet20", "mobilenet_v2", "mobilenet_v2_imagenet"),
    *("mobilenet_v3_small", "ssdlite_mobilenet_v2_coco", "vit"),
)
EVERYTHING = Prepare(
    split_to_slice=True,
    batch_norm_to_conv=True,
    reduce_mean_to_global_average_pool=True,
    split_large_pools=True,
)
NOTHING = Prepare(**{name: False for name, field in Prepare.model_fields.items() if field.annotation is bool})


def small(n, blocks=1):
    n.input("x", ("N", 4, 8, 8), (2, 4, 8, 8))
    previous = "x"
    n.weight("shared", 4)
    for index in range(blocks):
        n.weight(f"w{index}", 4, 4, 1, 1)
        n.node("Conv", [previous, f"w{index}", "shared"], f"c{index}")
        n.norm(f"c{index}", f"n{index}", 4)
        n.node("Identity", [f"n{index}"], f"i{index}")
        previous = n.node("Relu", [f"i{index}"], f"r{index}")
    n.output(previous)
    return n


def test_reports_and_notifications(net, apply):
    seen: list[PassReport] = []
    reports: list[PassReport] = []

    def run(model: ir.Model) -> int:
        reports.extend(prepare(model, Prepare(), seen.append))
        return sum(report.rewrites for report in reports)

    done = apply(small(net(), 2), run)
    assert done.ops == {"Conv": 2, "Relu": 2}
    assert seen == reports
    assert {report.name for report in reports if report.rewrites} >= {"no-ops", "fold batch norm"}
    assert all(report.seconds >= 0 for report in reports)


def test_shapes_are_current_afterwards(net):
    model = small(net()).model()
    prepare(model, Prepare(fixed_shapes={"N": (3,)}))
    assert all(value.shape.numpy() == (3, 4, 8, 8) for node in model.graph for value in node.outputs)


def test_options_switch_passes_off(net, apply):
    n = small(net())
    done = apply(n, lambda model: sum(r.rewrites for r in prepare(model, NOTHING)), 0)
    assert done.ops == {"Conv": 1, "BatchNormalization": 1, "Relu": 1}


@pytest.mark.parametrize(
    ("option", "op"),
    [
        ("split_to_slice", "Slice"),
        ("batch_norm_to_conv", "Conv"),
        ("reduce_mean_to_global_average_pool", "GlobalAveragePool"),
        ("split_large_pools", "AveragePool"),
        ("nchw_to_nhwc", "Transpose"),
    ],
)
def test_options_switch_passes_on(net, option, op):
    n = net()
    n.input("x", (1, 4, 32, 32))
    n.norm("x", "b", 4)
    n.node("Split", ["b"], ["s", "t"], axis=1)
    n.node("ReduceMean", ["s"], "m", axes=[2, 3])
    n.node("GlobalAveragePool", ["t"], "g")
    n.output("m", "g")
    off, on = n.model(), n.model()
    prepare(off, Prepare())
    prepare(on, Prepare(**{option: True}))

    def count(model: ir.Model) -> int:
        return sum(node.op_type == op for node in model.graph)

    assert count(on) > count(off)


def test_means_are_split_too(net):
    n = net()
    n.input("x", (1, 4, 32, 32))
    n.node("ReduceMean", ["x"], "y", axes=[2, 3])
    n.output("y")
    model = n.model()
    prepare(model, EVERYTHING)
    assert [node.op_type for node in model.graph] == ["AveragePool", "GlobalAveragePool"]


def test_unknown_input_name(net):
    with pytest.raises(RecipeError, match="no input"):
        prepare(small(net()).model(), Prepare(fixed_shapes={"y": (1,)}))


def test_custom_operators_are_left_alone(net):
    n = net()
    n.input("x", (1, 4, 8, 8))
    n.node("Identity", ["x"], "i")
    n.node("Mystery", ["i"], "m", domain="vendor.custom")
    n.node("Relu", ["m"], "y")
    n.output("y")
    model = n.model()
    prepare(model, EVERYTHING)
    assert [node.op_type for node in model.graph] == ["Mystery", "Relu"]


def test_new_names_are_unique(net, apply):
    n = net()
    n.input("x", (1, 2, 4, 4))
    n.weight("conv_bias", 2)  # the name that the folded bias would like to have
    n.weight("w", 2, 2, 1, 1)
    n.node("Conv", ["x", "w"], "c", name="conv")
    n.norm("c", "n", 2)
    n.node("Mul", ["n", n.const("top", np.ones((4, 4), np.float32))], "m")
    n.if_reads("conv_bias", "i")
    n.output("m", "i")
    done = apply(n, lambda model: sum(r.rewrites for r in prepare(model, Prepare())))
    assert done.node("Conv").inputs[2].name == "conv_bias_1"


def calls_during_prepare(model: ir.Model) -> int:
    count = 0

    def tick(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        prepare(model, EVERYTHING)
    finally:
        sys.setprofile(None)
    return count


def test_work_is_linear_in_the_nodes(net):
    """Four times the nodes take four times the calls: 2,000 nodes against 500."""
    calls_during_prepare(small(net(), 1).model())  # imports
    few = calls_during_prepare(small(net(), 125).model())
    many = calls_during_prepare(small(net(), 500).model())
    assert many < 4.6 * few


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
@pytest.mark.parametrize("name", MODELS)
def test_real_models(name, apply):
    runner = apply.__globals__["run"]
    path = SHARED / f"{name}.onnx"
    model = ir.load(str(path))
    before = ir.to_proto(ir.load(str(path)))
    (entry,) = before.graph.input
    shape = [dim.dim_value or 1 for dim in entry.type.tensor_type.shape.dim]
    feeds = {entry.name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    prepare(model, EVERYTHING)
    expected, found = runner(before, feeds), runner(ir.to_proto(model), feeds)
    assert list(expected) == list(found)
    for name, array in expected.items():
        scale = float(np.abs(array).max())
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5 * scale)
