"""Data that workers can read for themselves, piece by piece: files on a disk that all of them see."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundel.types import InputSpec

if TYPE_CHECKING:
    from roundel.data.images import ImagePlan
    from roundel.data.samples import Item, Samples

Reader = Callable[[Path], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A folder whose files are one sample each; it travels by pickle.

    Attributes:
        kind: what it is, in words.
        folder: where the files are.
        files: relative to it, in the order of the samples.
        read: one file's content.
        inputs: what the model takes.
        plan: how raw pixels become model input, where `read` does not do that.
        first: the position of the first file among all samples.
    """

    kind: str
    folder: Path
    files: Sequence[Path]
    read: Reader
    inputs: tuple[InputSpec, ...]
    plan: ImagePlan | None = None
    first: int = 0

    def part(self, first: int, count: int) -> Division:
        """Some of the files."""
        files = tuple(self.files[first : first + count])
        return Division(self.kind, self.folder, files, self.read, self.inputs, self.plan, self.first + first)

    def open(self) -> Samples:
        """The samples of these files, checked like all others."""
        from roundel.data.samples import Item, Samples, Source

        def items() -> Generator[Item, None, None]:
            for file in self.files:
                yield Item(self.read(self.folder / file), str(file))

        source = Source(self.kind, items, count=len(self.files))
        return Samples(source, self.inputs, plan=self.plan, first=self.first)

    def digest(self) -> str:
        """Of the files' names, sizes and times of change; their content is not read."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            found = (self.folder / file).stat()
            digest.update(f"{file} {found.st_size} {found.st_mtime_ns}\n".encode())
        return digest.hexdigest()
