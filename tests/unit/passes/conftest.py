"""A small model builder, and the one check that every pass must stand: same outputs before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper


class Net:
    """Builds an ONNX model, line by line. Nodes are unnamed unless the test names them."""

    def __init__(self, opset: int = 17) -> None:
        self.opset = opset
        self.rng = np.random.default_rng(7)
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.feeds: dict[str, NDArray[Any]] = {}

    def input(self, name: str, shape: tuple[int | str, ...], sizes: tuple[int, ...] | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        self.feeds[name] = self.rng.standard_normal(sizes or shape).astype(np.float32)
        return name

    def const(self, name: str, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        return self.const(name, self.rng.standard_normal(shape).astype(np.float32))

    def node(
        self, op: str, inputs: list[str], outputs: str | list[str], name: str = "", **attributes: Any
    ) -> Any:
        names = [outputs] if isinstance(outputs, str) else outputs
        self.nodes.append(helper.make_node(op, inputs, names, name=name, **attributes))
        return outputs

    def norm(self, source: str, output: str, size: int, **attributes: Any) -> str:
        """A batch normalization with parameters of its own."""
        parts = [self.weight(f"{output}_gamma", size), self.weight(f"{output}_beta", size)]
        parts.append(self.weight(f"{output}_mean", size))
        parts.append(self.const(f"{output}_var", self.rng.uniform(0.5, 2, size).astype(np.float32)))
        return str(self.node("BatchNormalization", [source, *parts], output, **attributes))

    def output(self, *names: str, kind: int = onnx.TensorProto.FLOAT) -> None:
        self.outputs.extend(helper.make_tensor_value_info(name, kind, None) for name in names)

    def if_reads(self, value: str, output: str) -> str:
        """An If whose branches both read a value of the outer graph."""
        branches = []
        for op in ("Abs", "Neg"):
            inner = f"{output}_{op}"
            info = helper.make_tensor_value_info(inner, onnx.TensorProto.FLOAT, None)
            branches.append(helper.make_graph([helper.make_node(op, [value], [inner])], op, [], [info]))
        self.const(f"{output}_flag", np.array(True))
        return str(
            self.node("If", [f"{output}_flag"], output, then_branch=branches[0], else_branch=branches[1])
        )

    def proto(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "net", self.inputs, self.outputs, self.weights)
        domains = sorted({node.domain for node in self.nodes} - {""})
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in domains)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=8 if self.opset < 20 else 10)
        return onnx.shape_inference.infer_shapes(model)

    def model(self) -> ir.Model:
        return ir.from_proto(self.proto())


def run(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """All outputs of a model, computed without any optimization."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


class Outcome:
    """What a pass made of a model."""

    def __init__(self, model: ir.Model, rewrites: int) -> None:
        self.model = model
        self.rewrites = rewrites
        self.ops = Counter(node.op_type for node in model.graph)

    def node(self, op_type: str) -> ir.Node:
        (found,) = (node for node in self.model.graph if node.op_type == op_type)
        return found

    def array(self, name: str) -> NDArray[Any]:
        tensor = self.model.graph.initializers[name].const_value
        assert tensor is not None
        return tensor.numpy()


@pytest.fixture
def net() -> Callable[..., Net]:
    return Net


@pytest.fixture
def apply() -> Callable[..., Outcome]:
    """Run one pass and prove that inputs, outputs and their values stay."""
    from roundel.passes import refresh_shapes

    def _apply(net: Net, action: Callable[[ir.Model], int], tolerance: float = 1e-5) -> Outcome:
        before = net.proto()
        model = ir.from_proto(before)
        refresh_shapes(model)
        rewrites = action(model)
        after = ir.to_proto(model)
        if all(output.type.tensor_type.HasField("shape") for output in after.graph.output):
            onnx.checker.check_model(after)
        assert [v.name for v in after.graph.input] == [v.name for v in before.graph.input]
        assert [v.name for v in after.graph.output] == [v.name for v in before.graph.output]
        expected, found = run(before, net.feeds), run(after, net.feeds)
        for name, array in expected.items():
            assert array.shape == found[name].shape
            assert array.dtype == found[name].dtype
            if tolerance == 0:
                np.testing.assert_array_equal(found[name], array, err_msg=name)
            else:
                scale = float(np.abs(array).max()) if array.size and array.dtype.kind == "f" else 1.0
                np.testing.assert_allclose(
                    found[name], array, rtol=1e-4, atol=tolerance * scale, err_msg=name
                )
        return Outcome(model, rewrites)

    return _apply
