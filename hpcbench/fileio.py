"""Files that are whole or absent: atomic writes, exclusive creation, text that is safe to show."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from hpcbench.errors import StorageError

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename it into place, so that no reader ever sees half a file.

    The data is flushed to the device first: a rename that survives a crash must not point to an empty file.
    Raises ``StorageError`` naming the path where the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create ``path`` with ``data`` if nobody has; ``False`` where it exists already.

    The content is linked into place whole: the loser of a race reads the winner's complete file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return _claim(temporary, path, data)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def _claim(temporary: Path, path: Path, data: bytes) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # Some file systems have no hard links; O_EXCL alone still lets only one writer win.
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with open(descriptor, "wb") as file:
            file.write(data)
    return True


def make_folder(path: Path) -> None:
    """Create ``path`` and its parents; ``StorageError`` names the folder that cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, path) from error


def storage_error(error: OSError, path: Path) -> StorageError:
    """``error`` in the user's words: the path, the reason, and who owns the nearest folder that exists."""
    reason = error.strerror or str(error)
    return StorageError(f"cannot write {path}: {reason}", hint=_owner_hint(path))


def _owner_hint(path: Path) -> str | None:
    for folder in (path, *path.parents):
        try:
            state = folder.stat()
        except OSError:
            continue
        return f"{folder} belongs to uid {state.st_uid}, gid {state.st_gid}, mode {state.st_mode & 0o7777:04o}"
    return None


def printable(text: str) -> str:
    """``text`` without characters that could steer a terminal or hide what stands there."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def tail(path: Path, limit_bytes: int = 4000) -> str:
    """The end of a log file as printable text; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            return printable(file.read().decode(errors="replace"))
    except OSError:
        return ""
