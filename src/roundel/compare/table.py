"""A comparison as a flat table, for spreadsheets."""

from __future__ import annotations

import csv
import io

from roundel.compare.types import Comparison, Difference, Storage, TensorComparison, WeightComparison

HEADINGS = (
    "kind",
    "name",
    "node",
    "op",
    "stored_as",
    "sqnr_db",
    "cosine",
    "mse",
    "worst_error",
    "introduced_sqnr_db",
    "inherited_sqnr_db",
    "rounding_sqnr_db",
    "saturated",
    "range_use",
    "float_low",
    "float_high",
    "stored_low",
    "stored_high",
    "worst_channels",
)


def to_csv(comparison: Comparison) -> str:
    """One line for each tensor and weight, after a heading."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADINGS)
    writer.writerows(_tensor(tensor) for tensor in comparison.tensors)
    writer.writerows(_weight(weight) for weight in comparison.weights)
    return text.getvalue()


def _tensor(t: TensorComparison) -> list[object]:
    return [
        t.place,
        t.name,
        t.node,
        t.op,
        *_total(t.storage, t.total),
        *(_db(d) for d in (t.introduced, t.inherited, t.rounding)),
        _or_empty(t.saturated),
        _or_empty(t.range_use),
        t.float_low,
        t.float_high,
        *_range(t.storage),
        " ".join(str(c.channel) for c in t.worst_channels),
    ]


def _weight(w: WeightComparison) -> list[object]:
    lows, highs = zip(*w.float_ranges, strict=True)
    return [
        w.role,
        w.name,
        w.node,
        w.op,
        *_total(w.storage, w.error),
        "",
        "",
        "",
        _or_empty(w.saturated),
        "",
        min(lows),
        max(highs),
        *_range(w.storage),
        " ".join(str(c.channel) for c in w.worst_channels),
    ]


def _total(storage: Storage | None, d: Difference) -> list[object]:
    return [storage.dtype if storage else "float", d.sqnr_db, d.cosine, d.mse, d.worst]


def _db(difference: Difference | None) -> object:
    return "" if difference is None else difference.sqnr_db


def _or_empty(value: float | None) -> object:
    return "" if value is None else value


def _range(storage: Storage | None) -> list[object]:
    return ["", ""] if storage is None else [storage.low, storage.high]
