"""ONNX Runtime's CalibrationDataReader, unchanged and by duck type."""

from __future__ import annotations

import numpy as np
import pytest

from roundel.data import open_samples
from roundel.errors import DataError
from roundel.types import InputSpec

X = np.ones((1, 3, 4, 6), np.float32)


class Reader:
    """The usual shape of a reader, without rewind."""

    def __init__(self, count: int) -> None:
        self.asked = 0
        self.count = count

    def get_next(self) -> dict[str, np.ndarray] | None:
        self.asked += 1
        return {"input": X * self.asked} if self.asked <= self.count else None


class Rewindable(Reader):
    """A reader that can go back and knows its length."""

    rewound = 0

    def rewind(self) -> None:
        self.rewound += 1
        self.asked = 0

    def __len__(self) -> int:
        return self.count


def test_reader_is_lazy_and_single_pass(image_input: list[InputSpec]) -> None:
    reader = Reader(3)
    samples = open_samples(reader, image_input)
    assert reader.asked == 0
    assert samples.count is None
    assert [float(s["input"].max()) for s in samples] == [1.0, 2.0, 3.0]
    assert samples.count == 3
    assert samples.description["kind"] == "reader Reader"
    with pytest.raises(DataError, match=r"rewind\(\)"):
        list(samples)


def test_rewind_is_used_for_the_second_pass_only(image_input: list[InputSpec]) -> None:
    reader = Rewindable(3)
    samples = open_samples(reader, image_input, limit=2)
    assert samples.count == 2
    assert len(list(samples)) == 2
    assert reader.rewound == 0
    assert [float(s["input"].max()) for s in samples] == [1.0, 2.0]
    assert reader.rewound == 1


def test_onnxruntime_base_class(image_input: list[InputSpec]) -> None:
    base = pytest.importorskip("onnxruntime.quantization").CalibrationDataReader

    class Mine(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.left = [{"input": X}]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    samples = open_samples(Mine(), image_input)
    assert samples.count is None  # the base class defines __len__ only to raise
    assert len(list(samples)) == 1


def test_failing_reader(image_input: list[InputSpec]) -> None:
    class Broken(Reader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            if self.asked == 2:
                raise RuntimeError("decoder lost")
            return super().get_next()

    walk = iter(open_samples(Broken(9), image_input))
    next(walk), next(walk)
    with pytest.raises(DataError, match="decoder lost") as caught:
        next(walk)
    assert "sample 2" in str(caught.value)


def test_wrong_name(image_input: list[InputSpec]) -> None:
    class Wrong(Reader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return {"inputs": X}

    with pytest.raises(DataError, match="Did you mean 'input'"):
        list(open_samples(Wrong(1), image_input))
