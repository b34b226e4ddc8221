"""Models on disk: their hashes, their data files, and files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from roundel.errors import OutputError
from roundel.model.graph import weight_bytes
from roundel.types import Array

_PIECE = 1 << 20
MOST_STRUCTURE = 256_000_000  # bytes; a model whose weights lie elsewhere is far smaller


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def model_sha256(path: Path) -> str:
    """SHA-256 of a model's bytes; with weights in another file, of both, the file's name left out.

    The name depends on what lay in the folder when the model was written; the content does not.
    """
    proto = _structure(path)
    names = _data_names(proto) if proto is not None else {}
    if proto is None or not names:
        return file_sha256(path)
    for number, entries in enumerate(names.values()):
        for entry in entries:
            entry.value = str(number)
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True))
    for name in sorted(names):
        digest.update(file_sha256(path.parent / name).encode())
    return digest.hexdigest()


def _structure(path: Path) -> onnx.ModelProto | None:
    if path.stat().st_size > MOST_STRUCTURE:
        return None
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError:
        return None


def _data_names(proto: onnx.ModelProto) -> dict[str, list[onnx.StringStringEntryProto]]:
    """The data files' names, in the order in which they appear, and the entries that give each."""
    names: dict[str, list[onnx.StringStringEntryProto]] = {}
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                names.setdefault(entry.value, []).append(entry)
    return names


def external_values(model: ir.Model) -> Iterator[tuple[ir.Value, ir.ExternalTensor]]:
    """Every initializer, in subgraphs too, whose data lie in another file."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value, value.const_value


def self_contained(model: ir.Model, keep: Collection[str] = ()) -> ir.Model:
    """The model, or a clone that refers to no other file; the clone's weights stay mapped, not copied.

    Args:
        model: any model.
        keep: initializers that may go on referring to their file.
    """
    if all(value.name in keep for value, _ in external_values(model)):
        return model
    clone = model.clone()
    for value, tensor in list(external_values(clone)):
        if value.name not in keep:
            content = tensor.numpy()
            value.const_value = ir.Tensor(content, dtype=tensor.dtype, shape=tensor.shape, name=value.name)
    return clone


_WORTH_CARRYING = 1024  # bytes; smaller constants stay in the outline


@contextmanager
def weights_apart(
    model: ir.Model, least: int, wanted: Callable[[str, ir.TensorProtocol], bool]
) -> Iterator[dict[str, ir.TensorProtocol]]:
    """For the block, leave names in the place of large weights, which it gets: protobuf alone ends at 2 GB.

    Args:
        model: in the end it is as it was.
        least: bytes; smaller constants stay.
        wanted: whether a weight is to be taken out, by its name.
    """
    apart: dict[str, ir.TensorProtocol] = {}
    values = model.graph.initializers
    try:
        for name, value in values.items():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes >= least and wanted(name, tensor):
                apart[name], shape = tensor, ir.Shape(tensor.shape.numpy())
                value.const_value = ir.ExternalTensor(
                    "apart", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name
                )
        yield apart
    finally:
        for name, tensor in apart.items():
            values[name].const_value = tensor


@dataclass(frozen=True, slots=True, eq=False)
class Portable:
    """A model as plain bytes and arrays, which pickle well.

    Attributes:
        outline: the graph without its large constants.
        weights: these, by name.
    """

    outline: bytes
    weights: dict[str, Array]

    @staticmethod
    def of(model: ir.Model) -> Portable:
        """A model, packed; it is not changed."""
        outline = self_contained(model)
        with weights_apart(outline, _WORTH_CARRYING, lambda _, t: t.dtype is not ir.DataType.STRING) as apart:
            content = ir.to_proto(outline).SerializeToString()
        return Portable(content, {name: tensor.numpy() for name, tensor in apart.items()})

    def model(self) -> ir.Model:
        """The model again."""
        model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(self.outline))
        for name, array in self.weights.items():
            value = model.graph.initializers[name]
            assert value.const_value is not None
            value.const_value = ir.Tensor(array, value.const_value.dtype, name=name)
        return model


_PROTOBUF_LIMIT = 1_900_000_000


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path`; on success it takes the path's place, else it vanishes."""
    check_writable(path)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=".roundel-", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        os.close(handle)
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> OutputError:
    return OutputError(
        "The result could not be written; what was there before is untouched.",
        where=path,
        observed=error.strerror or error,
        hint="Free some space or choose another output path.",
    )


