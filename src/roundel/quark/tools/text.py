"""Models as text and back."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]

from roundel.errors import ModelError
from roundel.model.files import write_text
from roundel.quark.tools.files import refuse_same
from roundel.quark.tools.tool import Tool


def convert_onnx_to_onnxtxt(model: onnx.ModelProto) -> str:
    """The model in protobuf's text form."""
    return str(text_format.MessageToString(model))


def convert_onnxtxt_to_onnx(text: str) -> onnx.ModelProto:
    """The model that the text describes."""
    try:
        return text_format.Parse(text, onnx.ModelProto())  # type: ignore[no-any-return, unused-ignore]
    except text_format.ParseError as error:
        raise ModelError("The text is not a model.", observed=str(error)[:300]) from error


def _to_text(source: str, target: str) -> str:
    refuse_same(source, target)
    write_text(Path(target), convert_onnx_to_onnxtxt(_loaded(source)))
    return f"wrote text\n{target}"


def _to_model(source: str, target: str) -> str:
    refuse_same(source, target)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError("The text file cannot be read.", where=source, observed=error) from error
    onnx.save(convert_onnxtxt_to_onnx(text), target)
    return f"wrote a model\n{target}"


def _loaded(source: str) -> onnx.ModelProto:
    try:
        return onnx.load(source)
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError("The model cannot be read.", where=source, observed=error) from error


TEXT_TOOLS = (
    Tool(
        "convert_onnx_to_onnxtxt",
        "A model as text that people can read and compare.",
        _to_text,
        exports={"convert_onnx_to_onnxtxt": convert_onnx_to_onnxtxt},
    ),
    Tool(
        "convert_onnxtxt_to_onnx",
        "A model from its text.",
        _to_model,
        exports={"convert_onnxtxt_to_onnx": convert_onnxtxt_to_onnx},
    ),
)
