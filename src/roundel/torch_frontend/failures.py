"""Why an export failed: the operator or the line, in a few words, and what to do about it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

from roundel.errors import ModelError

_TORCH = Path(torch.__file__).parent
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_NODE = re.compile(r"target=torch\.ops\.([\w.]+)")
_LONGEST = 300


def not_traced(error: Exception) -> ModelError:
    """For what torch.export refuses: the cause and the line of the user's code that led to it."""
    text = _plain(str(error))
    return ModelError(
        "torch.export cannot trace the module.",
        where=_line(error),
        observed=f"{type(error).__name__}: {text}",
        hint=_advice(error),
    )


def not_converted(error: Exception) -> ModelError:
    """For what the ONNX exporter has no translation of: the operator."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and isinstance(cause, Exception):
        chain.append(cause)
    texts = [str(one) for one in chain]
    found = [match for pattern in (_OPERATOR, _NODE) for text in texts if (match := pattern.search(text))]
    return ModelError(
        "The module cannot be written as ONNX.",
        where=f"operator {found[0].group(1)}" if found else None,
        observed=_plain(texts[-1]),
        hint="Say it with other operators, or keep this part out of the module and run it before or after.",
    )


def _line(error: BaseException) -> str | None:
    """The innermost line of the traceback that is not torch's own; tracing runs the user's forward."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not _is_ours(Path(frame.filename))
    ]
    if not frames:
        return None
    last = frames[-1]
    return f"{Path(last.filename).name}, line {last.lineno}, in {last.name}: {last.line}"


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(_TORCH) or path.is_relative_to(Path(__file__).parent)


def _plain(text: str) -> str:
    """The first paragraph on one line: what follows is about debugging torch."""
    first = text.split("For more information, run with", 1)[0].split("\n\n", 1)[0]
    rest = re.search(r"- (You marked .*?)(?:\. If you're|\n|$)", text)
    whole = first if rest is None else f"{first} {rest.group(1)}"
    return " ".join(whole.split())[:_LONGEST]


def _advice(error: Exception) -> str:
    name, text = type(error).__name__, str(error)
    if "data-dependent" in text or "DataDependent" in name:
        return "The path through the code depends on values: use torch.where, or torch.cond."
    if "Constraints violated" in text:
        return "A dimension is fixed by the code or the example: leave it out of the dynamic shapes."
    if ".numpy()" in text:
        return "Compute with torch operators inside forward, not with numpy."
    if "expected to be" in text or "shape" in text.lower():
        return "Check that the example's shapes and the dynamic shapes fit the module."
    return "Try module(*example_inputs) first; then see torch.export's documentation for this message."
