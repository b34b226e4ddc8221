"""A folder of files that belong together, written without touching anything else in it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from roundel.errors import OutputError
from roundel.model.files import file_sha256

MANIFEST = "kit.json"
_VERSION_KEY = "roundel_kit"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class KitFile:
    """A file of the kit.

    Attributes:
        name: path below the folder, with forward slashes.
        content: the bytes, or the file to copy.
        executable: whether it is a program.
    """

    name: str
    content: bytes | Path
    executable: bool = False

    def digest(self) -> str:
        """SHA-256 of the content."""
        if isinstance(self.content, Path):
            return file_sha256(self.content)
        return hashlib.sha256(self.content).hexdigest()

    def write(self, path: Path) -> None:
        """Create `path`, with the permissions that the user's umask allows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o777 if self.executable else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags, mode), "wb") as target:
            if isinstance(self.content, Path):
                with self.content.open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 20)
            else:
                target.write(self.content)


def write_folder(folder: Path, files: Sequence[KitFile], about: Mapping[str, Any]) -> tuple[str, ...]:
    """Write the files and a manifest; a file that Roundel did not write there is never replaced.

    A new folder appears whole or not at all. In an existing one, everything is prepared first and then moved
    into place file by file, the manifest last.

    Args:
        folder: where to; its parent must exist.
        files: what to write.
        about: facts for the manifest, beside the digests.

    Returns:
        The names written, the manifest's last.

    Raises:
        OutputError: the folder cannot be written, or a file of another origin is in the way.
    """
    _check_names(files)
    _check_folder(folder)
    with _as_output_errors(folder):
        digests = {file.name: file.digest() for file in files}
        manifest = {_VERSION_KEY: _VERSION, **about, "files": digests}
        whole = [*files, KitFile(MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())]
        if folder.is_dir():
            _update(folder, whole, digests)
        else:
            with _staging(folder.parent, folder.name) as staging:
                for file in whole:
                    file.write(staging / file.name)
                staging.rename(folder)
    return tuple(file.name for file in whole)


def _check_names(files: Sequence[KitFile]) -> None:
    taken = {MANIFEST}
    for file in files:
        if not _safe_name(file.name):
            raise OutputError(
                "A file of the kit would lie outside its folder.", where=file.name, expected="a plain name"
            )
        # Windows does not tell names apart by case.
        if file.name.casefold() in taken:
            raise OutputError(
                "The model's external data has the name of another file of the kit.",
                where=file.name,
                hint="Save the model with its weights under another name.",
            )
        taken.add(file.name.casefold())


def _safe_name(name: str) -> bool:
    parts = PurePosixPath(name).parts
    plain = bool(parts) and not any(part in ("..", "/") for part in parts)
    return plain and not any(mark in name for mark in ("\\", ":", "\0"))


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise OutputError("The output is a file.", where=folder, expected="a folder, new or existing")
    holder = folder if folder.is_dir() else folder.parent
    if not holder.is_dir():
        raise OutputError(
            "The folder to put the kit into does not exist.",
            where=holder,
            hint=f"Create it (mkdir -p '{holder}') or choose another output folder.",
        )
    if not os.access(holder, os.W_OK):
        raise OutputError("The output folder is read-only.", where=holder, hint="Choose another folder.")


@contextmanager
def _as_output_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            "The kit could not be written.",
            where=error.filename or folder,
            observed=error.strerror or error,
            hint="Free some space or choose another output folder.",
        ) from error


@contextmanager
def _staging(holder: Path, name: str) -> Iterator[Path]:
    staging = holder / f".{name}.{secrets.token_hex(4)}.tmp"
    staging.mkdir()
    try:
        yield staging
    finally:
        if staging.exists():
            shutil.rmtree(staging)


def _update(folder: Path, files: Sequence[KitFile], digests: Mapping[str, str]) -> None:
    earlier = _earlier_files(folder)
    changed = [file for file in files if not _in_place(folder, file, digests, earlier)]
    stale = [name for name in earlier if name not in digests and _untouched(folder, name, earlier)]
    if not changed:
        return
    with _staging(folder, folder.name) as staging:
        for file in changed:
            file.write(staging / file.name)
        for file in changed:
            target = folder / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            (staging / file.name).replace(target)
    for name in stale:
        (folder / name).unlink()


def _earlier_files(folder: Path) -> dict[str, str]:
    """Names and digests of the kit that is there already."""
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        return {}
    foreign = OutputError(
        f"A {MANIFEST} that is not Roundel's is in the way.", where=path, hint="Choose another output folder."
    )
    if path.is_symlink() or not path.is_file():
        raise foreign
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise foreign from error
    files = tree.get("files") if isinstance(tree, dict) and _VERSION_KEY in tree else None
    if not isinstance(files, dict):
        raise foreign
    return {name: digest for name, digest in files.items() if isinstance(digest, str)}


def _in_place(folder: Path, file: KitFile, digests: Mapping[str, str], earlier: Mapping[str, str]) -> bool:
    """Whether the file is there already with this content; an error when another's file is there."""
    target = folder / file.name
    link = _link_on_the_way(folder, file.name)
    if link is not None:
        raise OutputError("A symbolic link is in the way.", where=link, hint="Choose another output folder.")
    if not target.exists():
        return False
    if target.is_dir():
        raise OutputError("A folder is in the way.", where=target, hint="Choose another output folder.")
    there = file_sha256(target)
    if there == (digests.get(file.name) or file.digest()):
        return True
    if file.name != MANIFEST and there != earlier.get(file.name):
        edited = "A file was edited since Roundel wrote it."
        what = edited if file.name in earlier else "A file of another origin is in the way."
        raise OutputError(what, where=target, hint="Move it away, or choose another output folder.")
    return False


def _link_on_the_way(folder: Path, name: str) -> Path | None:
    path = folder
    for part in PurePosixPath(name).parts:
        path = path / part
        if path.is_symlink():
            return path
    return None


def _untouched(folder: Path, name: str, earlier: Mapping[str, str]) -> bool:
    """Whether an earlier kit's file is there as it was written; the manifest's names are not trusted."""
    if not _safe_name(name) or _link_on_the_way(folder, name) is not None:
        return False
    path = folder / name
    return path.is_file() and file_sha256(path) == earlier[name]
