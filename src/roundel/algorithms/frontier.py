"""Run a quantized model layer by layer over all samples, computing every node once.

Between layers only the integer codes of the tensors that are still needed stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.model.graph import is_constant, values_by_name
from roundel.model.session import open_session
from roundel.types import Sample

_DQ = "DequantizeLinear"


class Frontier:
    """The values of all samples at the border between what has run and what has not.

    Args:
        model: the quantized model; its initializers may change between calls, nodes may not.
        samples: the model's inputs.
        threads: samples that run side by side.
    """

    def __init__(self, model: ir.Model, samples: Sequence[Sample], threads: int = 2) -> None:
        self._model, self._threads, self._count = model, threads, len(samples)
        self._named = values_by_name(model.graph)
        self._done: set[ir.Node] = set()
        self.values: dict[str, list[NDArray[Any]]] = {}
        for value in model.graph.inputs:
            if value.name in samples[0]:
                self.values[str(value.name)] = [sample[str(value.name)] for sample in samples]

    def reach(self, name: str) -> list[NDArray[Any]]:
        """The named value for each sample; whatever it needs and has not run yet runs now."""
        if name not in self.values:
            self._advance(name)
        return self.values[name]

    def release(self) -> None:
        """Forget values that nothing will read any more."""
        for name in [n for n in self.values if not self._alive(self._named[n])]:
            del self.values[name]

    def _advance(self, name: str) -> None:
        nodes = self._pending(self._named[name])
        self._done.update(n for n in nodes if n.op_type != _DQ)
        wanted = [name]
        for node in nodes:
            if node.op_type != _DQ:
                wanted += [str(v.name) for v in node.outputs if v.name and v.name != name and self._alive(v)]
        session, feeds = self._session(nodes, wanted)
        results = self._run(session, wanted, feeds)
        for index, key in enumerate(wanted):
            self.values[key] = [row[index] for row in results]

    def _pending(self, target: ir.Value) -> list[ir.Node]:
        """Nodes between the border and the target, in graph order."""
        found: set[ir.Node] = set()
        stack = [target]
        while stack:
            value = stack.pop()
            node = value.producer()
            if node is None or node in found or value.name in self.values:
                continue
            found.add(node)
            stack.extend(v for v in _reads(node) if not is_constant(v))
        return [node for node in self._model.graph if node in found]

    def _alive(self, value: ir.Value) -> bool:
        """Whether a node that has not run reads the value, looking through DequantizeLinear."""
        return any(
            self._alive(use.node.outputs[0]) if use.node.op_type == _DQ else use.node not in self._done
            for use in value.uses()
        )

    def _session(
        self, nodes: Sequence[ir.Node], wanted: Sequence[str]
    ) -> tuple[ort.InferenceSession, list[str]]:
        made = {str(v.name) for node in nodes for v in node.outputs}
        feeds: dict[str, ir.Value] = {}
        constants: dict[str, ir.Value] = {}
        for value in _inputs(nodes):
            name = str(value.name)
            if name in made:
                continue
            (constants if is_constant(value) else feeds)[name] = value
        graph = onnx.helper.make_graph(
            [ir.to_proto(node) for node in nodes],
            "segment",
            [_info(value) for value in feeds.values()],
            [onnx.helper.make_empty_tensor_value_info(name) for name in wanted],
            [_tensor(value) for value in constants.values()],
        )
        imports = [onnx.helper.make_opsetid(d, v) for d, v in self._model.graph.opset_imports.items()]
        bodies = [ir.serde.serialize_function(f) for f in self._model.functions.values()]
        proto = onnx.helper.make_model(
            graph, opset_imports=imports, functions=bodies, ir_version=self._model.ir_version or 8
        )
        session = open_session(proto.SerializeToString(), threads=1, simulate=True)
        return session, list(feeds)

    def _run(
        self, session: ort.InferenceSession, wanted: Sequence[str], feeds: Sequence[str]
    ) -> list[list[NDArray[Any]]]:
        def one(index: int) -> list[NDArray[Any]]:
            result = session.run(list(wanted), {key: self.values[key][index] for key in feeds})
            return [self._kept(array) for array in result]

        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(one, range(self._count)))

    def _kept(self, array: NDArray[Any]) -> NDArray[Any]:
        """A computed value as it is to be stored."""
        return array


def _inputs(nodes: Iterable[ir.Node]) -> Iterable[ir.Value]:
    for node in nodes:
        yield from _reads(node)


def _reads(node: ir.Node) -> Iterable[ir.Value]:
    """What a node of the main graph reads, what its bodies capture included."""
    yield from (value for value in node.inputs if value is not None)
    yield from (value for value in _inner(node) if value.graph is node.graph)


def _inner(node: ir.Node) -> Iterable[ir.Value]:
    for body in _bodies(node):
        yield from body.outputs
        for child in body:
            yield from (value for value in child.inputs if value is not None)
            yield from _inner(child)


def _bodies(node: ir.Node) -> Iterable[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _tensor(value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None
    proto = ir.to_proto(value.const_value)
    proto.name = str(value.name)  # a tensor may have been replaced by one without a name
    return proto


def _info(value: ir.Value) -> onnx.ValueInfoProto:
    dtype = value.dtype.value if value.dtype is not None else onnx.TensorProto.FLOAT
    return onnx.helper.make_tensor_value_info(str(value.name), dtype, None)
