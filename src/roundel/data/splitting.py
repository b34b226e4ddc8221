"""One set of data for several ends: read more than once, most of it to learn from, the rest to judge by."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from roundel.data.samples import Item, Samples, Source

JUDGED_EVERY = 4  # one item of so many is held out, where nothing else judges

_OF_A_PASS = frozenset({"kind", "count", "limit", "inputs", "notes"})


def held_out(index: int, every: int) -> bool:
    """Whether an item judges; these are spread over the data, which may be sorted by class."""
    return index % every == every - 1


def repeatable(samples: Samples) -> Samples:
    """The same data, held in memory where its source can be read only once."""
    if samples.repeatable:
        return samples
    held = [
        Item({name: array.copy() for name, array in sample.items()}, origin)
        for origin, sample in samples.named()
    ]

    def items() -> Generator[Item, None, None]:
        yield from held

    return _derived(samples, items, len(held), {"held": "in memory"})


def learning_part(samples: Samples, every: int) -> Samples:
    """The items that are not held out, of data that can be read more than once."""

    def items() -> Generator[Item, None, None]:
        with closing(samples.named()) as named:
            for index, (origin, sample) in enumerate(named):
                if not held_out(index, every):
                    yield Item(sample, origin)

    whole = samples.count
    count = None if whole is None else whole - whole // every
    return _derived(samples, items, count, {"part": f"one item of {every} is held out"})


def _derived(
    samples: Samples,
    items: Callable[[], Generator[Item, None, None]],
    count: int | None,
    more: dict[str, object],
) -> Samples:
    told = samples.description
    facts = {key: value for key, value in told.items() if key not in _OF_A_PASS}
    return Samples(Source(str(told["kind"]), items, count=count, facts={**facts, **more}), samples.inputs)
