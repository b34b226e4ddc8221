"""The module paths of all releases that public scripts import from."""

from __future__ import annotations

from roundel.version import VERSION as _ROUNDEL

VERSION = f"0.13+roundel.{_ROUNDEL}"
"""What `quark.__version__` says."""

TOOL_PREFIX = "quark.onnx.tools."

_PLAIN = (
    # today's
    "quark.onnx.quantization.api",
    "quark.onnx.quantization.quantize",
    "quark.onnx.quantization.quant_utils",
    "quark.onnx.quantization.config.config",
    "quark.onnx.quantization.config.custom_config",
    "quark.onnx.quantization.config.legacy",
    "quark.onnx.quantization.config.algorithm",
    "quark.onnx.quantization.config.spec",
    "quark.onnx.quantization.config.data_type",
    "quark.onnx.quantization.auto_search.auto_search_v1",
    "quark.onnx.quantization.auto_search.auto_search_pro",
    "quark.onnx.calibration.methods",
    "quark.onnx.calibration.data_readers",
    "quark.onnx.calibration.calibrators",
    "quark.onnx.operators.custom_ops.build_custom_ops",
    "quark.onnx.utils.model_utils",
    "quark.onnx.utils.deploy_utils",
    "quark.common.utils.log",
    # older releases'
    "quark.onnx.quant_utils",
    "quark.onnx.quantize",
    "quark.onnx.calibrate",
    "quark.onnx.auto_search",
    "quark.onnx.custom_config",
    "quark.onnx.data_reader",
    "quark.onnx.dump_model",
    "quark.shares.utils.log",
    "quark.version",
)

_TOOLS = (
    *("convert_a8w8_npu_to_a8w8_cpu", "convert_bias_int32_to_int16", "convert_custom_ops"),
    *("convert_customqdq_to_qdq", "convert_dynamic_to_fixed", "convert_fp16_to_bf16"),
    *("convert_fp16_to_bfp16", "convert_fp16_to_fp32", "convert_fp32_to_bf16", "convert_fp32_to_bfp16"),
    *("convert_fp32_to_fp16", "convert_nchw_to_nhwc"),
    *("convert_onnx_to_onnxtxt", "convert_onnxtxt_to_onnx", "convert_opset_version", "convert_qdq_to_qop"),
    *("convert_quant_to_float", "convert_resize_fs_to_pof2s", "convert_s8s8_to_u8s8"),
    *("convert_shared_initializer_to_unique", "convert_u16s8_to_s16s8", "convert_u16u8_to_u8u8"),
    *("evaluate", "fix_shapes", "insert_clip_bfloat16_qdq", "print_a16w8_a8w8_nodes", "random_quantize"),
    *("remove_bf16_cast", "remove_initializer_from_input", "remove_qdq", "remove_qdq_between_ops"),
    *("remove_qdq_mul_add", "replace_bfloat16_qdq_cast", "replace_inf_weights", "save_tensor_hist"),
    "save_weights_hist",
)

MODULES = frozenset({*_PLAIN, *(TOOL_PREFIX + name for name in _TOOLS)})


def _packages() -> frozenset[str]:
    """Every path that lies above a module."""
    found: set[str] = set()
    for name in MODULES:
        parts = name.split(".")
        found |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return frozenset(found)


PACKAGES = _packages()
