"""The deployment kit: what its folder holds for one model on one device, and how that is shown."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any, Unpack

import onnx_ir as ir
from rich.console import Console
from rich.text import Text

from roundel.data.images import plan_images
from roundel.errors import ModelError, RecipeError
from roundel.heads import tail_file
from roundel.kit.files import KitFile, write_folder
from roundel.model.files import file_sha256
from roundel.model.graph import input_specs
from roundel.model.load import as_written, load_model
from roundel.options import DataWords, takes_image_words
from roundel.outputs import external_tensors
from roundel.plain import Card, to_plain
from roundel.remembered import Remembered
from roundel.report.console import labelled, show_notes
from roundel.rules.formats import Recognised, recognise
from roundel.rules.report import refuse_silent
from roundel.targets.npu import MINIMUM_CONVS, USUAL_DEVICE, Compiler, Device, Format, device_named


def external_files(model: ir.Model, path: Path) -> dict[str, Path]:
    """The external data files of a model: location as the model spells it, and the file.

    Raises:
        ModelError: a location leaves the model's folder, directly or through a symbolic link.
    """
    home = path.absolute().parent
    found: dict[str, Path] = {}
    for tensor in external_tensors(model):
        location = str(tensor.location).replace("\\", "/")
        parts = PurePosixPath(location).parts
        source = home.joinpath(*parts)
        outside = ".." in parts or PurePosixPath(location).is_absolute() or ":" in location
        if outside or not source.resolve().is_relative_to(home.resolve()):
            raise ModelError(
                "A weight's external data lies outside the model's folder.",
                where=f"{path}, tensor '{tensor.name}'",
                observed=location,
                expected="a file in the model's own folder",
                hint="Save the model again with its weights beside it.",
            )
        if not source.is_file():
            raise ModelError(
                "A weight's external data file does not exist.",
                where=f"{path}, tensor '{tensor.name}'",
                observed=location,
                hint="Keep the .data file in the model's own folder.",
            )
        found[PurePosixPath(*parts).as_posix()] = source
    return dict(sorted(found.items()))


CACHE_FOLDER = "cache"
CONFIG_FILE = "vaiml_config.json"
OPTIMIZE_LEVELS = (1, 2, 3)
_NOT_PLAIN = re.compile(r"[^\w ._+-]")


def check_device(recognised: Recognised, device: Device) -> None:
    """Refuse a format that the device's compilers do not take."""
    if recognised.format in device.formats:
        return
    takes = ", ".join(sorted(f.name for f in device.formats))
    compiled = "a float model, which the compiler would turn into BF16"
    what = compiled if recognised.format is Format.FLOAT else recognised.format.name
    raise ModelError(
        f"The NPU of {device.name} ({device.processors}) does not take {what}.",
        observed=f"{recognised.format.name}: {recognised.reason}",
        expected=takes,
        hint=f"Quantize the float model with --preset {takes.split(', ')[0].lower()}, "
        "or deploy to stx, stx-halo or krk.",
    )


def provider_options(kind: Format, device: Device, cache_key: str) -> dict[str, str]:
    """Options of the VitisAI execution provider, in the current spelling; paths from the kit's folder."""
    own = device.integer_options if kind.integer else {"config_file": CONFIG_FILE}
    # Anything but "0" keeps the compiled model in memory: no cache on disk, and no assignment report.
    cache = {"cache_dir": CACHE_FOLDER, "cache_key": cache_key, "enable_cache_file_io_in_mem": "0"}
    return {**own, **cache}


def vaiml_config(optimize_level: int) -> str:
    """The BF16 compiler's config file: its two passes and the options that AMD documents."""
    if optimize_level not in OPTIMIZE_LEVELS:
        raise RecipeError(
            "The BF16 compiler has no such optimization level.",
            where="optimize_level",
            observed=optimize_level,
            expected="1, 2 or 3",
        )
    partition = {
        "name": "vaiml_partition",
        "plugin": "vaip-pass_vaiml_partition",
        "vaiml_config": {"optimize_level": optimize_level, "preferred_data_storage": "auto"},
    }
    tree = {
        "passes": [{"name": "init", "plugin": "vaip-pass_init"}, partition],
        "target": "VAIML",
        "targets": [{"name": "VAIML", "pass": ["init", "vaiml_partition"]}],
    }
    return json.dumps(tree, indent=2) + "\n"


