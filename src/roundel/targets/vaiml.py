"""What VAIML, the compiler for BF16 and mixed models, says of what it leaves to the CPU: cause and remedy.

From AMD's public documents of Vitis AI 6.3. Whether the compiler inside Ryzen AI knows each flag is not
stated anywhere. A message without a row here is shown as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL_TENSOR = 100  # elements: an edge tensor with fewer stays on the CPU (small-tensor-threshold)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A message, explained.

    Attributes:
        stage: which part of the compiler speaks; "unclassified" where nothing tells.
        cause: what it means; empty where nobody knows.
        remedy: what to try first.
        rule: the rule of `roundel check` that foresees it, where one does.
    """

    stage: str
    cause: str = ""
    remedy: str = ""
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A message by words that it holds, all of them, and what it means."""

    words: tuple[str, ...]
    cause: str
    remedy: str
    rule: str | None = None


_TO_BF16 = "enable_f32_to_bf16_conversion: true in vaiml_config"
_LONE_PAIR = (
    "a single Q or DQ at the edge of a partition: the usual break",
    "match-power-of-two-quant-kernel=1, or edge-quantization-in-rt=1, which leaves it to the runtime; where"
    " the scale is no power of two or the zero point not 0, quantize symmetric with powers of two (vint8)",
    "Q17",
)
_NO_FLAG = "none known: replace the operator, or keep it outside the model"

# More particular rows first.
_MESSAGES = (
    _Row(("Standalone tosa.cast is not supported",), "a lone float cast at an island's edge", _TO_BF16),
    _Row(("Standalone dequantizeLinear is not supported",), *_LONE_PAIR),
    _Row(("Standalone quantizeLinear is not supported",), *_LONE_PAIR),
    _Row(
        ("YAML constraints failed", "config.dtype", "float32"),
        "a kernel was asked for float32: an operator was not converted to bfloat16",
        _TO_BF16,
    ),
    _Row(
        ("Dataformat Edge to Op can not be fixed",),
        "the layouts on both sides of an edge differ",
        "preferred_data_storage: vectorized for CNNs, unvectorized for transformers",
    ),
    _Row(
        ("Reshape with start garbage cannot be merged into non-AIE consumer",),
        "a Reshape feeds a node on the CPU",
        "get the node behind it onto the NPU, or end the model before the Reshape",
        "P30",
    ),
    _Row(
        ("PseudoOp:Reshape only supports bf16, fp16, int8, and uint8",),
        "a Reshape of another type",
        f"float32: {_TO_BF16}; 64-bit integers: compute the shape before exporting",
        "P30",
    ),
    _Row(
        ("Small tensor (threshold", "in function edge"),
        f"tensors with fewer than {SMALL_TENSOR} elements at an edge stay on the CPU on purpose",
        "leave it, unless one partition matters more than speed: small-tensor-threshold-unwrapping",
        "P31",
    ),
    _Row(
        ("onnx.Transpose in function edge",),
        "a Transpose at the edge of a partition",
        "a frontend flag (unwrap-input-onnx-edge-by-op-type, unwrap-output-…); or feed the other layout",
        "P29",
    ),
    _Row(("Datatype Unsupported", "tosa.select : i1"), "a Where that selects booleans", _NO_FLAG, "P27"),
    _Row(
        ("Unsupported gather with constant data input and non-scalar indices",),
        "a table looked up with a tensor of indices",
        "look the table up on the host and feed the rows (indices-are-positive=1 needs indices from 0 up)",
        "P28",
    ),
    _Row(
        ("NON-STATIC SHAPE",),
        "open shapes, on which the lowering crashes",
        "fix them: -s prepare.fixed_shapes={NAME: [1, …]}",
        "P02",
    ),
    _Row(
        ("is less than the threshold", "fall back to CPU"),
        "a partition with a small part of the work stays on the CPU",
        "lower threshold_gops_percent in vaiml_config; or bring the partitions together",
    ),
    _Row(
        ("below", "GOPs threshold (fall back to CPU)"),
        "partitions with a small part of the work stay on the CPU",
        "lower threshold_gops_percent in vaiml_config; or bring the partitions together",
    ),
    _Row(
        ("Failed to place the buffers",),
        "a layer's tensors do not fit into the memory of the NPU's cores",
        "split that layer, or try preferred_data_storage and optimize_level",
    ),
    _Row(
        ("Failed to compile subgraph",),
        "the back end gave up, so the partition runs on the CPU, though ONNX Runtime reports success",
        "read AIECompiler.log and aiecompiler-flexml.log under vaiml_par_*",
    ),
)

SAID_RULES = frozenset(row.rule for row in _MESSAGES if row.rule is not None)
"""Rules of `roundel check` whose findings the compiler has a message for."""

# Stages by marker; a message that a row explains keeps the row's words.
_STAGES = (
    (
        "User requested this layer to be partitioned out",
        Explanation("user's flags", "the configuration put it on the CPU", "look at the flags in use"),
    ),
    (
        "Unwrapping layer with",
        Explanation(
            "tiling",
            "the kernel could not be placed",
            "flags for chaining or spilling; no matter of quantization",
        ),
    ),
    (
        "[FE]",
        Explanation(
            "frontend",
            "the operator was not recognised",
            "a flag that rewrites or decomposes it; else move the border of quantization",
        ),
    ),
    (
        "[BE]",
        Explanation(
            "backend",
            "there is no kernel for this shape or type",
            "a flag that rewrites it: enable-conv-to-im2col-and-gemm=1, prefer-conv-to-gemm-conversion=true",
        ),
    ),
    (
        "[MLLIB]",
        Explanation(
            "kernel library",
            "a kernel's constraint failed",
            f"read it; most often a float32 operator that should be bfloat16: {_TO_BF16}",
        ),
    ),
)


def explain_message(message: str) -> Explanation:
    """What a message means; of an unknown one nothing is guessed."""
    stage = next((stage for marker, stage in _STAGES if marker in message), Explanation("unclassified"))
    for row in _MESSAGES:
        if all(words in message for words in row.words):
            return Explanation("compiler" if stage.cause == "" else stage.stage, *_of(row))
    return stage


def _of(row: _Row) -> tuple[str, str, str | None]:
    return row.cause, row.remedy, row.rule
