"""One hash for a model on disk, whatever its data file is called."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray

from roundel.errors import OutputError
from roundel.model.graph import weight_bytes

_PIECE = 1 << 20
_STRUCTURE = 256_000_000  # bytes; a model whose weights lie elsewhere is far smaller


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
    names = sorted(_name_data(proto)) if proto is not None else []
    if proto is None or not names:
        return file_sha256(path)
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True))
    for name in names:
        digest.update(file_sha256(path.with_name(name)).encode())
    return digest.hexdigest()


def _structure(path: Path) -> onnx.ModelProto | None:
    if path.stat().st_size > _STRUCTURE:
        return None
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError:
        return None


def _name_data(proto: onnx.ModelProto) -> set[str]:
    """The data files' names, each replaced in the model by its number."""
    numbers: dict[str, int] = {}
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(numbers.setdefault(entry.value, len(numbers)))
    return set(numbers)


def external_values(model: ir.Model) -> Iterator[tuple[ir.Value, ir.ExternalTensor]]:
    """Every initializer, in subgraphs too, whose data lie in another file."""
    for graph in (model.graph, *model.graph.subgraphs()):
        if isinstance(graph, ir.Graph):
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


@dataclass(frozen=True, slots=True, eq=False)
class Portable:
    """A model as plain bytes and arrays, which pickle well: protobuf alone ends at 2 GB.

    Attributes:
        outline: the graph without its large constants.
        weights: these, by name.
    """

    outline: bytes
    weights: dict[str, NDArray[Any]]

    @staticmethod
    def of(model: ir.Model) -> Portable:
        """A model, packed; it is not changed."""
        outline = self_contained(model).clone()
        weights: dict[str, NDArray[Any]] = {}
        for name, value in outline.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _WORTH_CARRYING or tensor.dtype is ir.DataType.STRING:
                continue
            weights[name] = tensor.numpy()
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor("carried", 0, None, tensor.dtype, shape=shape, name=name)
        return Portable(ir.to_proto(outline).SerializeToString(), weights)

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
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            "The result could not be written; what was there before is untouched.",
            where=path,
            observed=error.strerror or error,
            hint="Free some space or choose another output path.",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Fail now, not after minutes of work, when the output cannot be written."""
    try:
        _check_place(path)
    except OSError as error:
        raise OutputError(
            "The output path cannot be used.",
            where=path,
            observed=error.strerror or error,
            hint="Choose another output path.",
        ) from error


def _check_place(path: Path) -> None:
    folder = path.parent
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
        raise OutputError(
            "The output folder is read-only.", where=folder, hint="Choose a folder that you may write to."
        )


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
def staged(model: ir.Model, path: Path, *, external_data: bool = False) -> Iterator[Path]:
    """Save under a temporary name, which is yielded; when the block ends well, the file takes its place.

    Args:
        model: what to save.
        path: where to.
        external_data: keep weights in `<name>.data` beside the model (always done beyond protobuf's 2 GB).
    """
    whole = self_contained(model)
    outdated = _data_files(path)
    if not external_data and weight_bytes(model) < _PROTOBUF_LIMIT:
        with replacing(path) as temporary:
            ir.save(whole, temporary)
            yield temporary
    else:
        data = _free_data_path(path)
        try:
            with replacing(path) as temporary:
                ir.save(whole, temporary, external_data=data.name)
                yield temporary
        except BaseException:
            data.unlink(missing_ok=True)
            raise
    for file in outdated:
        # Where another program still has it open, some systems keep it; the new model does not need it.
        with suppress(OSError):
            file.unlink()


@contextmanager
def staged_or_temporary(model: ir.Model, path: Path | None, *, external_data: bool = False) -> Iterator[Path]:
    """As `staged`; without a path, a file that vanishes with the block."""
    if path is not None:
        with staged(model, path, external_data=external_data) as file:
            yield file
        return
    with (
        tempfile.TemporaryDirectory(prefix="roundel-") as folder,
        staged(model, Path(folder) / "model.onnx") as file,
    ):
        yield file


def _data_files(path: Path) -> list[Path]:
    """The data files that an earlier output at `path` reads, as far as Roundel gave them their names."""
    try:
        old = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError):
        return []
    read = {e.value for t in old.graph.initializer for e in t.external_data if e.key == "location"}
    own = re.compile(rf"{re.escape(path.name)}(\.\d+)?\.data")
    return [path.with_name(name) for name in sorted(read) if own.fullmatch(name)]


def _free_data_path(path: Path) -> Path:
    # Never the name that an older output at `path` still refers to: that file must stay readable
    # until the new model has taken its place.
    candidate = path.with_name(f"{path.name}.data")
    count = 1
    while candidate.exists():
        candidate = path.with_name(f"{path.name}.{count}.data")
        count += 1
    return candidate


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