def readme(
    model: str,
    recognised: Recognised,
    device: Device,
    notes: tuple[str, ...],
    *,
    images: bool,
    tail: bool,
) -> str:
    """The text of the kit's README: of `readme.txt`, the lines that concern this format on this device."""
    kind = recognised.format
    facts = {
        "integer": kind.integer,
        "compiled": not kind.integer,
        "a16w8": kind is Format.A16W8,
        "bf16": kind is Format.BF16,
        "xclbin": device.needs_xclbin,
        "preinstalled": kind.integer and not device.needs_xclbin,
        "two_convs": kind.integer and device.compiler is not Compiler.X1,
        "images": images,
        "tail": tail,
        "notes": bool(notes),
    }
    lines = []
    for line in _asset("readme.txt").splitlines():
        fact, _, text = line[1:].partition(" ") if line.startswith("?") else ("", "", line)
        if not fact or facts[fact]:
            lines.append(text)
    words = {
        "title": f"{_NOT_PLAIN.sub('_', model)} on {device.name} ({device.processors})",
        "format": f"{kind.name} ({recognised.reason})",
        "notes": "\n".join(f"- {note}" for note in notes),
    }
    return Template("\n".join(lines) + "\n").substitute(words)


def _asset(name: str) -> str:
    return resources.files("roundel.kit").joinpath(name).read_text(encoding="utf-8")


MODEL_FILE, TAIL_FILE = "model.onnx", "tail.onnx"
OPTIONS_FILE = "provider_options.json"
IMAGES_FILE = "preprocessing.json"


