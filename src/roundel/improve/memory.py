"""What the improving steps have done so far, as plain arrays: whole steps, and single layers of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.data.shards import SampleDigest
from roundel.improve.constants import Changed
from roundel.model.graph import fingerprint
from roundel.recipe.settings import Recipe
from roundel.state import LayerReport, State
from roundel.types import Arrays, QParams, QType, Sample
from roundel.work.checkpoints import Memory, as_array, as_tree

_FACTS = "facts"


def _packed(params: Mapping[str, QParams]) -> tuple[list[list[Any]], Arrays]:
    """Formats as plain words, and scales and zero points as arrays, by their numbers."""
    words = [[name, p.qtype.value, p.axis] for name, p in params.items()]
    arrays: Arrays = {}
    for number, p in enumerate(params.values()):
        arrays |= {f"{number}.scale": np.asarray(p.scale), f"{number}.zero": np.asarray(p.zero_point)}
    return words, arrays


def _unpacked(words: Sequence[Sequence[Any]], arrays: Mapping[str, NDArray[Any]]) -> dict[str, QParams]:
    """The inverse of `_packed`."""
    return {
        name: QParams(arrays[f"{number}.scale"], arrays[f"{number}.zero"], QType(kind), axis)
        for number, (name, kind, axis) in enumerate(words)
    }


def save_layer(memory: Memory, number: int, report: LayerReport, changed: Changed) -> None:
    """Write one layer down: what is said of it, and its new constants.

    Raises:
        OutputError: it cannot be written.
    """
    words, arrays = _packed({name: p for name, (_, p) in changed.items() if p is not None})
    arrays |= {f"codes.{place}": codes for place, (codes, _) in enumerate(changed.values())}
    facts = {"report": asdict(report), "params": words, "names": list(changed)}
    memory.save(number, {**arrays, _FACTS: as_array(facts)})


def load_layer(memory: Memory, number: int) -> tuple[LayerReport, Changed] | None:
    """What an earlier run has written down of a layer; None where it has not.

    Raises:
        DataError: the file is damaged, or of another run.
    """
    arrays = memory.load(number)
    if arrays is None:
        return None
    facts = as_tree(arrays[_FACTS])
    params = _unpacked(facts["params"], arrays)
    changed: Changed = {
        name: (arrays[f"codes.{place}"], params.get(name)) for place, name in enumerate(facts["names"])
    }
    return LayerReport(**facts["report"]), changed


# These change neither what is learned nor what it is learned from.
_BESIDE_THE_POINT = {"name", "title", "output", "verify"}
_WHOLE = "whole"

Done = tuple[State, tuple[LayerReport, ...]]


def run_key(model: ir.Model, state: State, samples: Sequence[Sample], recipe: Recipe) -> dict[str, str]:
    """Digests of everything that decides a step's result, each under its name for people."""
    seen = SampleDigest()
    for sample in samples:
        seen.update(sample)
    settings = recipe.model_dump_json(exclude=_BESIDE_THE_POINT)
    return {
        "model": fingerprint(model),
        "recipe": hashlib.blake2b(settings.encode(), digest_size=16).hexdigest(),
        "set of samples to learn from": seen.hexdigest(),
        "calibration": _state_digest(state),
    }


def once(memory: Memory | None, state: State, step: Callable[[State], Done]) -> Done:
    """What a step gives; where an earlier run has done it, as that run wrote it down."""
    if memory is None:
        return step(state)
    known = memory.load(_WHOLE)
    if known is not None:
        facts = as_tree(known[_FACTS])
        return _restored(state, known, facts), tuple(LayerReport(**report) for report in facts["reports"])
    better, reports = step(state)
    if better.plan is state.plan:  # else it is done again: plans are not written down
        memory.save(_WHOLE, _changes(state, better, reports))
    return better, reports


def _state_digest(state: State) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, params in sorted(state.params.items()):
        digest.update(f"{name} {params.qtype} {params.axis}".encode())
        digest.update(params.scale.tobytes() + params.zero_point.tobytes())
    for table in (state.float_scales, state.values, state.codes):
        for name, array in sorted(table.items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


_TABLES = ("float_scales", "values", "codes")


def _changes(before: State, after: State, reports: Sequence[LayerReport]) -> Arrays:
    new = {name: p for name, p in after.params.items() if p is not before.params.get(name)}
    words, arrays = _packed(new)
    names: dict[str, list[str]] = {}
    for table in _TABLES:
        old, now = getattr(before, table), getattr(after, table)
        names[table] = [name for name, array in now.items() if array is not old.get(name)]
        arrays |= {f"{table}.{number}": now[name] for number, name in enumerate(names[table])}
    facts = {
        "params": words,
        "order": list(after.params),
        "names": names,
        "notes": list(after.notes),
        "reports": [asdict(report) for report in reports],
    }
    return {**arrays, _FACTS: as_array(facts)}


def _restored(before: State, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> State:
    known = {**before.params, **_unpacked(facts["params"], arrays)}
    tables: dict[str, Any] = {
        table: {
            **getattr(before, table),
            **{name: arrays[f"{table}.{number}"] for number, name in enumerate(facts["names"][table])},
        }
        for table in _TABLES
    }
    params = {name: known[name] for name in facts["order"]}
    return replace(before, params=params, notes=tuple(facts["notes"]), **tables)
