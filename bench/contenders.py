"""Contenders as text (``peer:preset@key=value@...``) and the ready-made suites. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass

from models import MODELS, BenchSetupError
from records import Contender

PEERS = ("roundel", "quark", "ort")


@dataclass(frozen=True, slots=True)
class Suite:
    """A named choice of models and contenders."""

    models: tuple[str, ...]
    contenders: tuple[str, ...]
    what: str


_ALL_MODELS = tuple(model.name for model in MODELS)
_IMAGENET = ("efficientnet_lite0", "mobilenet_v2_imagenet")
_ORT_ROWS = ("ort:int8_tensor", "ort:int8_channel", "ort:uint8_channel", "ort:int16_channel")

SUITES: dict[str, Suite] = {
    "foundation": Suite(
        models=_ALL_MODELS,
        contenders=(
            "roundel:a8w8_minmax",
            "quark:A8W8@include_cle=false",
            "roundel:a16w8_minmax",
            "quark:A16W8@include_cle=false",
            *_ORT_ROWS,
        ),
        what="the same grids without any improvement step, against Quark (CLE off) and ONNX Runtime",
    ),
    "xint8": Suite(
        models=_ALL_MODELS,
        contenders=("roundel:xint8_plain", "quark:XINT8@include_cle=false"),
        what="XINT8 without any improvement step, against Quark (CLE off)",
    ),
    "effort": Suite(
        models=_ALL_MODELS,
        contenders=(
            "roundel:xint8",
            "quark:XINT8",
            "roundel:a8w8",
            "quark:A8W8",
            "roundel:a16w8",
            "quark:A16W8",
        ),
        what="both at their defaults: Roundel with effort fast, Quark with equalization",
    ),
    "peers": Suite(
        models=_IMAGENET,
        contenders=(
            "quark:XINT8",
            "quark:A8W8",
            "quark:A8W8@include_cle=false",
            "quark:A16W8",
            "quark:A16W8@include_cle=false",
            "quark:BF16",
            "quark:S8S8_AAWS",
            "quark:U8S8_AAWS",
            "quark:S16S8_ASWS",
            *_ORT_ROWS,
        ),
        what="the peers alone, at their own defaults",
    ),
}


def parse_contender(text: str) -> Contender:
    """Reads one contender.

    Args:
        text: ``peer:preset``, then any number of ``@key=value``; a value is JSON where it parses as such
            (``false``, ``3``) and a plain string otherwise.

    Returns:
        The contender.

    Raises:
        BenchSetupError: The text is not of that form, or the peer is unknown.
    """
    head, *settings = text.strip().split("@")
    peer, colon, preset = head.partition(":")
    if not colon or not preset or peer not in PEERS:
        raise BenchSetupError(
            f"{text!r} is no contender; write peer:preset with a peer of {', '.join(PEERS)}"
        )
    options: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise BenchSetupError(f"{setting!r} in {text!r} is no setting; write key=value")
        options[key] = _value(value)
    return Contender(peer, preset, tuple(sorted(options.items())))


def _value(text: str) -> object:
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value
