"""From pixels to model input: `(pixel * scale - mean) / std`, after resize and centre crop.

What is asked for stands in the recipe's section `data`. Mean and std are in units of the scaled image and
in the channel order that the model takes (blue first when `bgr`); one number serves all channels. Without a
size, images get the height and width of the model input when they are fixed, else they keep their own;
without a crop, they are cut to the model's height and width when `resize` leaves something else. A letterbox
keeps the aspect and the whole image instead: grey fills what is left of the size. Resizing is as Pillow (and
so torchvision on files) does it. The orientation tag of cameras is ignored, as in the usual training
pipelines. Images turn grey when the model has one channel; transparency is dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from roundel.data.arrays import is_float, named_inputs
from roundel.errors import DataError
from roundel.recipe.settings import Data
from roundel.types import Array, InputSpec

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
Dim = int | str | None
Dims = tuple[Dim, Dim, Dim]
Layout = Literal["nchw", "nhwc"]
_CHANNELS = (1, 3)
_GREY = 114  # around a letterboxed image, as detectors are trained with it
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error)
_READABLE_MODES = frozenset(
    {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"}
)


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Where an image lies in the model's input: `original * scale + offset`, each as (x, y).

    Args:
        scale: of the resize.
        offset: of the image's left upper corner; negative where a crop cuts it off.
    """

    scale: tuple[float, float]
    offset: tuple[int, int]

    def to_original(self, corners: NDArray[np.float64]) -> NDArray[np.float64]:
        """Boxes [N, 4] as left, top, right, bottom, from pixels of the input to pixels of the image."""
        moved: NDArray[np.float64] = (corners - np.tile(self.offset, 2)) / np.tile(self.scale, 2)
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class ImagePlan:
    """How images become model input, with everything settled for one input.

    Args:
        input_name: the input that takes the image.
        options: what the user asked for.
        layout: the axis order of the input.
        resize: as in the options, or from the model.
        crop: likewise.
        table: model value for each pixel value, one row per channel.
    """

    input_name: str
    options: Data
    layout: Layout
    resize: int | Size | None
    crop: Size | None
    table: Array

    def does_as(self, other: ImagePlan) -> bool:
        """Whether both make the same of every image, however they were asked for: 0.5 is 0.5,0.5,0.5."""
        plain = {"samples": None, "mean": None, "std": None, "scale": None, "layout": None}
        plain |= {"resize": None, "crop": None}
        rest = [plan.options.model_copy(update=plain) for plan in (self, other)]
        steps = [(plan.layout, plan.resize, plan.crop) for plan in (self, other)]
        return rest[0] == rest[1] and steps[0] == steps[1] and np.array_equal(self.table, other.table)

    def settled(self) -> dict[str, object]:
        """Every choice as plain values, for a program that has only numpy and Pillow."""
        options, channels = self.options, len(self.table)
        raw = options.scale == "raw" or self.table.dtype == np.uint8
        return {
            "input": self.input_name,
            "layout": self.layout,
            "channels": channels,
            "bgr": options.bgr,
            "resize": self.resize,
            "interpolation": options.interpolation,
            "letterbox": options.letterbox,
            "crop": self.crop,
            "divide_by": 1 if raw else 255,
            "mean": _each(options.mean, 0.0, channels),
            "std": _each(options.std, 1.0, channels),
        }

    def describe(self) -> str:
        """One line for the record."""
        options, given = self.options, self.resize
        words = ["grey" if len(self.table) == 1 else "BGR" if options.bgr else "RGB"]
        if given is not None:
            size = "x".join(map(str, given)) if isinstance(given, tuple) else f"short side {given}"
            by = "" if options.resize is not None else ", the model's own size"
            how = "letterbox" if options.letterbox else "resize"
            words.append(f"{how} to {size} ({options.interpolation}{by})")
        if self.crop is not None:
            words.append(f"centre crop {self.crop[0]}x{self.crop[1]}")
        raw = options.scale == "raw" or self.table.dtype == np.uint8
        words.append("pixels 0..255" if raw else "x/255")
        if options.mean is None and options.std is None:
            words.append("no mean/std given")
        else:
            words.append(f"mean {options.mean or 0}, std {options.std or 1}")
        return ", ".join([*words, self.layout])

    def read(self, path: Path) -> Array:
        """Decode a file and preprocess it.

        Raises:
            DataError: when the file is not a readable image.
        """
        import PIL.Image

        try:
            with PIL.Image.open(path) as image:
                image.load()
                return self.apply(image, str(path))
        except (*_UNREADABLE, PIL.Image.DecompressionBombError) as error:
            raise DataError(
                "An image cannot be read",
                where=path,
                observed=f"{type(error).__name__}: {error}",
                hint="Remove or replace the file.",
            ) from error

    def apply(self, image: Image, where: str) -> Array:
        """Preprocess one decoded image; the result has no batch axis.

        Raises:
            DataError: when the image has no 8-bit form, or is smaller than the crop.
        """
        if image.mode not in _READABLE_MODES:
            raise DataError(
                "An image does not have 8 bits per channel",
                where=where,
                observed=f"Pillow mode {image.mode}",
                expected="grey or colour with 8 bits per channel",
                hint="Convert it, or feed arrays (.npy) that are preprocessed already.",
            )
        image = image.convert("L" if len(self.table) == 1 else "RGB")
        image = self._cropped(self._resized(image), where)
        pixels = np.asarray(image)
        planes = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
        if self.options.bgr:
            planes = planes[::-1]
        # A table look-up gives bit for bit what the arithmetic on every pixel would, but faster.
        result = np.stack([row[plane] for row, plane in zip(self.table, planes, strict=True)])
        return result if self.layout == "nchw" else np.moveaxis(result, 0, -1)

    def apply_to_array(self, array: Array, where: str) -> Array:
        """Preprocess pixels that came as an array: [H, W], [H, W, C], [C, H, W], or a batch of these two.

        Raises:
            DataError: when they are not 8-bit pixels.
        """
        import PIL.Image

        if array.dtype != np.uint8 or not 2 <= array.ndim <= 4:
            raise DataError(
                "Image preprocessing was asked for, but the data are not pixels",
                where=f"{where}, input '{self.input_name}'",
                observed=f"{array.dtype} array of shape {list(array.shape)}",
                expected="uint8 images [H, W, C], or no image preprocessing",
            )
        if array.ndim == 4:
            return np.stack([self.apply_to_array(image, where) for image in array])
        if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
            array = np.moveaxis(array, 0, -1)
        if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
            raise DataError(
                "An image array has no channel axis",
                where=f"{where}, input '{self.input_name}'",
                observed=f"shape {list(array.shape)}",
                expected="1, 3 or 4 channels, first or last",
            )
        if array.ndim == 3 and array.shape[-1] == 1:
            array = array[..., 0]
        return self.apply(PIL.Image.fromarray(np.ascontiguousarray(array)), where)

    def place(self, width: int, height: int) -> ImagePlace:
        """Where an image of this size comes to lie in the model's input."""
        new_width, new_height = self._new_size(width, height)
        left, top = 0, 0
        if self.options.letterbox:
            left, top = self._letterbox_corner(new_width, new_height)
        elif self.crop is not None:
            left, top = (-side for side in self._crop_corner(new_width, new_height))
        return ImagePlace((new_width / width, new_height / height), (left, top))

    def _new_size(self, width: int, height: int) -> Size:
        """Width and height after the resize, before any padding or crop."""
        if self.resize is None:
            return width, height
        if not isinstance(self.resize, tuple):
            if width <= height:
                return self.resize, int(self.resize * height / width)
            return int(self.resize * width / height), self.resize
        if self.options.letterbox:
            scale = min(self.resize[0] / height, self.resize[1] / width)
            return max(1, round(width * scale)), max(1, round(height * scale))
        return self.resize[1], self.resize[0]

    def _letterbox_corner(self, width: int, height: int) -> Size:
        assert isinstance(self.resize, tuple)
        return (self.resize[1] - width) // 2, (self.resize[0] - height) // 2

    def _crop_corner(self, width: int, height: int) -> Size:
        assert self.crop is not None
        # round(), not //: the same pixels as torchvision's CenterCrop.
        return round((width - self.crop[1]) / 2), round((height - self.crop[0]) / 2)

    def _resized(self, image: Image) -> Image:
        import PIL.Image

        size = self._new_size(*image.size)
        if size != image.size:
            image = image.resize(size, PIL.Image.Resampling[self.options.interpolation.upper()])
        if not self.options.letterbox:
            return image
        assert isinstance(self.resize, tuple)
        whole = PIL.Image.new(image.mode, self.resize[::-1], (_GREY,) * len(image.getbands()))
        whole.paste(image, self._letterbox_corner(*size))
        return whole

    def _cropped(self, image: Image, where: str) -> Image:
        if self.crop is None:
            return image
        (width, height), (crop_height, crop_width) = image.size, self.crop
        if crop_height > height or crop_width > width:
            raise DataError(
                "An image is smaller than the crop",
                where=where,
                observed=f"{height}x{width} (height x width) after resize",
                expected=f"at least {crop_height}x{crop_width}",
                hint="Set resize to the crop's size or more.",
            )
        left, top = self._crop_corner(width, height)
        return image.crop((left, top, left + crop_width, top + crop_height))


