"""Iterables, generators and data loaders."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator

import numpy as np
import pytest

from roundel.data import open_samples
from roundel.errors import DataError
from roundel.types import InputSpec

X = np.arange(72, dtype=np.float32).reshape(1, 3, 4, 6)
IDS = np.arange(5).reshape(1, 5)


class FakeTensor:
    """What Roundel relies on in a torch tensor, and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, f"torch.{array.dtype}"

    def detach(self) -> FakeTensor:
        return self

    def cpu(self) -> FakeTensor:
        return self

    def numpy(self) -> np.ndarray:
        return self._array

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("a tensor on another device cannot become an array directly")


class FakeLoader:
    """A loader over a labelled set, batch 4."""

    batch_size = 4

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[FakeTensor]]:
        for _ in range(2):
            yield [FakeTensor(np.repeat(X, 4, axis=0)), FakeTensor(np.arange(4))]


@pytest.mark.parametrize("item", [X, X[0], (X,), [X], {"input": X}, X.astype(np.float64), X.tolist()])
def test_one_input_takes_every_form(image_input: list[InputSpec], item: object) -> None:
    samples = open_samples([item, item], image_input)
    assert samples.count == 2
    for sample in samples:
        assert list(sample) == ["input"]
        np.testing.assert_array_equal(sample["input"], X)
        assert sample["input"].dtype == np.float32


@pytest.mark.parametrize(
    "item",
    [
        (IDS, IDS),
        [IDS, IDS],
        {"attention_mask": IDS, "input_ids": IDS},
        UserDict({"attention_mask": IDS, "input_ids": IDS}),
        {"input_ids": [0, 1, 2, 3, 4], "attention_mask": [[0, 1, 2, 3, 4]]},
        (IDS.astype(np.int32), IDS.astype(np.uint8)),
    ],
)
def test_several_inputs(two_inputs: list[InputSpec], item: object) -> None:
    (sample,) = open_samples(iter([item]), two_inputs)
    assert list(sample) == ["input_ids", "attention_mask"]
    for array in sample.values():
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, IDS)


def test_generator_is_consumed_one_at_a_time(image_input: list[InputSpec]) -> None:
    asked: list[int] = []

    def stream() -> Iterator[np.ndarray]:
        for index in range(1000):
            asked.append(index)
            yield X

    samples = open_samples(stream(), image_input)
    assert asked == []
    assert samples.count is None
    walk = iter(samples)
    for expected in range(1, 4):
        next(walk)
        assert len(asked) == expected


def test_limit_does_not_take_one_more_item(image_input: list[InputSpec]) -> None:
    stream = iter([X, X + 1, X + 2])
    samples = open_samples(stream, image_input, limit=2)
    assert len(list(samples)) == 2
    assert samples.count == 2
    np.testing.assert_array_equal(next(stream), X + 2)


def test_generator_is_read_once(image_input: list[InputSpec]) -> None:
    samples = open_samples((x for x in [X]), image_input)
    assert not samples.repeatable
    list(samples)
    with pytest.raises(DataError, match="only once"):
        list(samples)


def test_list_is_read_again(image_input: list[InputSpec]) -> None:
    samples = open_samples([X, X], image_input)
    assert len(list(samples)) == len(list(samples)) == 2


def test_loader_labels_are_dropped_and_noted(open_input: list[InputSpec]) -> None:
    samples = open_samples(FakeLoader(), open_input)
    assert samples.count == 2
    assert [s["input"].shape for s in samples] == [(4, 3, 4, 6)] * 2
    assert "dropped" in str(samples.description["notes"])


def test_loader_batches_are_cut_to_a_fixed_batch(image_input: list[InputSpec]) -> None:
    samples = open_samples(FakeLoader(), image_input)
    assert samples.count is None
    assert len(list(samples)) == 8
    assert samples.count == 8


