"""Images: bit for bit what Pillow and numpy give by hand."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from roundel.data import open_samples
from roundel.data.folders import decode_ahead
from roundel.data.images import plan_images
from roundel.errors import DataError
from roundel.recipe.settings import Data
from roundel.types import InputSpec

FLOAT = np.dtype(np.float32)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def sized(
    height: int | str, width: int | str, channels: int | str = 3, dtype: str = "float32"
) -> list[InputSpec]:
    return [InputSpec("input", np.dtype(dtype), ("N", channels, height, width))]


def only(path: Path, inputs: list[InputSpec], images: Data | None = None) -> np.ndarray:
    return next(iter(open_samples(path, inputs, images=images)))["input"]


def test_default_is_the_models_size_and_x_over_255(pictures: Path) -> None:
    samples = open_samples(pictures, sized(4, 6))
    order = ["a/img2.png", "a/img10.png", "b/img1.png"]
    for name, sample in zip(order, samples, strict=True):
        image = Image.open(pictures / name).resize((6, 4), Image.Resampling.BILINEAR)
        expected = (np.asarray(image).astype(np.float32) / np.float32(255)).transpose(2, 0, 1)[None]
        np.testing.assert_array_equal(sample["input"], expected)
        assert sample["input"].dtype == np.float32
    told = samples.description
    assert "x/255, no mean/std given" in str(told["preprocessing"])
    assert "model's own size" in str(told["preprocessing"])
    assert "preprocessing_chosen_by" in told
    assert told["count"] == 3


def test_imagenet_recipe(pictures: Path) -> None:
    options = Data(mean=MEAN, std=STD, resize=8, interpolation="bicubic")
    image = Image.open(pictures / "a/img2.png").resize((12, 8), Image.Resampling.BICUBIC)
    image = image.crop((3, 2, 9, 6))  # 12x8 to 6x4
    pixels = np.asarray(image).astype(np.float32) / np.float32(255)
    expected = (pixels - np.float32(MEAN)) / np.float32(STD)
    samples = open_samples(pictures, sized(4, 6), images=options)
    np.testing.assert_array_equal(next(iter(samples))["input"][0], expected.transpose(2, 0, 1))
    assert "resize to short side 8 (bicubic), centre crop 4x6" in str(samples.description["preprocessing"])
    assert "preprocessing_chosen_by" not in samples.description


def test_raw_scale_and_bgr(pictures: Path) -> None:
    options = Data(scale="raw", mean=(1, 2, 3), std=(128,), bgr=True, crop=(4, 6))
    pixels = np.asarray(Image.open(pictures / "a/img2.png"))[2:6, 4:10].astype(np.float32)
    expected = (pixels[..., ::-1] - np.float32([1, 2, 3])) / np.float32(128)
    np.testing.assert_array_equal(only(pictures, sized(4, 6), options)[0], expected.transpose(2, 0, 1))


def test_nhwc_is_read_from_the_model(pictures: Path) -> None:
    got = only(pictures, [InputSpec("input", FLOAT, (1, 4, 6, 3))])
    np.testing.assert_array_equal(got.transpose(0, 3, 1, 2), only(pictures, sized(4, 6)))


def test_open_size_keeps_the_image(pictures: Path) -> None:
    assert only(pictures, sized("H", "W")).shape == (1, 3, 9, 14)
    with pytest.raises(DataError, match="Set layout"):
        open_samples(pictures, sized("H", "W", "C"))
    assert only(pictures, sized("H", "W", "C"), Data(layout="nhwc")).shape[2:] == (14, 3)


def test_grey_half_and_bytes(pictures: Path) -> None:
    grey = np.asarray(Image.open(pictures / "a/img2.png").convert("L"))
    crop = Data(crop=(4, 6))
    expected = grey[None, None, 2:6, 4:10]
    np.testing.assert_array_equal(only(pictures, sized(4, 6, 1, "uint8"), crop), expected)
    half = only(pictures, sized(4, 6, 1, "float16"), crop)
    np.testing.assert_array_equal(half, (expected.astype(np.float32) / np.float32(255)).astype(np.float16))
    with pytest.raises(DataError, match="pixels as they are"):
        open_samples(pictures, sized(4, 6, 3, "uint8"), images=Data(mean=(0.5,)))


def test_palette_and_alpha(tmp_path: Path) -> None:
    colour = Image.fromarray(np.random.default_rng(1).integers(0, 256, (4, 6, 4), dtype=np.uint8), "RGBA")
    colour.save(tmp_path / "1.png")
    colour.convert("RGB").quantize(16).save(tmp_path / "2.gif")
    for name, sample in zip(("1.png", "2.gif"), open_samples(tmp_path, sized(4, 6)), strict=True):
        pixels = np.asarray(Image.open(tmp_path / name).convert("RGB")).transpose(2, 0, 1)
        np.testing.assert_array_equal(sample["input"][0], pixels.astype(np.float32) / np.float32(255))


def test_sixteen_bit_images_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 6), 60000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match="8 bits per channel") as caught:
        only(tmp_path, sized(4, 6))
    assert "I;16" in str(caught.value)


def test_limit_spreads_over_the_classes(pictures: Path) -> None:
    samples = open_samples(pictures, sized(4, 6), limit=2)
    every = [s["input"] for s in open_samples(pictures, sized(4, 6))]
    got = [s["input"] for s in samples]
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate([every[0], every[1]]))
    assert "evenly spaced" in str(samples.description["selection"])
    fixed = open_samples(pictures, [InputSpec("input", FLOAT, (2, 3, 4, 6))], limit=1)
    assert [s["input"].shape for s in fixed] == [(2, 3, 4, 6)]


def test_one_image_file(pictures: Path) -> None:
    samples = open_samples(pictures / "b/img1.png", sized(4, 6))
    assert len(list(samples)) == 1


@pytest.mark.parametrize("damage", ["text", "truncated", "empty"])
def test_corrupt_image_is_named(pictures: Path, damage: str) -> None:
    path = pictures / "a/img10.png"
    content = {"text": b"hello", "truncated": path.read_bytes()[:90], "empty": b""}[damage]
    path.write_bytes(content)
    walk = iter(open_samples(pictures, sized(4, 6)))
    next(walk)
    with pytest.raises(DataError, match="image cannot be read") as caught:
        next(walk)
    assert "img10.png" in str(caught.value)


def test_image_smaller_than_the_crop(pictures: Path) -> None:
    with pytest.raises(DataError) as caught:
        only(pictures, sized("H", "W"), Data(crop=10))
    assert "9x14" in str(caught.value)
    assert "10x10" in str(caught.value)


def test_size_that_cannot_fit_the_model(pictures: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_samples(pictures, sized(4, 6), images=Data(resize=8, crop=5))
    assert "5x5" in str(caught.value)
    assert "4x6" in str(caught.value)


def test_several_inputs(pictures: Path, two_inputs: list[InputSpec]) -> None:
    with pytest.raises(DataError, match="several inputs"):
        open_samples(pictures, two_inputs)


def test_options_that_make_no_sense() -> None:
    with pytest.raises(DataError, match="scale='raw'"):
        open_samples([], sized(4, 6), images=Data(mean=(123.7, 116.8, 103.9)))
    with pytest.raises(DataError, match="positive"):
        open_samples([], sized(4, 6), images=Data(std=(0,)))
    with pytest.raises(ValidationError, match="interpolation"):
        Data(interpolation="lanczos")  # type: ignore[arg-type]
    for size in (0, (4,), (4, 0), 2.5):
        with pytest.raises(ValidationError, match="resize"):
            Data(resize=size)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="2 numbers"):
        open_samples([], sized(4, 6), images=Data(mean=(0.1, 0.2)))


def test_pixels_in_arrays(pictures: Path, tmp_path: Path) -> None:
    options = Data(mean=MEAN, std=STD)
    expected = only(pictures, sized(4, 6), options)
    pixels = np.asarray(Image.open(pictures / "a/img2.png"))
    np.savez(tmp_path / "x.npz", x=pixels[None], y=np.arange(1))
    np.save(tmp_path / "x.npy", pixels[None])
    sources: list[object] = [[pixels], [pixels.transpose(2, 0, 1)], [Image.open(pictures / "a/img2.png")]]
    sources += [pixels[None], tmp_path / "x.npz", tmp_path / "x.npy", iter([pixels[None]])]
    for source in sources:
        samples = open_samples(source, sized(4, 6), images=options)
        np.testing.assert_array_equal(next(iter(samples))["input"], expected)
        assert "mean" in str(samples.description["preprocessing"])


def test_preprocessing_of_floats_is_refused() -> None:
    with pytest.raises(DataError, match="not pixels") as caught:
        list(open_samples([np.zeros((3, 4, 6), np.float32)], sized(4, 6), images=Data()))
    assert "float32" in str(caught.value)
    with pytest.raises(DataError, match="no channel axis"):
        list(open_samples([np.zeros((5, 4, 6), np.uint8)], sized(4, 6), images=Data()))


def test_look_ahead_is_bounded_and_in_order() -> None:
    lock, started = threading.Lock(), []

    def read(path: Path) -> np.ndarray:
        with lock:
            started.append(path)
        return np.asarray(int(path.name))

    names = [Path(str(i)) for i in range(50)]
    walk = decode_ahead(names, read)
    for index in range(10):
        item = next(walk)
        assert int(item.value) == index  # type: ignore[call-overload]
        assert len(started) <= index + 4
    walk.close()
    assert len(started) <= 14


@pytest.mark.parametrize(("width", "height"), [(12, 6), (6, 12), (7, 5), (8, 8), (300, 2)])
@pytest.mark.parametrize("target", [(8, 8), (8, 12)])
def test_a_letterbox_keeps_all_of_the_image(width: int, height: int, target: tuple[int, int]) -> None:
    plan = plan_images(Data(scale="raw", letterbox=True), sized(*target))
    image = Image.fromarray(np.full((height, width, 3), 255, np.uint8))
    pixels = plan.apply(image, "here")
    assert pixels.shape == (3, *target)
    seen = pixels[0] == 255
    assert np.all(pixels[:, ~seen] == 114)
    place = plan.place(width, height)
    rows, columns = np.nonzero(seen)
    corners = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], np.float64)
    np.testing.assert_allclose(place.to_original(corners), [[0, 0, width, height]], atol=1e-9)
    # One side is filled, the other has as much grey before as after, but for one row.
    gaps = (target[1] - np.ptp(columns) - 1, target[0] - np.ptp(rows) - 1)
    assert min(gaps) == 0
    assert place.offset == (gaps[0] // 2, gaps[1] // 2)


def test_a_letterbox_of_another_size_of_grey_pictures_and_of_arrays() -> None:
    plan = plan_images(Data(letterbox=True, resize=6), sized("H", "W", channels=1))
    assert plan.apply_to_array(np.zeros((4, 2), np.uint8), "here").shape == (1, 6, 6)
    assert plan.describe().startswith("grey, letterbox to 6x6 (bilinear)")


@pytest.mark.parametrize(
    ("options", "side", "message"),
    [
        (Data(letterbox=True, crop=4), 8, "keeps the whole image"),
        (Data(letterbox=True), "N", "needs a size"),
        (Data(letterbox=True, resize=6), 8, "do not give the size"),
    ],
)
def test_a_letterbox_that_cannot_be(options: Data, side: int | str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        plan_images(options, sized(side, side))
