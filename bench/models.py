"""The benchmark models, as data.

Everything that distinguishes one model from another (where its file comes from, how an image becomes its
input, where its labels come from) is a field of :class:`BenchModel`; the code that acts on it is the same for
all. Standard library only, so that the orchestrator runs in any Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

BENCH_DIR = Path(__file__).resolve().parent
REPO_ROOT = BENCH_DIR.parent
WORK_DIR = REPO_ROOT / ".bench"
SHARED_DIR = REPO_ROOT.parent / "shared"

OPSET = 17


class BenchSetupError(RuntimeError):
    """Something that the benchmark needs is not on this machine; the message says what and what to do."""


class Source(Enum):
    """How the float ONNX file of a model is obtained."""

    SHARED = "shared"
    EXPORT_EFFICIENTNET_LITE0 = "export_efficientnet_lite0"


class Labels(Enum):
    """Which labelled image set a model is calibrated and judged on."""

    IMAGENET = "imagenet"
    CIFAR10 = "cifar10"


@dataclass(frozen=True, slots=True)
class Preprocess:
    """From an RGB image with values 0..255 to the model's NCHW float32 input: ``(x - mean) / std``.

    Attributes:
        resize: Length of the short side after a bilinear resize, or None to keep the image as it is.
        crop: Side of the centre crop taken after the resize, or None for no crop.
        mean: Per-channel value to subtract, on the 0..255 scale.
        std: Per-channel value to divide by, on the 0..255 scale.
    """

    resize: int | None
    crop: int | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class BenchModel:
    """One model of the benchmark.

    Attributes:
        name: Key used on the command line and in result files.
        source: How the float file is obtained.
        labels: Image set for calibration and evaluation.
        preprocess: Image to input tensor.
        title: One phrase for the table.
        input_name: The input of the ONNX graph.
    """

    name: str
    source: Source
    labels: Labels
    preprocess: Preprocess
    title: str
    input_name: str = "input"


def _from_unit(red: float, green: float, blue: float) -> tuple[float, float, float]:
    """Brings a mean or std that is stated for images on [0, 1] to the 0..255 scale."""
    return 255.0 * red, 255.0 * green, 255.0 * blue


_CIFAR_64 = Preprocess(
    resize=64, crop=None, mean=_from_unit(0.4914, 0.4822, 0.4465), std=_from_unit(0.247, 0.243, 0.262)
)
_CIFAR_32 = Preprocess(
    resize=None, crop=None, mean=_from_unit(0.485, 0.456, 0.406), std=_from_unit(0.229, 0.224, 0.225)
)

MODELS: tuple[BenchModel, ...] = (
    BenchModel(
        name="efficientnet_lite0",
        source=Source.EXPORT_EFFICIENTNET_LITE0,
        labels=Labels.IMAGENET,
        preprocess=Preprocess(resize=256, crop=224, mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0)),
        title="EfficientNet-Lite0, ImageNet",
    ),
    BenchModel(
        name="mobilenet_v2_imagenet",
        source=Source.SHARED,
        labels=Labels.IMAGENET,
        preprocess=Preprocess(resize=256, crop=224, mean=(127.5, 127.5, 127.5), std=(127.5, 127.5, 127.5)),
        title="MobileNetV2, ImageNet",
    ),
    BenchModel(
        name="mobilenet_v2",
        source=Source.SHARED,
        labels=Labels.CIFAR10,
        preprocess=_CIFAR_64,
        title="MobileNetV2, CIFAR-10",
    ),
    BenchModel(
        name="mobilenet_v3_small",
        source=Source.SHARED,
        labels=Labels.CIFAR10,
        preprocess=_CIFAR_64,
        title="MobileNetV3-small, CIFAR-10",
    ),
    BenchModel(
        name="cifar10_resnet20",
        source=Source.SHARED,
        labels=Labels.CIFAR10,
        preprocess=_CIFAR_32,
        title="ResNet-20, CIFAR-10",
    ),
)


def model_by_name(name: str) -> BenchModel:
    """Looks a model up by its name.

    Args:
        name: The model's key.

    Returns:
        The model.

    Raises:
        BenchSetupError: No model has that name.
    """
    for model in MODELS:
        if model.name == name:
            return model
    known = ", ".join(model.name for model in MODELS)
    raise BenchSetupError(f"unknown model {name!r}; the benchmark has: {known}")


def require_shared() -> Path:
    """Returns the folder with the real models and images.

    Raises:
        BenchSetupError: The folder, or a part of it, is missing.
    """
    missing = [
        part for part in ("data/imagenet", "data/cifar10", "models") if not (SHARED_DIR / part).is_dir()
    ]
    if missing:
        raise BenchSetupError(
            "the benchmark reads real models and images from ../shared (next to the repository), and this is "
            f"missing there: {', '.join(missing)}. Put the folder in place and run again."
        )
    return SHARED_DIR


def float_path(model: BenchModel) -> Path:
    """Where the float ONNX file of a model is (or will be, for an exported one)."""
    if model.source is Source.SHARED:
        return SHARED_DIR / "models" / f"{model.name}.onnx"
    return WORK_DIR / "models" / f"{model.name}.onnx"


def calib_path(model: BenchModel) -> Path:
    """The cached calibration array of a model (npz: x float32 NCHW, y labels)."""
    return WORK_DIR / "data" / f"{model.name}.calib.npz"


def eval_path(model: BenchModel) -> Path:
    """The cached evaluation array of a model (npz: x float32 NCHW, y labels)."""
    return WORK_DIR / "data" / f"{model.name}.eval.npz"