@dataclass(frozen=True, slots=True, repr=False)
class DeployKit(Card):
    """A kit that was written.

    Attributes:
        folder: where it is.
        files: names of its files.
        format: the model's format.
        reason: what in the graph shows the format.
        device: the device it is for.
        options: the VitisAI provider's options, as in provider_options.json.
        notes: what to know before running it.
    """

    folder: Path
    files: tuple[str, ...]
    format: Format
    reason: str
    device: str
    options: Mapping[str, str]
    notes: tuple[str, ...]

    def card(self) -> Mapping[str, object]:
        """Where it is and what it holds."""
        about = f"{self.format.name} for {self.device}"
        files = ", ".join(self.files)
        return {"folder": self.folder, "model": about, "files": files, "notes": len(self.notes)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tree: dict[str, Any] = to_plain(self)
        options = tree.pop("options")
        return {**tree, "format": self.format.name, "provider_options": options}


@takes_image_words
def deploy(
    model: str | Path,
    output: str | Path,
    *,
    device: str | None = None,
    optimize_level: int = 2,
    **words: Unpack[DataWords],
) -> DeployKit:
    """Write a folder with the model, provider options, run script and instructions for one device.

    Args:
        model: the ONNX file to deploy. It is copied byte for byte, with its external data, and with the
            tail that its record names, if its head was cut off.
        output: the folder to write; created when missing, its parent must exist. Files in it that an earlier
            kit did not bring are never touched.
        device: phx, hpt, stx, stx-halo or krk; that of the run, else stx.
        optimize_level: effort of the BF16 compiler, 1 to 3; integer models have no use for it.
        words: how the run script turns an image into the model's input; as in the record beside the model
            where nothing else is said.

    Raises:
        RoundelError: the model is in no format that the device takes, or the folder cannot be written.
    """
    path, target, known = Path(model), Path(output).absolute(), Remembered.beside([model])
    machine = device_named(device or known.device or USUAL_DEVICE)
    config = vaiml_config(optimize_level)
    loaded = load_model(path, allow_quantized=True)
    raw = as_written(path)
    recognised = recognise(raw, loaded.model)
    check_device(recognised, machine)
    refuse_silent(path, None, machine.name)
    weights = external_files(raw, path)
    options = provider_options(recognised.format, machine, _cache_key(path, weights))
    notes = (*recognised.notes, *_model_notes(loaded.model, recognised.format, machine))
    files = [KitFile(MODEL_FILE, path)]
    files += [KitFile(name, source) for name, source in weights.items()]
    tail = tail_file(path)
    if tail is not None:
        files.append(KitFile(TAIL_FILE, tail))
        files += [KitFile(name, source) for name, source in external_files(as_written(tail), tail).items()]
    files.append(KitFile(OPTIONS_FILE, (json.dumps(options, indent=2) + "\n").encode()))
    if not recognised.format.integer:
        files.append(KitFile(CONFIG_FILE, config.encode()))
    images = _preprocessing(known, words, loaded.model)
    if images is not None:
        files.append(KitFile(IMAGES_FILE, (json.dumps(images, indent=1) + "\n").encode()))
    files.append(KitFile("run.py", _asset("run.py.txt").encode(), executable=True))
    text = readme(path.name, recognised, machine, notes, images=images is not None, tail=tail is not None)
    files.append(KitFile("README.md", text.encode()))
    kind, reason = recognised.format, recognised.reason
    about = {"model": path.name, "format": kind.name, "device": machine.name, "notes": list(notes)}
    written = write_folder(target, files, about)
    return DeployKit(Path(output), written, kind, reason, machine.name, options, notes)


def _preprocessing(known: Remembered, words: DataWords, model: ir.Model) -> dict[str, object] | None:
    """How an image becomes the model's input; None where nobody has said.

    Raises:
        DataError: it was said, and the model does not take images so.
    """
    data = known.record.get("data")
    recorded = isinstance(data, Mapping) and bool(data.get("preprocessing"))
    if not recorded and not any(value not in (None, False) for value in words.values()):
        return None
    return plan_images(known.settings(None, words), input_specs(model)).settled()


def _cache_key(path: Path, weights: Mapping[str, Path]) -> str:
    """A name for the compiled model that changes when the model does: a stale cache is never loaded."""
    parts = "".join(file_sha256(part) for part in (path, *weights.values()))
    digest = hashlib.sha256(parts.encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem).strip("_")[:40] or "model"
    return f"{stem}-{digest[:12]}"


def _model_notes(model: ir.Model, kind: Format, device: Device) -> tuple[str, ...]:
    notes = []
    convs = sum(1 for node in model.graph.all_nodes() if node.op_type == "Conv")
    if kind.integer and device.compiler is not Compiler.X1 and convs < MINIMUM_CONVS:
        notes.append(
            f"The model has {convs} Conv nodes: the integer flow offloads nothing below {MINIMUM_CONVS}. "
            "Deploy the float model instead, which runs as BF16."
        )
    for spec in input_specs(model):
        shape = spec.shape or ()
        if shape and isinstance(shape[0], int) and shape[0] > 1:
            notes.append(f"Input '{spec.name}' has a fixed batch of {shape[0]}: the NPU takes batch 1.")
        if any(not isinstance(size, int) for size in shape[1:]):
            notes.append(f"Input '{spec.name}' has open dimensions besides the batch: fix them ({spec}).")
    if kind is Format.BF16 and len(model.graph.outputs) > 1:
        notes.append("Several outputs in BF16: wrong values were reported, so compare them with --cpu.")
    return tuple(notes)


def show_kit(console: Console, kit: DeployKit) -> None:
    """What was written, and what to do next."""
    rows = {
        "folder": str(kit.folder),
        "format": f"{kit.format.name} ({kit.reason})",
        "device": kit.device,
        "files": ", ".join(kit.files),
        "options": ", ".join(f"{key}={value}" for key, value in kit.options.items()),
    }
    console.print(labelled(rows))
    show_notes(console, kit.notes)
    source = "--image IMAGE" if IMAGES_FILE in kit.files else "--random"
    console.print(Text(f"next: python {kit.folder / 'run.py'} {source} --report"))