def test_real_torch_loader(open_input: list[InputSpec]) -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.rand(5, 3, 4, 6), torch.arange(5))
    samples = open_samples(torch.utils.data.DataLoader(data, batch_size=2), open_input)
    assert [s["input"].shape[0] for s in samples] == [2, 2, 1]
    (bfloat,) = [torch.rand(1, 3, 4, 6, dtype=torch.bfloat16)]
    with pytest.raises(DataError, match="cannot be turned into a numpy array"):
        list(open_samples([bfloat], open_input))


def test_label_key_is_dropped(two_inputs: list[InputSpec]) -> None:
    samples = open_samples([{"input_ids": IDS, "attention_mask": IDS, "labels": 3}], two_inputs)
    assert len(list(samples)) == 1
    assert "'labels'" in str(samples.description["notes"])


def test_unknown_key_shows_both_sides(two_inputs: list[InputSpec]) -> None:
    with pytest.raises(DataError) as caught:
        list(open_samples([{"input_id": IDS, "attention_mask": IDS}], two_inputs))
    text = str(caught.value)
    assert "sample 0" in text
    assert "'input_id', 'attention_mask'" in text
    assert "'input_ids', 'attention_mask'" in text
    assert "Did you mean 'input_ids'?" in text


def test_surplus_key_is_an_error(two_inputs: list[InputSpec]) -> None:
    item = {"input_ids": IDS, "attention_mask": IDS, "token_type_ids": IDS}
    with pytest.raises(DataError, match="'token_type_ids', which is not an input"):
        list(open_samples([item], two_inputs))


def test_missing_key(two_inputs: list[InputSpec]) -> None:
    with pytest.raises(DataError, match="no value for input 'attention_mask'"):
        list(open_samples([{"input_ids": IDS}], two_inputs))


def test_wrong_number_of_arrays(two_inputs: list[InputSpec], image_input: list[InputSpec]) -> None:
    with pytest.raises(DataError) as caught:
        list(open_samples([(IDS,)], two_inputs))
    assert "1 arrays" in str(caught.value)
    assert "attention_mask: int64 [batch, 5]" in str(caught.value)
    with pytest.raises(DataError, match="wrong number"):
        list(open_samples([(X, X, X)], image_input))


def test_bare_array_for_several_inputs(two_inputs: list[InputSpec]) -> None:
    with pytest.raises(DataError, match="which input is which"):
        list(open_samples(iter([IDS]), two_inputs))


def test_empty(image_input: list[InputSpec]) -> None:
    for data in ([], iter([]), np.zeros((0, 3, 4, 6), np.float32)):
        with pytest.raises(DataError, match="are empty"):
            list(open_samples(data, image_input))


def test_failure_half_way_names_the_sample(image_input: list[InputSpec]) -> None:
    def stream() -> Iterator[np.ndarray]:
        yield X
        raise KeyError("shard 7")

    walk = iter(open_samples(stream(), image_input))
    next(walk)
    with pytest.raises(DataError) as caught:
        next(walk)
    assert "sample 1" in str(caught.value)
    assert "shard 7" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_list_of_file_names_gets_a_hint(image_input: list[InputSpec]) -> None:
    with pytest.raises(DataError, match="path of their folder"):
        list(open_samples(["a.png", "b.png"], image_input))


def test_no_numbers(image_input: list[InputSpec]) -> None:
    with pytest.raises(DataError, match="type object"):
        list(open_samples([object()], image_input))
    with pytest.raises(DataError, match="cannot be turned"):
        list(open_samples([[[1.0, 2.0], [3.0]]], image_input))


@pytest.mark.parametrize("data", [3, b"abc"])
def test_not_a_source(image_input: list[InputSpec], data: object) -> None:
    with pytest.raises(DataError, match=f"type {type(data).__name__}"):
        open_samples(data, image_input)


def test_nothing_given(image_input: list[InputSpec]) -> None:
    with pytest.raises(DataError, match="no calibration data") as caught:
        open_samples(None, image_input)
    assert "input: float32 [1, 3, 4, 6]" in str(caught.value)
    with pytest.raises(DataError, match="no inputs"):
        open_samples([X], [])
    with pytest.raises(DataError, match="limit"):
        open_samples([X], image_input, limit=0)
