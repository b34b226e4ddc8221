"""Every extra option, one row each. The order of the rows is the order in which they take effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roundel.errors import did_you_mean
from roundel.quark.errors import QuarkConfigError
from roundel.quark.options import fields
from roundel.quark.options.algorithms import ALGORITHMS
from roundel.quark.request import FIELD_OPTIONS, Request
from roundel.quark.rows import Effect, Option

GROUPS: Mapping[str, tuple[Option, ...]] = {
    "Preference": fields.PREFERENCE,
    "Graph before quantization": fields.GRAPH,
    "What is quantized": fields.TARGETS,
    "Q/DQ pairs": fields.BETWEEN,
    "Calibration": fields.CALIBRATION,
    "Types, scales and biases": fields.NUMERIC,
    "The NPU's arithmetic and limits": fields.ENGINE,
    "Algorithms": ALGORITHMS,
    "The run": fields.RUN,
}
OPTIONS: Mapping[str, Option] = {row.key: row for rows in GROUPS.values() for row in rows}


def effects(request: Request) -> Iterator[tuple[str, Effect]]:
    """What each of the request's options does, in table order.

    Raises:
        QuarkConfigError: an option is unknown, has a wrong value, or asks for what Roundel does not do.
    """
    for key in request.options:
        if key not in OPTIONS:
            raise QuarkConfigError(
                f"There is no extra option '{key}'.",
                where="extra_options",
                hint=did_you_mean(str(key), (*OPTIONS, *FIELD_OPTIONS)) or "See docs/quark-options.md.",
            )
    for key, row in OPTIONS.items():
        if key in request.options:
            yield key, row.effect(request.options[key], request)
