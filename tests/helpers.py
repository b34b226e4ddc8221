"""Small ONNX models and a readable view of quantized ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import roundel
from roundel.numerics.metrics import Closeness
from roundel.plan import QuantPlan, build_plan
from roundel.recipe.load import load_recipe
from roundel.result import QuantizeResult
from roundel.stages import prepare

Feed = dict[str, NDArray[Any]]
Dims = Sequence[int | str] | None
QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")

node = helper.make_node


def rng(seed: int = 0) -> np.random.Generator:
    """A generator that gives every test the same numbers."""
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    """Gaussian values."""
    return np.asarray(rng(seed).normal(0, scale, shape), np.float32)


def saturated_float16(x: NDArray[Any]) -> NDArray[np.float32]:
    """Rounded as the Q of a float16 pair does: the largest finite number where Cast gives infinity."""
    return np.clip(np.asarray(x, np.float32), -65504, 65504).astype(np.float16).astype(np.float32)


def build(
    nodes: Iterable[onnx.NodeProto],
    inputs: Mapping[str, Dims],
    outputs: Mapping[str, Dims] | Sequence[str],
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    types: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A checked model: float32 unless `types` says otherwise, output shapes inferred where not given."""
    kinds = types or {}
    shapes = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
    values = {
        side: [
            helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), shape)
            for name, shape in table.items()
        ]
        for side, table in (("in", inputs), ("out", shapes))
    }
    weights = [numpy_helper.from_array(np.asarray(a), name) for name, a in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", values["in"], values["out"], weights)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    if None in shapes.values():
        for value, known in zip(model.graph.output, session(model).get_outputs(), strict=True):
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, known.shape))
    onnx.checker.check_model(model)
    return model


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """Quiet, and computing Q/DQ nodes exactly as written."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def feeds(inputs: Mapping[str, Sequence[int]], count: int = 4, scale: float = 1.0) -> list[Feed]:
    """Gaussian samples for float inputs."""
    generator = rng(1)
    return [
        {name: np.asarray(generator.normal(0, scale, shape), np.float32) for name, shape in inputs.items()}
        for _ in range(count)
    ]


def quantize(
    model: onnx.ModelProto, recipe: str = "a8w8", data: Sequence[Feed] | None = None, **changes: Any
) -> QuantizeResult:
    """Quantize, calibration only, with Gaussian data for the model's inputs unless data is given."""
    if data is None:
        shapes = {v.name: [d.dim_value or 2 for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
        data = feeds(shapes)
    plain = {"a8w8": "a8w8_minmax", "a16w8": "a16w8_minmax", "xint8": "xint8_plain"}.get(recipe, recipe)
    return roundel.quantize(
        model, recipe=plain, data=list(data), changes=changes, effort=changes.pop("effort", "none")
    )


def plan_of(model: onnx.ModelProto, recipe: str = "a8w8", **changes: Any) -> QuantPlan:
    """The plan for a model, without data."""
    settings = load_recipe(recipe, changes)
    return build_plan(prepare(model, settings).model, settings)


def run(model: onnx.ModelProto | ir.Model, feed: Feed) -> list[NDArray[Any]]:
    """The outputs, with Q/DQ nodes computed exactly as written."""
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return list(session(proto).run(None, feed))


def sqnr(model: onnx.ModelProto, result: QuantizeResult, data: Sequence[Feed]) -> float:
    """The worst output's signal to noise over all samples, in dB, against the model as given."""
    sums: dict[int, Closeness] = {}
    for feed in data:
        for index, (a, b) in enumerate(zip(run(model, feed), run(result.model, feed), strict=True)):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            if a.dtype.kind == "f":
                sums[index] = sums.get(index, Closeness()).merge(Closeness.of(a, b))
    return min((s.sqnr_db for s in sums.values()), default=np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """How one tensor is stored in a quantized model."""

    dtype: str
    domain: str
    scale: NDArray[np.float32]
    zero_point: NDArray[Any]
    axis: int | None
    codes: NDArray[Any] | None = None

    @property
    def real(self) -> NDArray[np.float64]:
        """The values that the codes of a constant stand for."""
        assert self.codes is not None
        shape = [1] * self.codes.ndim
        if self.scale.ndim:
            shape[self.axis or 0] = -1
        shifted = self.codes.astype(np.float64) - self.zero_point.astype(np.float64).reshape(shape)
        return shifted * self.scale.astype(np.float64).reshape(shape)


def initializers(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """Content by name."""
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def activations(model: onnx.ModelProto) -> dict[str, Stored]:
    """Tensors behind a QuantizeLinear, by the name they had in the float model."""
    constants = initializers(model)
    return {
        n.input[0].removesuffix("_QuantizeLinear_Input"): _stored(n, constants, None)
        for n in model.graph.node
        if n.op_type == "QuantizeLinear"
    }


def weights(model: onnx.ModelProto) -> dict[str, Stored]:
    """Constants behind a DequantizeLinear, by the name they had in the float model."""
    constants = initializers(model)
    return {
        n.input[0].removesuffix("_quantized"): _stored(n, constants, constants[n.input[0]])
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and n.input[0] in constants
    }


def _stored(n: onnx.NodeProto, constants: Mapping[str, NDArray[Any]], codes: NDArray[Any] | None) -> Stored:
    axis = next((a.i for a in n.attribute if a.name == "axis"), None)
    scale, zero = constants[n.input[1]], constants[n.input[2]]
    return Stored(zero.dtype.name, n.domain, scale, zero, axis, codes)


def ops(model: onnx.ModelProto) -> list[str]:
    """Operator types in order, Q/DQ left out."""
    return [n.op_type for n in model.graph.node if n.op_type not in QUANTIZERS]


def assert_sound(float_model: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """What every quantized model must be: valid, sorted, without leftovers, with its old signature."""
    onnx.checker.check_model(model, full_check=True)
    for side in ("input", "output"):
        before, after = getattr(float_model.graph, side), getattr(model.graph, side)
        assert [v.name for v in before] == [v.name for v in after]
        assert [v.type.tensor_type.elem_type for v in before] == [v.type.tensor_type.elem_type for v in after]
    known = {v.name for v in model.graph.input} | set(initializers(model))
    for n in model.graph.node:
        assert all(name in known for name in n.input if name), f"{n.name} reads what comes later"
        known |= set(n.output)
    names = [n.name for n in model.graph.node]
    assert len(set(names)) == len(names), "two nodes have one name"
    read = _read_names(model.graph) | {v.name for v in model.graph.output}
    assert set(initializers(model)) <= read, "an initializer is left that nothing reads"


def _read_names(graph: onnx.GraphProto) -> set[str]:
    read: set[str] = set()
    for n in graph.node:
        read |= set(n.input)
        for attribute in n.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                read |= _read_names(attribute.g) | {v.name for v in attribute.g.output}
    return read
