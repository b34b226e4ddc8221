"""Everything that a model needs to run on a Ryzen AI machine, in one folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import onnx_ir as ir

from roundel.check.number_format import Recognised, recognise
from roundel.deploy.external import external_files
from roundel.deploy.folder import KitFile, file_digest, write_folder
from roundel.deploy.provider import CONFIG_FILE, check_device, provider_options, vaiml_config
from roundel.deploy.readme import readme
from roundel.model import load_model
from roundel.model.graph import input_specs
from roundel.targets.devices import MINIMUM_CONVS, Device, Format, device_named

MODEL_FILE = "model.onnx"
OPTIONS_FILE = "provider_options.json"


@dataclass(frozen=True, slots=True)
class DeployKit:
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "folder": str(self.folder),
            "files": list(self.files),
            "format": self.format.name,
            "reason": self.reason,
            "device": self.device,
            "provider_options": dict(self.options),
            "notes": list(self.notes),
        }


def write_kit(
    model: str | Path, folder: str | Path, *, device: str = "stx", optimize_level: int = 2
) -> DeployKit:
    """Write a folder with the model, provider options, run script and instructions for one device.

    Args:
        model: the ONNX file to deploy. It is copied byte for byte, with its external data.
        folder: the folder to write; created when missing, its parent must exist. Files in it that an earlier
            kit did not bring are never touched.
        device: phx, hpt, stx, stx-halo or krk.
        optimize_level: effort of the BF16 compiler, 1 to 3; integer models have no use for it.

    Raises:
        RoundelError: the model is in no format that the device takes, or the folder cannot be written.
    """
    path, target, machine = Path(model), Path(folder).absolute(), device_named(device)
    config = vaiml_config(optimize_level)
    loaded = load_model(path, allow_quantized=True)
    raw = ir.load(path.absolute(), format="protobuf")
    recognised = recognise(raw, loaded.model)
    check_device(recognised, machine)
    weights = external_files(raw, path)
    options = provider_options(recognised.format, machine, _cache_key(path, weights))
    notes = (*recognised.notes, *_model_notes(loaded.model, recognised.format))
    files = [KitFile(MODEL_FILE, path)]
    files += [KitFile(name, source) for name, source in weights.items()]
    files.append(KitFile(OPTIONS_FILE, (json.dumps(options, indent=2) + "\n").encode()))
    if not recognised.format.integer:
        files.append(KitFile(CONFIG_FILE, config.encode()))
    script = resources.files("roundel.deploy").joinpath("run_template.py").read_bytes()
    files.append(KitFile("run.py", script, executable=True))
    files.append(KitFile("README.md", readme(path.name, recognised, machine, notes).encode()))
    about = _about(path, recognised, machine, notes)
    written = write_folder(target, files, about)
    kind, reason = recognised.format, recognised.reason
    return DeployKit(Path(folder), written, kind, reason, machine.name, options, notes)


def _about(path: Path, recognised: Recognised, device: Device, notes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "model": path.name,
        "format": recognised.format.name,
        "device": device.name,
        "notes": list(notes),
    }


def _cache_key(path: Path, weights: Mapping[str, Path]) -> str:
    """A name for the compiled model that changes when the model does: a stale cache is never loaded."""
    parts = "".join(file_digest(part) for part in (path, *weights.values()))
    digest = hashlib.sha256(parts.encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem).strip("_")[:40] or "model"
    return f"{stem}-{digest[:12]}"


def _model_notes(model: ir.Model, kind: Format) -> tuple[str, ...]:
    notes = []
    convs = sum(1 for node in model.graph.all_nodes() if node.op_type == "Conv")
    if kind.integer and convs < MINIMUM_CONVS:
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