def plan_images(options: Data, inputs: Sequence[InputSpec]) -> ImagePlan:
    """Settle every open choice against the model.

    Raises:
        DataError: when no single input takes images, or the options contradict its shape or themselves.
    """
    _check(options)
    spec, layout, (channel, height, width) = _image_input(options, inputs)
    channels = channel if isinstance(channel, int) else 3
    own = (height, width) if isinstance(height, int) and isinstance(width, int) else None
    resize, crop = options.resize, options.crop
    if isinstance(crop, int):
        crop = (crop, crop)
    if options.letterbox:
        resize = (resize, resize) if isinstance(resize, int) else resize or own
        _check_letterbox(options, resize, spec)
    if resize is None and crop is None:
        resize = own
    elif crop is None and resize != own and not options.letterbox:
        crop = own
    final = crop if crop is not None else resize if isinstance(resize, tuple) else None
    if own is not None and final is not None and final != own:
        raise DataError(
            "Resize and crop do not give the size of the model input",
            where=f"input '{spec.name}'",
            observed=f"{final[0]}x{final[1]} (height x width)",
            expected=f"{own[0]}x{own[1]}, from {spec}",
        )
    return ImagePlan(spec.name, options, layout, resize, crop, _table(options, spec, channels))


def _check(options: Data) -> None:
    if options.std is not None and not all(s > 0 for s in options.std):
        raise DataError("The image std must be positive", observed=options.std, expected="numbers above 0")
    if options.mean is not None and options.scale != "raw" and max(map(abs, options.mean), default=0) > 1:
        raise DataError(
            "The image mean does not belong to the scale of the image",
            observed=f"mean {options.mean} with pixels divided by 255, which lie in 0..1",
            expected="a mean in 0..1, or scale 'raw'",
            hint="Set scale='raw' when mean and std are meant for pixels 0..255.",
        )


