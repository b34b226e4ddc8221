"""Array files (.npy, .npz): header first, data only when the header fits, and never a pickle."""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from roundel.data import arrays
from roundel.data.samples import Item, Source
from roundel.errors import DataError
from roundel.types import Array, InputSpec


@dataclass(frozen=True, slots=True)
class Header:
    """What an array file says about its array before any data."""

    shape: arrays.Shape
    dtype: np.dtype[Any]
    fortran_order: bool

    @property
    def nbytes(self) -> int:
        """Size of the data that follow."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


_OF_NUMPY = (OSError, ValueError, EOFError, KeyError, SyntaxError, tokenize.TokenError)
# The last one is for an archive with a password.
_OF_ARCHIVES = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, RuntimeError)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what broken files make numpy and zipfile raise into one error that names the file."""
    try:
        yield
    except (*_OF_NUMPY, *_OF_ARCHIVES) as error:
        raise DataError(
            "An array file cannot be read",
            where=path,
            observed=f"{type(error).__name__}: {error}",
            expected="an array of numbers written by np.save or np.savez",
            hint="Write the file again, or remove it.",
        ) from error


def read_header(stream: IO[bytes], where: str) -> Header:
    """Read the header of an .npy stream and leave the stream at the data.

    Raises:
        DataError: when the array holds Python objects: loading them would run code from the file.
        ValueError: when this is no .npy stream.
    """
    version = npy.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = npy.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran, dtype = npy.read_array_header_2_0(stream)
    else:
        raise ValueError(f".npy format version {version} holds named fields, not a plain array")
    if dtype.hasobject:
        raise DataError(
            "An array file holds pickled Python objects, which are never loaded",
            where=where,
            observed=f"dtype {dtype}",
            expected="numbers",
            hint="Save a plain array: np.save(path, np.asarray(x, dtype=np.float32)).",
        )
    return Header(shape, dtype, fortran)


def npy_header(path: Path) -> Header:
    """The header of an .npy file."""
    with reading(path), path.open("rb") as stream:
        return read_header(stream, str(path))


def load_npy(path: Path, check: Callable[[Header], None]) -> Array:
    """Read a whole .npy file, after `check` has accepted its header."""
    header = npy_header(path)
    check(header)
    with reading(path):
        if path.stat().st_size < header.nbytes:
            raise EOFError(f"the header says {header} but the file has {path.stat().st_size} bytes")
        loaded: Array = np.load(path, allow_pickle=False)
    return loaded


