"""Run a quantized model layer by layer over all samples, computing every node once.

Between layers only the integer codes of the tensors that are still needed are kept: in memory as far as the
run's budget goes, else in temporary files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.data.kept import Kept, KeptArrays, KeptSamples, Spool
from roundel.model.graph import is_constant, values_by_name
from roundel.model.memory import budget
from roundel.model.session import move_to_cuda, open_session
from roundel.types import Sample
from roundel.work.executors import usable_cores

_DQ = "DequantizeLinear"


class StepwiseRunner:
    """Holds the values of all samples at the border between what has run and what has not.

    Args:
        model: the quantized model; its initializers may change between calls, nodes may not.
        samples: the model's inputs.
        cuda: number of the GPU that runs the model; None for the CPU.
    """

    def __init__(self, model: ir.Model, samples: Sequence[Sample], cuda: int | None = None) -> None:
        self._model, self._cuda, self._count = model, cuda, len(samples)
        self._pool, self._room = ThreadPoolExecutor(max(2, usable_cores())), budget().held
        self._named = values_by_name(model.graph)
        self._order = {node: index for index, node in enumerate(model.graph)}
        self._done: set[ir.Node] = set()
        self.values: dict[str, Sequence[NDArray[Any]]] = {}
        for value in model.graph.inputs:
            if value.name in samples[0]:
                self.values[str(value.name)] = _column(samples, str(value.name))

    def run_to(self, name: str) -> Sequence[NDArray[Any]]:
        """The named value for each sample; whatever it needs and has not run yet runs now."""
        if name not in self.values:
            self._advance(name)
        return self.values[name]

    def change(self, name: str, arrays: Iterable[NDArray[Any]]) -> None:
        """Put other values in the place of those of a tensor that has been computed."""
        spool = self._spool()
        self.values[name] = KeptArrays([spool.keep(array) for array in arrays])

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
        self.values.update(zip(wanted, self._run(session, wanted, feeds), strict=True))

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
        return sorted(found, key=self._order.__getitem__)

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
            [ir.serde.serialize_node(node) for node in nodes],
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
        if self._cuda is not None:
            move_to_cuda(session, self._cuda)
        return session, list(feeds)

    def _run(
        self, session: ort.InferenceSession, wanted: Sequence[str], feeds: Sequence[str]
    ) -> list[KeptArrays]:
        """The wanted values of every sample."""
        spool = self._spool()

        def one(index: int) -> list[Kept]:
            result = session.run(list(wanted), {key: self.values[key][index] for key in feeds})
            return [spool.keep(array) for array in result]

        rows = list(self._pool.map(one, range(self._count)))
        return [KeptArrays(column) for column in zip(*rows, strict=True)]

    def _spool(self) -> Spool:
        """With the room that the values kept so far leave."""
        taken = sum(kept.in_memory for kept in self.values.values() if isinstance(kept, KeptArrays))
        return Spool(max(0, self._room - taken))


def _column(samples: Sequence[Sample], name: str) -> Sequence[NDArray[Any]]:
    if isinstance(samples, KeptSamples):
        return samples.column(name)
    return [sample[name] for sample in samples]


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
    proto = ir.serde.serialize_tensor(value.const_value)
    proto.name = str(value.name)  # a tensor may have been replaced by one without a name
    return proto


def _info(value: ir.Value) -> onnx.ValueInfoProto:
    dtype = value.dtype.value if value.dtype is not None else onnx.TensorProto.FLOAT
    return onnx.helper.make_tensor_value_info(str(value.name), dtype, None)
