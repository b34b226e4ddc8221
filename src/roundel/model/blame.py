"""Whose fault an unforeseen failure is: the model's, where ONNX Runtime or ONNX refuses it as given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir

from roundel.errors import ModelError, RoundelError, VerifyError
from roundel.model.external import self_contained
from roundel.model.session import open_session

ModelSource = str | Path | bytes | onnx.ModelProto | ir.Model

# ONNX's checker does not know ONNX Runtime's own operators in ONNX's domain; that makes no model broken.
_NOT_A_FAULT = "No Op registered for"


@contextmanager
def blaming(source: ModelSource) -> Iterator[None]:
    """Turn a failure in the block into a `ModelError` where the model as given is not valid.

    A damaged model can get far before a step stumbles over it. Asking ONNX and ONNX Runtime about every model
    first would cost time and memory; asking when something has failed costs nothing. Where they find nothing
    to blame, the failure passes through as it is: then it is Roundel's own.
    """
    try:
        yield
    except MemoryError as error:
        raise ModelError(
            "The memory does not suffice for this model and these data.",
            where=source if isinstance(source, str | Path) else "the model passed in",
            observed=error,
            hint="Give smaller shapes or fewer samples, or more memory.",
        ) from error
    except Exception as error:
        if isinstance(error, RoundelError) and not isinstance(error, VerifyError):
            raise
        found = fault(source)
        if found is None:
            raise
        raise ModelError(
            "The model is not valid.",
            where=source if isinstance(source, str | Path) else "the model passed in",
            observed=found,
            expected="a model that onnx.checker.check_model accepts and ONNX Runtime loads",
            hint="The file may be damaged: export or download the model again.",
        ) from error


def fault(source: ModelSource) -> str | None:
    """What ONNX Runtime or ONNX's checker refuses about a model, or None."""
    try:
        whole: bytes | Path = _whole(source)
    except (ValueError, TypeError, RuntimeError) as error:  # protobuf cannot even write it
        return _short(error)
    try:
        open_session(whole)
    except ModelError as error:
        return error.observed
    try:
        onnx.checker.check_model(whole if isinstance(whole, bytes) else str(whole))
    except onnx.checker.ValidationError as error:
        return None if _NOT_A_FAULT in str(error) else _short(error)
    return None


def _whole(source: ModelSource) -> bytes | Path:
    if isinstance(source, str | Path):
        return Path(source)
    if isinstance(source, ir.Model):
        source = ir.to_proto(self_contained(source))
    return source if isinstance(source, bytes) else bytes(source.SerializeToString())


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