def check_writable(path: Path) -> None:
    """Fail now, not after minutes of work, when the output cannot be written."""
    folder = path.parent
    try:
        if not folder.is_dir():
            raise OutputError(
                "The output folder does not exist.",
                where=folder,
                expected="an existing folder",
                hint=f"Create it (mkdir -p '{folder}') or choose another output path.",
            )
        if path.is_dir():
            raise OutputError("The output path is a folder.", where=path, expected="a file name")
        if not os.access(folder, os.W_OK):
            hint = "Choose a folder that you may write to."
            raise OutputError("The output folder is read-only.", where=folder, hint=hint)
    except OSError as error:
        raise OutputError(
            "The output path cannot be used.",
            where=path,
            observed=error.strerror or error,
            hint="Choose another output path.",
        ) from error


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths name one file, now or once it is written."""
    try:
        return one.resolve() == other.resolve() or one.samefile(other)
    except OSError:  # one of them does not exist
        return False


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_model(model: ir.Model, path: Path, *, external_data: bool = False) -> None:
    """Save atomically; see `staged`."""
    with staged(model, path, external_data=external_data):
        pass


@contextmanager
def staged(
    model: ir.Model, path: Path, *, external_data: bool = False, reads: Iterable[Path] = ()
) -> Iterator[Path]:
    """Save under a temporary name, which is yielded; when the block ends well, the file takes its place.

    The data file of the output that was there goes with it, if Roundel wrote it and nobody else reads it.

    Args:
        model: what to save.
        path: where to.
        external_data: keep weights in `<name>.data` beside the model (always done beyond protobuf's 2 GB).
        reads: files that somebody still needs, whatever else is known of them.
    """
    whole, before = self_contained(model), _claimed_data(path)
    apart = external_data or weight_bytes(model) >= _PROTOBUF_LIMIT
    with _saved(whole, path, apart=apart) as temporary:
        yield temporary
    if before is not None and not any(same_file(before, file) for file in reads) and _unmentioned(before):
        # Where another program still has it open, some systems keep it; the new model does not need it.
        with suppress(OSError):
            before.unlink()


@contextmanager
def staged_or_temporary(
    model: ir.Model, path: Path | None, *, external_data: bool = False, reads: Iterable[Path] = ()
) -> Iterator[Path]:
    """As `staged`; without a path, a file that vanishes with the block."""
    with ExitStack() as ending:
        place, apart = path, external_data
        if place is None:
            folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="roundel-"))
            place, apart = Path(folder) / "model.onnx", False
        yield ending.enter_context(staged(model, place, external_data=apart, reads=reads))


@contextmanager
def _saved(model: ir.Model, path: Path, *, apart: bool) -> Iterator[Path]:
    """The model; `apart`, its larger weights in a file that bears its name, unless there are none."""
    data = _new_data_file(path) if apart else None
    try:
        with replacing(path) as temporary:
            ir.save(model, temporary, external_data=None if data is None else data.name)
            if data is not None and data.stat().st_size:
                _mark(temporary, data)
            elif data is not None:
                data.unlink()
            yield temporary
    except BaseException:
        if data is not None:
            data.unlink(missing_ok=True)
        raise


def _new_data_file(path: Path) -> Path:
    """An empty file of a name that was free: whatever lies there may belong to somebody.

    An older output at `path` must stay readable until the new one has taken its place.
    """
    check_writable(path)
    for count in itertools.count():
        file = path.with_name(f"{path.name}.{count}.data" if count else f"{path.name}.data")
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritten(path, error) from error
        return file
    raise AssertionError("numbers do not end")


DATA_MARK = "roundel.data_sha256"


def _mark(model: Path, data: Path) -> None:
    """Write into the model what its data file holds: only with that proof Roundel removes it later."""
    entry = onnx.StringStringEntryProto(key=DATA_MARK, value=file_sha256(data))
    with model.open("ab") as file:  # protobuf reads messages that follow each other as one
        file.write(onnx.ModelProto(metadata_props=[entry]).SerializeToString())


def _claimed_data(path: Path) -> Path | None:
    """The data file that Roundel wrote with the model at `path`, if it is still what Roundel wrote."""
    try:
        old = _structure(path)
        if old is None:
            return None
        digests = [entry.value for entry in old.metadata_props if entry.key == DATA_MARK]
        own = re.compile(rf"{re.escape(path.name)}(\.\d+)?\.data")
        for name in _data_names(old):
            data = path.with_name(name) if own.fullmatch(name) else None
            if data is not None and not data.is_symlink() and [file_sha256(data)] == digests:
                return data
    except OSError:  # what cannot be read stays
        pass
    return None


_LARGEST_MODEL = 1 << 31  # bytes of a protobuf


def _unmentioned(data: Path) -> bool:
    """Whether no other file in its folder has its name: a copy of the model may need it still."""
    try:
        for file in data.parent.iterdir():
            if file == data or not file.is_file() or not 0 < file.stat().st_size < _LARGEST_MODEL:
                continue
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(data.name.encode()) >= 0:
                    return False
    except OSError:  # one cannot be read: then nobody knows
        return False
    return True
