"""Spectrograms that a model computes itself, before the network begins.

Powers of a sound span many orders of magnitude, and the logarithm behind them makes the small ones count as
much as the large: an integer format with one scale turns all of these into the same few codes. Nothing there
was learned and little of it runs on an NPU.
"""

from __future__ import annotations

import onnx_ir as ir

from roundel.model.reach import downstream, upstream

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


def find_front_end(graph: ir.Graph) -> set[ir.Node]:
    """The nodes up to each Log that only a fixed transform leads to and a network follows."""
    learned = downstream(graph, (node for node in graph if node.op_type in _LEARNED))
    behind = downstream(graph, (node for node in graph if node.op_type == "Log"))
    followed = upstream(graph, (node for node in behind if node.op_type in _LAYERS))
    inside = upstream(graph, (n for n in followed - learned if n.op_type == "Log"))
    return inside if any(node.op_type in _TRANSFORMS for node in inside) else set()
