"""Contenders as text (``peer:preset@key=value@...``) and the ready-made suites. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass

from models import MODELS, BenchSetupError
from records import Contender, Recorded

PEERS = ("roundel", "quark", "ort", "nncf")


@dataclass(frozen=True, slots=True)
class Suite:
    """A named choice of models and contenders.

    Attributes:
        models: Names.
        contenders: As on the command line.
        what: One phrase.
        gpu: Contenders that join on a machine with an NVIDIA GPU.
        recorded: Earlier results by model, for what takes too long to run each time.
    """

    models: tuple[str, ...]
    contenders: tuple[str, ...]
    what: str
    gpu: tuple[str, ...] = ()
    recorded: tuple[tuple[str, Recorded], ...] = ()


_ALL_MODELS = tuple(model.name for model in MODELS)
_IMAGENET = ("efficientnet_lite0", "mobilenet_v2_imagenet")
_ORT_ROWS = ("ort:int8_tensor", "ort:int8_channel", "ort:uint8_channel", "ort:int16_channel")

# 39 minutes on two cores at rest. `--contenders quark:XINT8_ADAROUND --timeout 7200` runs it again.
_QUARK_ADAROUND = Recorded(
    contender="quark:XINT8_ADAROUND",
    wall_s=2319.0,
    forward_s=1.1,
    peak_rss_mb=3800.0,
    top1=87.5,
    top5=97.0,
    agreement=96.9,
    sqnr_db=17.3,
)

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
    "finetune": Suite(
        models=("efficientnet_lite0",),
        contenders=("roundel:xint8", "roundel:recipes/xint8_adaround_alone.yaml", "roundel:xint8_adaround"),
        what="AdaRound at the documents' settings (1000 iterations, batch 2), against Quark's recorded run",
        gpu=("roundel:recipes/xint8_adaround_alone_cuda.yaml", "roundel:recipes/xint8_adaround_cuda.yaml"),
        recorded=(("efficientnet_lite0", _QUARK_ADAROUND),),
    ),
    "formats": Suite(
        models=("efficientnet_lite0",),
        contenders=tuple(
            text
            for name in ("BF16", "BFP16", "MX9", "MXFP8E4M3", "MXINT8")
            for text in (f"roundel:{name.lower()}", f"quark:{name}@include_cle=false")
        ),
        what="bfloat16 and block formats, the same numbers, against Quark (CLE off)",
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