def npz_headers(path: Path) -> dict[str, Header]:
    """The headers of all arrays in an .npz file, by name; no data are decompressed.

    Raises:
        DataError: when the file is broken, or declares more or less data than its headers need.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        headers: dict[str, Header] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as stream:
                header = read_header(stream, f"{path}, array '{name}'")
                offset = stream.tell()
            if member.file_size != offset + header.nbytes:
                raise ValueError(
                    f"array '{member.filename}' says {header} but has {member.file_size - offset} bytes, "
                    f"not {header.nbytes}"
                )
            headers[name] = header
        return headers


def load_npz(path: Path, names: Iterable[str]) -> dict[str, Array]:
    """Read some arrays of an .npz file whose headers were accepted."""
    with reading(path), np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in names}


def check_sample(header: Header, spec: InputSpec, where: str, inputs: Sequence[InputSpec]) -> None:
    """Refuse a file by its header when it cannot be a sample of the input.

    Pixels are let through: whether they fit is known only after their preprocessing.
    """
    if header.dtype != np.uint8:
        arrays.fit_shape(header.shape, spec, where, free_batch=arrays.fixed_batch(inputs) is not None)


def pick_arrays(headers: dict[str, Header], inputs: Sequence[InputSpec], where: str) -> dict[str, str]:
    """Which array of an .npz file feeds which input.

    Arrays are named after the inputs. A model with one input also takes the only array, the one called `x`,
    or the only float array.

    Raises:
        DataError: when that leaves a choice, or a name is missing.
    """
    if len(inputs) == 1 and inputs[0].name not in headers:
        floats = [name for name, header in headers.items() if header.dtype.kind == "f"]
        if len(headers) == 1:
            chosen = next(iter(headers))
        elif "x" in headers:
            chosen = "x"
        elif len(floats) == 1:
            chosen = floats[0]
        else:
            raise DataError(
                f"No array of the file is named after input '{inputs[0].name}'",
                where=where,
                observed=", ".join(f"'{name}': {header}" for name, header in headers.items()) or "no arrays",
                expected=str(inputs[0]),
                hint=f"Save it as np.savez(path, **{{'{inputs[0].name}': x}}).",
            )
        return {inputs[0].name: chosen}
    if any(spec.name not in headers for spec in inputs):
        # Raises: the headers stand in for the arrays. Further arrays, such as labels, are left unread.
        arrays.by_name(headers, inputs, where, {})
    return {spec.name: spec.name for spec in inputs}


def npy_source(path: Path, inputs: Sequence[InputSpec]) -> Source:
    """One .npy file with the samples along its first axis, mapped into memory and read row by row."""
    if len(inputs) != 1:
        raise DataError(
            "One .npy file cannot feed several inputs",
            where=path,
            observed="one array",
            expected=arrays.named_inputs(inputs),
            hint="Use an .npz file with one array per input, or a folder with one sub-folder per input.",
        )
    stack = arrays.stack_of(npy_header(path).shape, inputs[0], str(path))
    count = arrays.common_count({inputs[0].name: stack})

    def items() -> Generator[Item, None, None]:
        with reading(path):
            array = np.load(path, mmap_mode="r" if count else None, allow_pickle=False)
        for index in range(count):
            # A copy, so that the sample outlives the mapping.
            yield Item(np.array(stack.at(array, index)), f"{path.name}[{index}]")

    return stacked(".npy file", items, {inputs[0].name: stack}, inputs, {"path": str(path)})


def npz_source(path: Path, inputs: Sequence[InputSpec]) -> Source:
    """One .npz file with one stacked array per input, decompressed row by row."""
    headers = npz_headers(path)
    chosen = pick_arrays(headers, inputs, str(path))
    stacks = {
        spec.name: arrays.stack_of(headers[chosen[spec.name]].shape, spec, str(path)) for spec in inputs
    }
    count = arrays.common_count(stacks)
    for spec in inputs:
        header, stack = headers[chosen[spec.name]], stacks[spec.name]
        if stack.count is not None and count:
            one = Header(stack.one(header.shape), header.dtype, fortran_order=False)
            check_sample(one, spec, str(path), inputs)

    def items() -> Generator[Item, None, None]:
        with reading(path), zipfile.ZipFile(path) as archive:
            rows = {spec.name: _rows(archive, chosen[spec.name], stacks[spec.name]) for spec in inputs}
            for index in range(count):
                yield Item({name: next(rows[name]) for name in rows}, f"{path.name}[{index}]")

    unused = [name for name in headers if name not in chosen.values()]
    told = {"path": str(path), "arrays": chosen, **({"unused_arrays": unused} if unused else {})}
    return stacked(".npz file", items, stacks, inputs, told)


def stacked(
    kind: str,
    items: Callable[[], Generator[Item, None, None]],
    stacks: Mapping[str, arrays.Stack],
    inputs: Sequence[InputSpec],
    facts: Mapping[str, object],
) -> Source:
    """A source of arrays that hold the samples along their first axes, or are one sample."""
    count = arrays.common_count(stacks)
    whole = all(stack.count is None for stack in stacks.values())
    return Source(kind, items, count, arrays.fixed_batch(inputs) if whole else count, facts=facts)


def _rows(archive: zipfile.ZipFile, name: str, stack: arrays.Stack) -> Iterator[Array]:
    member = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
    with archive.open(member) as stream:
        header = read_header(stream, name)
        if stack.count is None or header.fortran_order:
            # Rows of a Fortran-ordered array lie all over the file: this rare case is read at once.
            turned = header.shape[::-1] if header.fortran_order else header.shape
            array = _filled(stream, turned, header.dtype)
            array = array.transpose() if header.fortran_order else array
            yield from [array] if stack.count is None else (array[i] for i in range(stack.count))
            return
        for _ in range(stack.count):
            yield _filled(stream, stack.one(header.shape), header.dtype)


def _filled(stream: IO[bytes], shape: arrays.Shape, dtype: np.dtype[Any]) -> Array:
    array = np.empty(shape, dtype)
    view, done = array.reshape(-1).view(np.uint8).data, 0
    while done < len(view):
        read = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not read:
            raise EOFError(f"the data end after {done} of {len(view)} bytes")
        done += read
    return array
