"""A digest of samples, taken while they pass by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import numpy as np

from roundel.data.arrays import Array
from roundel.types import Sample

SIZE = 32
"""Bytes of a digest."""


class SampleDigest:
    """A digest of the samples' own digests, in their order.

    The order of the inputs inside one sample does not count; the order of the samples does.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=SIZE)

    def update(self, sample: Sample) -> None:
        """Take one sample in."""
        self.add(digest_of(sample))

    def add(self, digest: bytes) -> None:
        """Take in a sample that somebody else has read, by its digest."""
        self._hash.update(digest)

    def hexdigest(self) -> str:
        """The digest of everything taken in so far."""
        return self._hash.hexdigest()

    def watch(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples unchanged and take each one in before it leaves."""
        for sample in samples:
            self.update(sample)
            yield sample


def digest_of(sample: Sample) -> bytes:
    """A blake2b digest over names, types, shapes and bytes of one sample."""
    one = _One()
    header = {name: [str(array.dtype), list(array.shape)] for name, array in sorted(sample.items())}
    # The header has a length before it, so that no two samples write the same bytes.
    one.block(json.dumps(header).encode())
    for name in header:
        one.values(sample[name])
    return one.digest()


class _One:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=SIZE)

    def digest(self) -> bytes:
        return self._hash.digest()

    def block(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def values(self, array: Array) -> None:
        if array.dtype.kind in "OUST":
            for value in array.reshape(-1).tolist():
                self.block(value if isinstance(value, bytes) else str(value).encode())
            return
        native = array.astype(array.dtype.newbyteorder("<"), copy=False)
        self._hash.update(np.ascontiguousarray(native).reshape(-1).view(np.uint8).data)
