"""Atomic writes, exclusive creation, and reading of plain files without following links; text that is safe to print."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from hpcbench.errors import StorageError

_T = TypeVar("_T")
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
            share_with_group(temporary)
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
            share_with_group(path)
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
                make_shared_folder(folder)
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(error, path) from error


def is_shared(folder: Path) -> bool:
    """Whether a group shares ``folder``: it is setgid and writable for the group."""
    mode = folder.stat().st_mode
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def make_shared_folder(path: Path) -> None:
    """Make a folder; in one that a group shares, it is setgid and writable for the group, whatever the umask.

    The system sets these rights while it makes the folder: afterwards, it would refuse setgid to a process that is not
    in the group, as a job may be on a node with fewer groups. Raises ``OSError``.
    """
    if not is_shared(path.parent):
        path.mkdir()
        return
    before = os.umask(0)
    os.umask(before & ~stat.S_IRWXG)
    try:
        path.mkdir()
    finally:
        os.umask(before)
    mode, wanted = path.stat().st_mode, stat.S_ISGID | stat.S_IRWXG
    if mode & wanted != wanted:
        path.chmod(stat.S_IMODE(mode) | wanted)


def share_with_group(path: Path) -> None:
    """Make a new file readable for the group that shares its folder, whatever the umask."""
    if is_shared(path.parent):
        path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRGRP)


_GROUP_READS = 0o050


def shared_umask(folder: Path) -> int:
    """The umask for processes that write into ``folder``: this process's own, which lets the group read if it shares
    the folder.
    """
    own = os.umask(0)
    os.umask(own)
    return own & ~_GROUP_READS if is_shared(folder) else own


def write_error(error: OSError, path: Path) -> StorageError:
    """Describe ``error``: the path, the reason, and the owner of the nearest folder that exists."""
    reason = error.strerror or str(error)
    # The owner of a full or absent file system is not the reason.
    hint = None if error.errno in TEMPORARY_REFUSALS else _owner_hint(path)
    if error.errno == errno.ENOTDIR and (place := _nearest_path(path)):
        hint = f"{place[0]} is a file: name a folder, or move it away"
    if error.errno == errno.ENOENT and not path.parent.exists():
        hint = f"the folder {path.parent} does not exist"
    return _storage_error(f"cannot write {path}: {reason}", error, hint)


def read_error(error: OSError, path: Path) -> StorageError:
    """Return the ``StorageError`` of a file that could not be read; its hint has the command that shares the file."""
    hint = None
    if error.errno in (errno.EACCES, errno.EPERM):
        place = _nearest_path(path)
        hint = f"{_describe_owner(*place)}; its owner shares it by: chmod -R g+rX {place[0]}" if place else None
    return _storage_error(f"cannot read {path}: {error.strerror or error}", error, hint)


def _storage_error(message: str, error: OSError, hint: str | None) -> StorageError:
    storage_error = StorageError(message, hint=hint)
    storage_error.errno = error.errno
    return storage_error


TEMPORARY_REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EIO, errno.ENOTCONN})
"""Errors of a file system that often end by themselves: it is full, read-only, or its server is away."""
_RETRY_PAUSE_S = 1.0


def write_patiently(write: Callable[[], _T], patience_s: float) -> _T:
    """Call ``write`` again, for at most ``patience_s``, while the file system refuses for a reason that may pass.

    Raises ``StorageError`` of the last call, which names the reason and how long it lasted.
    """
    began_s = time.monotonic()
    while True:
        try:
            return write()
        except StorageError as error:
            waited_s = time.monotonic() - began_s
            if error.errno not in TEMPORARY_REFUSALS:
                raise
            if waited_s + _RETRY_PAUSE_S > patience_s:
                error.message += f", for {waited_s:.0f} s"
                raise
        time.sleep(_RETRY_PAUSE_S)


def _owner_hint(path: Path) -> str | None:
    place = _nearest_path(path)
    if place is None:
        return None
    folder, state = place
    owner = _describe_owner(folder, state)
    if folder.is_dir() and not state.st_mode & stat.S_IWGRP and state.st_gid in os.getgroups():
        return f"{owner}; its owner shares it with the group by: find {folder} -type d -exec chmod g+rwxs {{}} +"
    return owner


def _nearest_path(path: Path) -> tuple[Path, os.stat_result] | None:
    """``path``, or the nearest folder above it that can be looked at, with its state."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return folder, folder.stat()
    return None


def _describe_owner(path: Path, state: os.stat_result) -> str:
    return f"{path} belongs to uid {state.st_uid}, gid {state.st_gid}, mode {state.st_mode & 0o7777:04o}"


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
            raise UnsafeFileError(errno.ENXIO, "it is not a plain file", path) from None
        raise
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise UnsafeFileError(errno.EINVAL, "it is not a plain file", path)
    return descriptor, state


def join_without_links(root: Path, *parts: str) -> Path:
    """Join ``root`` with ``parts``; ``StorageError`` if one of the parts is a link.

    ``root`` itself may be a link: that is its owner's choice. What lies below can be written by others.
    """
    path = root
    for part in parts:
        if part in ("", ".", "..") or "/" in part:
            raise StorageError(f"{part!r} is not a name of a file in {path}")
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
