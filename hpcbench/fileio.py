"""Atomic writes, exclusive creation, and reading of plain files without following links; text that is safe to print."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hpcbench.errors import StorageError

MAX_FILE_BYTES = 64 * 2**20
"""Larger than any file that a run leaves for others to read; a log is read in parts."""
MAX_GENERATED_FILE_BYTES = 2**30
"""Limit for hpcbench's own files whose size follows from the number of runs."""
_MAX_EXCERPT_CHARACTERS = 2000

# Control characters, marks that reorder or hide text, line separators, and bytes that were no text to begin with.
_CONTROL_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)


def encode_indented_json(value: Any) -> bytes:
    """JSON as files hold it."""
    # Imported here: `--help` and completion of words write no file.
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename it into place, so that no reader ever sees half a file.

    The data is flushed to the device first: a rename that survives a crash must not point to an empty file.
    Raises ``StorageError`` naming the path where the file system refuses.
    """
    with open_atomic(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for an atomic write in pieces; if the body fails no file is left."""
    with _temporary_beside(path) as (temporary, file):
        yield file
        _flush_to_disk(file)
        os.replace(temporary, path)


def write_exclusive(path: Path, data: bytes) -> bool:
    """Create ``path`` with ``data`` if it does not exist; ``False`` where it exists already.

    The content is linked into place whole: the loser of a race reads the winner's complete file.
    """
    with _temporary_beside(path) as (temporary, file):
        file.write(data)
        _flush_to_disk(file)
        return _link_exclusive(temporary, path, data)


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A new file beside ``path``, which is gone at the end; ``StorageError`` where the file system refuses."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield temporary, file
    except OSError as error:
        raise write_error(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _link_exclusive(temporary: Path, path: Path, data: bytes) -> bool:
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


def write_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` as ``write_atomic`` does; its folder is created."""
    make_folder(path.parent)
    write_atomic(path, data)


def make_folder(path: Path) -> None:
    """Create ``path`` and its parents; ``StorageError`` names the folder that cannot be made.

    Below a folder that a group shares, each is writable for the group.
    """
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                share_with_group(folder)
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(error, path) from error


def share_with_group(folder: Path) -> None:
    """Give a new folder the group's rights of its parent if that is shared: setgid and writable for the group.

    The umask takes these rights away, and another user could not go on there.
    """
    mode = folder.parent.stat().st_mode
    if mode & stat.S_ISGID and mode & stat.S_IWGRP:
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | (mode & (stat.S_ISGID | stat.S_IRWXG)))


def write_error(error: OSError, path: Path) -> StorageError:
    """Describe ``error``: the path, the reason, and the owner of the nearest folder that exists."""
    reason = error.strerror or str(error)
    return StorageError(f"cannot write {path}: {reason}", hint=_owner_hint(path))


def read_error(error: OSError, path: Path) -> StorageError:
    """Return the ``StorageError`` of a file that could not be read."""
    return StorageError(f"cannot read {path}: {error.strerror or error}", hint=_owner_hint(path))


def _owner_hint(path: Path) -> str | None:
    for folder in (path, *path.parents):
        try:
            state = folder.stat()
        except OSError:
            continue
        owner = f"{folder} belongs to uid {state.st_uid}, gid {state.st_gid}, mode {state.st_mode & 0o7777:04o}"
        if folder.is_dir() and not state.st_mode & stat.S_IWGRP and state.st_gid in os.getgroups():
            return f"{owner}; its owner shares it with the group by: find {folder} -type d -exec chmod g+rwxs {{}} +"
        return owner
    return None


class UnsafeFileError(OSError):
    """A path does not lead to a plain file of an allowed size: it is not opened, or not read."""

    def __init__(self, code: int, reason: str, path: Path | str) -> None:
        super().__init__(code, reason, str(path))


def read_regular(path: Path | str, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a plain file; ``UnsafeFileError`` for a link, a pipe, a device, or more than ``limit_bytes``."""
    return read_regular_with_stat(path, limit_bytes)[0]


def read_regular_with_stat(path: Path | str, limit_bytes: int = MAX_FILE_BYTES) -> tuple[bytes, os.stat_result]:
    """Return the bytes of ``read_regular`` and the file's state before it was read."""
    descriptor, state = _open_regular(path)
    try:
        size = state.st_size
        if size > limit_bytes:
            raise UnsafeFileError(errno.EFBIG, f"it has {size} bytes, more than {limit_bytes} are not read", path)
        data = os.read(descriptor, size + 1)
        # The file has grown meanwhile, or is one of the kernel's, which have no size.
        while size < len(data) <= limit_bytes and (more := os.read(descriptor, limit_bytes + 1 - len(data))):
            data += more
        if len(data) > limit_bytes:
            raise UnsafeFileError(errno.EFBIG, f"it grew beyond {limit_bytes} bytes while it was read", path)
        return data, state
    finally:
        os.close(descriptor)


def open_regular(path: Path | str) -> int:
    """A descriptor of a plain file for reading. Opening never waits, as the opening of a pipe in its place would."""
    return _open_regular(path)[0]


_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _open_regular(path: Path | str) -> tuple[int, os.stat_result]:
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeFileError(errno.ELOOP, "it is a link, which is not followed", path) from None
        if error.errno == errno.ENXIO:
            raise UnsafeFileError(errno.ENXIO, "it is no plain file", path) from None
        raise
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise UnsafeFileError(errno.EINVAL, "it is no plain file", path)
    return descriptor, state


def join_without_links(root: Path, *parts: str) -> Path:
    """Join ``root`` with ``parts``; ``StorageError`` if one of the parts is a link.

    ``root`` itself may be a link: that is its owner's choice. What lies below can be written by others.
    """
    path = root
    for part in parts:
        if part in ("", ".", "..") or "/" in part:
            raise StorageError(f"{part!r} is no name of a file in {path}")
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            # Absent, or not to be looked at: whoever opens it says so.
            continue
        if stat.S_ISLNK(mode):
            raise StorageError(
                f"{path} is a link: none is followed inside a results tree",
                hint="remove it, or put what it points to in its place; only the tree as a whole may be a link",
            )
    return path


def printable_text(text: str) -> str:
    """Return ``text`` without characters that control a terminal or hide text."""
    return _CONTROL_CHARACTERS.sub("\ufffd", text)


def printable_excerpt(text: str) -> str:
    """Return ``printable_text(text)``, cut to a readable length."""
    cut = len(text) - _MAX_EXCERPT_CHARACTERS
    return (
        printable_text(text)
        if cut <= 0
        else f"{printable_text(text[:_MAX_EXCERPT_CHARACTERS])} ... ({cut} more characters)"
    )


def escape_control_characters(text: str) -> str:
    """Return JSON with control characters as ``\\uXXXX``: the same document, safe to print."""
    return _CONTROL_CHARACTERS.sub(_escape_as_json, text)


def _escape_as_json(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def read_tail(path: Path, limit_bytes: int = 4000) -> str:
    """The end of a log file as printable text; empty where it cannot be read."""
    try:
        with open(open_regular(path), "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            return printable_text(file.read().decode(errors="replace"))
    except OSError:
        return ""
