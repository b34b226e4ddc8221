"""The embedded example: its files, its graph, its data and its float accuracy."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from roundel.example import INPUT_NAME, Example, load_example, preprocess


@pytest.fixture(scope="module")
def example() -> Example:
    return load_example()


@pytest.fixture(scope="module")
def model(example: Example) -> onnx.ModelProto:
    return onnx.load(example.model_path)


@pytest.fixture(scope="module")
def session(example: Example) -> ort.InferenceSession:
    return ort.InferenceSession(str(example.model_path), providers=["CPUExecutionProvider"])


def attribute(node: onnx.NodeProto, name: str) -> object:
    return next(onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name)


def test_model_is_valid(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]


def test_input_has_a_dynamic_batch(model: onnx.ModelProto) -> None:
    (graph_input,) = model.graph.input
    dims = graph_input.type.tensor_type.shape.dim
    assert graph_input.name == INPUT_NAME
    assert dims[0].dim_param == "N"
    assert [d.dim_value for d in dims[1:]] == [1, 16, 16]


def test_nodes_have_unique_names(model: onnx.ModelProto) -> None:
    names = [node.name for node in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)


def test_graph_has_the_ops_of_a_real_network(model: onnx.ModelProto) -> None:
    ops = [node.op_type for node in model.graph.node]
    assert ops.count("Add") == 2
    assert ops.count("BatchNormalization") == ops.count("Conv") == 13
    assert ops.count("Clip") == 10
    for op in ("MaxPool", "Concat", "AveragePool", "GlobalAveragePool", "Flatten", "Gemm"):
        assert ops.count(op) == 1, op


def test_clip_bounds_are_initializers(model: onnx.ModelProto) -> None:
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Clip":
            bounds = [values[name] for name in node.input[1:]]
            assert [bound.shape for bound in bounds] == [(), ()]
            assert [float(bound) for bound in bounds] == [0.0, 6.0]


def test_depthwise_ranges_are_uneven(model: onnx.ModelProto) -> None:
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    user = {node.input[0]: node for node in model.graph.node if node.op_type == "BatchNormalization"}
    depthwise = [n for n in model.graph.node if n.op_type == "Conv" and attribute(n, "group") != 1]
    assert len(depthwise) == 3
    for node in depthwise:
        weight = values[node.input[1]]
        assert attribute(node, "group") == weight.shape[0]
        assert weight.shape[1:] == (1, 3, 3)
        bn = user[node.output[0]]
        scale, variance = values[bn.input[1]], values[bn.input[4]]
        folded = weight * (scale / np.sqrt(variance + attribute(bn, "epsilon")))[:, None, None, None]
        ranges = np.abs(folded).max(axis=(1, 2, 3))
        assert ranges.max() > 8 * np.median(ranges)


def test_data_shapes_and_types(example: Example) -> None:
    assert len(example.calibration) == len(example.calibration_labels) == 100
    for feed in example.calibration:
        assert list(feed) == [INPUT_NAME]
        assert feed[INPUT_NAME].shape == (1, 1, 16, 16)
        assert feed[INPUT_NAME].dtype == np.float32
    assert example.eval_x.shape == (450, 1, 16, 16)
    assert example.eval_x.dtype == np.float32
    assert example.eval_y.shape == (450,)
    assert example.eval_y.dtype == example.calibration_labels.dtype == np.int64
    assert example.eval_x.min() >= -1.0
    assert example.eval_x.max() <= 1.0
    assert set(example.eval_y.tolist()) == set(example.calibration_labels.tolist()) == set(range(10))


def test_calibration_images_are_not_evaluation_images(example: Example) -> None:
    held_out = {image.tobytes() for image in example.eval_x}
    assert not any(feed[INPUT_NAME][0].tobytes() in held_out for feed in example.calibration)


def test_float_accuracy(example: Example, session: ort.InferenceSession) -> None:
    logits = session.run(None, {INPUT_NAME: example.eval_x})[0]
    assert (logits.argmax(axis=1) == example.eval_y).mean() >= 0.97


def test_runs_on_each_calibration_feed(example: Example, session: ort.InferenceSession) -> None:
    predicted = [int(session.run(None, feed)[0].argmax()) for feed in example.calibration]
    assert np.mean(np.array(predicted) == example.calibration_labels) >= 0.97


def test_files_are_small(example: Example) -> None:
    assert 60_000 <= example.model_path.stat().st_size <= 250_000
    assert example.model_path.with_name("digits.npz").stat().st_size <= 150_000


def test_preprocess_doubles_bilinearly() -> None:
    row = np.array([[[0, 16], [0, 16]]], dtype=np.uint8)
    out = preprocess(row)
    assert out.shape == (1, 1, 4, 4)
    np.testing.assert_allclose(out[0, 0], np.tile([-1.0, -0.5, 0.5, 1.0], (4, 1)))


def test_preprocess_agrees_with_onnx_resize() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 17, size=(3, 8, 8), dtype=np.uint8)
    node = onnx.helper.make_node(
        "Resize", ["x", "", "scales"], ["y"], mode="linear", coordinate_transformation_mode="half_pixel"
    )
    graph = onnx.helper.make_graph(
        [node],
        "resize",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3, 1, 8, 8])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 1, 16, 16])],
        [numpy_helper.from_array(np.array([1, 1, 2, 2], dtype=np.float32), "scales")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    scaled = images[:, None].astype(np.float32) / 8.0 - 1.0
    np.testing.assert_allclose(preprocess(images), session.run(None, {"x": scaled})[0], atol=1e-6)
