"""Recipes and array files that mean harm."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

from fuzzing.damage import damaged
from roundel.recipe.load import load_recipe, preset_names

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 1.5, -0.5, 1e300, float("nan"), float("inf"), 2**70, -(2**70)),
    *("", "x", "int8", "minmax", "re:(", "op:Conv", "*", "a" * 3000, "\x00", "none", "float32", "auto"),
    *([], {}, [1, 2], ["conv"], {"a": 1}, [[]], [{}], {"type": "int8"}, [None], ["*", "re:.*"], [-1, 1]),
)
TEXTS = (
    "a: &a [*a]",
    "!!python/object/apply:os.system ['true']",
    "? [a]\n: b",
    "<<: {a: 1}",
    "2001-13-45",
    "a: !!binary ####",
    "{" * 200,
    "\ufeffname: x",
    "a: 0x" + "f" * 400,
    "a: 1_000_000_000_000",
    "1: 2",
    "null: 3",
)


_SHAPES = (
    *("(-1,)", "(9999999999999, 3)", "(1, 3, 8, 8)", "()", "(1.5,)", "('a',)", "[1]", "(2**40,)", "(1e9,)"),
    *("(0, 0)", "(True, 3)", f"({'1,' * 70})"),
)


class Marker:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.trace),))


def recipe_text(chance: Random) -> bytes:
    """A preset with values replaced, or text that is no recipe."""
    if chance.random() < 0.15:
        return chance.choice(TEXTS).encode("utf-8", "surrogatepass")
    recipe = load_recipe(chance.choice(preset_names()))
    full = chance.random() < 0.5
    tree = recipe.model_dump(mode="json", exclude_defaults=not full)
    for _ in range(chance.choice((1, 1, 2, 4))):
        _replace(tree if chance.random() < 0.7 else recipe.model_dump(mode="json"), tree, chance)
    try:
        if chance.random() < 0.5:
            data = json.dumps(tree).encode()
        else:
            data = yaml.safe_dump(tree).encode("utf-8", "surrogatepass")
    except yaml.YAMLError:
        data = repr(tree).encode()
    return damaged(data, chance) if chance.random() < 0.2 else data


def _replace(shape: dict[str, Any], tree: dict[str, Any], chance: Random) -> None:
    """Put a wrong value at a place that recipes have."""
    keys = list(shape)
    if not keys:
        return
    key = chance.choice(keys)
    deeper = shape[key]
    if isinstance(deeper, dict) and deeper and chance.random() < 0.85:
        inner = tree.setdefault(key, {})
        if isinstance(inner, dict):
            _replace(deeper, inner, chance)
            return
    tree[key if chance.random() < 0.95 else key + "s"] = copy.deepcopy(chance.choice(VALUES))


def array_bytes(shape: tuple[int, ...], chance: Random) -> bytes:
    """An .npy file of nearly the right shape."""
    dims = list(shape)
    if dims and chance.random() < 0.3:
        dims[chance.randrange(len(dims))] = chance.choice((0, 1, 2, 3, 9))
    kind = chance.choice(
        ("<f4", "<f4", "<f4", ">f4", "<f8", "<f2", "u1", "<i8", "?", "<c8", "S4", "<U2", "<M8[s]")
    )
    array = np.random.default_rng(chance.randrange(2**32)).random(dims)
    with np.errstate(all="ignore"):
        array = np.asarray(array * 9, np.float64).astype(kind)
    if array.dtype.kind == "f" and array.size and chance.random() < 0.2:
        array.reshape(-1)[0] = chance.choice((np.nan, np.inf, -np.inf, 6e4))
    if chance.random() < 0.2:
        array = np.asfortranarray(array)
    stream = io.BytesIO()
    np.save(stream, array)
    data = stream.getvalue()
    if chance.random() < 0.3:
        header = (
            f"{{'descr': '<f4', 'fortran_order': False, 'shape': {chance.choice(_SHAPES)}, }}".ljust(117)
            + "\n"
        )
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data[128:]
    return data


def archive_bytes(shape: tuple[int, ...], names: tuple[str, ...], chance: Random, trace: str) -> bytes:
    """An .npz file: members missing, repeated, outside, packed tight or pickled."""
    stream = io.BytesIO()
    packing = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(stream, "w", packing) as archive:
        for name in names:
            content = array_bytes(shape, chance)
            match chance.randrange(10):
                case 0:
                    content = pickle.dumps(Marker(trace))
                case 1:
                    content += bytes(chance.choice((1, 100_000, 20_000_000)))
                case 2:
                    name = chance.choice(("../" + name, "/" + name, name * 3000, "", name + ".npy"))
                case 3:
                    name = chance.choice(("y", "X", "x.y"))
            archive.writestr(f"{name}.npy"[:60000], content)
    return stream.getvalue()


def object_array(trace: str) -> bytes:
    """An .npy file whose content is a pickle."""
    stream = io.BytesIO()
    np.save(stream, np.array([Marker(trace)], dtype=object), allow_pickle=True)
    return stream.getvalue()
