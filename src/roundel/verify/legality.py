"""Whether a finished file is a valid model that ONNX Runtime loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from roundel.calibrate.positions import breaches
from roundel.calibrate.state import QuantState
from roundel.errors import ModelError, VerifyError
from roundel.model.graph import constant_array
from roundel.model.session import open_session
from roundel.recipe import Npu

_UNCHECKED = "roundel.unchecked"
_HINT = "This is a defect of Roundel, not of your model: please report it with the model's structure."


def check_file(path: Path) -> ort.InferenceSession:
    """Check a written model and hand back a session on it, computing exactly as written.

    Raises:
        VerifyError: the ONNX checker or ONNX Runtime refuses it, or a scale is not usable.
    """
    try:
        _check_onnx(path)
    except onnx.checker.ValidationError as error:
        raise VerifyError(
            "The quantized model fails the ONNX checker.", observed=_short(error), hint=_HINT
        ) from error
    try:
        return open_session(path, simulate=True)
    except ModelError as error:
        raise VerifyError(
            "ONNX Runtime does not load the quantized model.", observed=error.observed, hint=_HINT
        ) from error


def _check_onnx(path: Path) -> None:
    """ONNX's checker on all but the operators that ONNX Runtime has added to ONNX's own domain.

    Exporters write these (SimplifiedLayerNormalization, or LayerNormalization before opset 17); ONNX has no
    schema for them and refuses the model.
    """
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError:
        proto = onnx.load(path, load_external_data=False)
        version = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
        own = [node for node in proto.graph.node if not node.domain]
        foreign = [node for node in own if not onnx.defs.has(node.op_type, version, "")]
        if not foreign:
            raise
        for node in foreign:
            node.domain = _UNCHECKED
        proto.opset_import.add(domain=_UNCHECKED, version=1)
        onnx.checker.check_model(proto)


def check_scales(model: ir.Model) -> None:
    """Every Q/DQ node has finite, positive scales and as many as its axis has entries."""
    for node in model.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale = constant_array(node.inputs[1])
        if scale is None or not (np.isfinite(scale).all() and (scale > 0).all()):
            raise VerifyError(
                "A scale is not a positive finite number.",
                where=f"{node.op_type} '{node.name}'",
                observed=None if scale is None else scale.reshape(-1)[:4],
                hint=_HINT,
            )


def check_limits(model: ir.Model, state: QuantState, npu: Npu) -> None:
    """Every shift limit that the recipe asks for holds with the final scales."""
    for breach in breaches(model.graph, state, npu) if npu.limits else ():
        raise VerifyError(
            f"The NPU's limit {breach.rule} does not hold.",
            where=f"node '{breach.node}'",
            observed=breach.value,
            expected=f"{breach.low} to {breach.high}",
            hint=_HINT,
        )


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
