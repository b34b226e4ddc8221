"""Spectrograms that a model computes itself, before the network begins.

Powers of a sound span many orders of magnitude, and the logarithm behind them makes the small ones count as
much as the large: an integer format with one scale turns all of these into the same few codes. Nothing there
was learned and little of it runs on an NPU, so that it stays in float where accuracy is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from roundel.plan.types import NodePlan

REASON = "computes a spectrogram: the Log behind it magnifies errors of small values"

_TRANSFORMS = frozenset({"Conv", "MatMul", "Gemm", "STFT", "DFT"})
_LAYERS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "RNN"})
# A network has begun where one of these is.
_LEARNED = frozenset(
    name
    for line in (
        "Relu LeakyRelu PRelu ThresholdedRelu Elu Celu Selu Gelu Erf Sigmoid HardSigmoid HardSwish Mish",
        "Tanh Softplus Softsign Softmax LogSoftmax BatchNormalization InstanceNormalization",
        "LayerNormalization SimplifiedLayerNormalization GroupNormalization RMSNormalization",
        "LSTM GRU RNN Attention MultiHeadAttention MaxPool",
    )
    for name in line.split()
)


def front_end(graph: ir.Graph) -> set[str]:
    """Names of the nodes up to each Log that only a fixed transform leads to and a network follows."""
    learned = _from(graph, (node for node in graph if node.op_type in _LEARNED))
    behind = _from(graph, (node for node in graph if node.op_type == "Log"))
    followed = _back(graph, (node for node in graph if node.op_type in _LAYERS and node in behind))
    logs = [node for node in graph if node.op_type == "Log" and node not in learned and node in followed]
    inside = _back(graph, logs)
    if not any(node.op_type in _TRANSFORMS for node in inside):
        return set()
    return {str(node.name) for node in inside}


def front_end_notes(nodes: Mapping[str, NodePlan]) -> tuple[str, ...]:
    """What the user is told of the nodes that stay in float for this reason."""
    count = sum(node.reason == REASON for node in nodes.values())
    if not count:
        return ()
    return (
        f"{count} nodes that compute a spectrogram stay in float: the Log behind them magnifies errors of "
        "small values (-s improve.front_end=false quantizes them)",
    )


def _from(graph: ir.Graph, starts: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes and all that read what they make."""
    found, stack = set[ir.Node](), list(starts)
    while stack:
        node = stack.pop()
        if node.graph is graph and node not in found:
            found.add(node)
            stack += node.successors()
    return found


def _back(graph: ir.Graph, starts: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes and all that they are made from."""
    found, stack = set[ir.Node](), list(starts)
    while stack:
        node = stack.pop()
        if node.graph is graph and node not in found:
            found.add(node)
            stack += node.predecessors()
    return found