def _check_letterbox(options: Data, size: Size | None, spec: InputSpec) -> None:
    if options.crop is not None:
        raise DataError(
            "A letterbox keeps the whole image, and a crop does not",
            observed=f"letterbox and crop {options.crop}",
            expected="one of them",
        )
    if size is None:
        raise DataError(
            "A letterbox needs a size",
            where=f"input '{spec.name}'",
            observed=str(spec),
            expected="a fixed height and width, or resize",
            hint="Give --resize HEIGHTxWIDTH.",
        )


def _image_input(options: Data, inputs: Sequence[InputSpec]) -> tuple[InputSpec, Layout, Dims]:
    found: list[tuple[InputSpec, Layout, Dims]] = []
    for spec in inputs:
        if spec.shape is None or len(spec.shape) != 4:
            continue
        _, one, two, three = spec.shape
        readings: list[tuple[Layout, Dims]] = [("nchw", (one, two, three)), ("nhwc", (three, one, two))]
        for layout, dims in readings:
            asked = options.layout == layout and not isinstance(dims[0], int)
            if options.layout in (None, layout) and (dims[0] in _CHANNELS or asked):
                found.append((spec, layout, dims))
                break
    if len(found) == 1:
        return found[0]
    several = "Several inputs of the model take images"
    raise DataError(
        several if found else "The model has no input that takes images",
        observed=named_inputs(inputs),
        expected="one input with 3 or 1 channels" + (f", as {options.layout}" if options.layout else ""),
        hint="Set layout when the model leaves its channels open, or feed arrays by input name.",
    )


def _table(options: Data, spec: InputSpec, channels: int) -> Array:
    pixels = np.arange(256, dtype=np.uint8)
    if spec.dtype == np.uint8:
        if (options.mean, options.std) != (None, None) or options.scale == "unit":
            raise DataError(
                "A uint8 input takes pixels as they are",
                where=f"input '{spec.name}'",
                observed="mean, std or scale 'unit' in the image preprocessing",
                expected="none of them",
            )
        return np.tile(pixels, (channels, 1))
    if not is_float(spec.dtype):
        raise DataError(
            "The model input cannot take images", observed=str(spec), expected="a float or uint8 input"
        )
    values = np.tile(pixels.astype(np.float32), (channels, 1))
    if options.scale != "raw":
        values = values / np.float32(255)
    if options.mean is not None:
        values = values - _per_channel("mean", options.mean, channels)
    if options.std is not None:
        values = values / _per_channel("std", options.std, channels)
    return values.astype(spec.dtype)


def _each(given: tuple[float, ...] | None, usual: float, channels: int) -> list[float]:
    numbers = (usual,) if given is None else given
    return list(numbers) if len(numbers) == channels else [numbers[0]] * channels


def _per_channel(name: str, given: tuple[float, ...], channels: int) -> NDArray[np.float32]:
    given = given[:1] if len(set(given)) == 1 else given
    if len(given) not in (1, channels):
        raise DataError(
            f"The image {name} does not have one number per channel",
            observed=f"{len(given)} numbers: {given}",
            expected=f"{channels} (or a single one for all channels)",
        )
    return np.asarray(given, np.float32).reshape(-1, 1)
