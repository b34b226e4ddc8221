"""A digest of samples, taken while they pass by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import numpy as np

from roundel.data.arrays import Array
from roundel.types import Sample


class SampleDigest:
    """A blake2b digest over names, types, shapes and bytes of samples, in their order.

    The order of the inputs inside one sample does not count; the order of the samples does.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)

    def update(self, sample: Sample) -> None:
        """Take one sample in."""
        header = {name: [str(array.dtype), list(array.shape)] for name, array in sorted(sample.items())}
        # The header has a length before it, so that no two sequences of samples write the same bytes.
        self._block(json.dumps(header).encode())
        for name in header:
            self._values(sample[name])

    def hexdigest(self) -> str:
        """The digest of everything taken in so far."""
        return self._hash.hexdigest()

    def watch(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples unchanged and take each one in before it leaves."""
        for sample in samples:
            self.update(sample)
            yield sample

    def _block(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def _values(self, array: Array) -> None:
        if array.dtype.kind in "OUST":
            for value in array.reshape(-1).tolist():
                self._block(value if isinstance(value, bytes) else str(value).encode())
            return
        native = array.astype(array.dtype.newbyteorder("<"), copy=False)
        self._hash.update(np.ascontiguousarray(native).reshape(-1).view(np.uint8).data)
