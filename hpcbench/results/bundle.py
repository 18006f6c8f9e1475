"""A bundle: part of a tree as one ``.tar.gz`` for handing over, and how it is read without unpacking it.

``bundle.json`` comes first and says what is inside, then the files under the names that they have in a tree
(``<cluster>/runs/...``), then ``manifest.json`` with the size and SHA-256 of each. The same files make the same bytes.
A bundle is data from somebody else: nothing of it is ever written to disk, and only names of our own are looked at.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.fileio import MAX_FILE_BYTES, open_regular
from hpcbench.results.decode import decode

FORMAT_VERSION = 1
MAX_MEMBERS = 1_000_000
_MOST_PROBLEMS = 1000
"""An archive made to annoy has a million; those of files that were read are kept all."""
HEADER, MANIFEST = "bundle.json", "manifest.json"
ENDINGS = (".tar.gz", ".tgz")

_BLOCK = tarfile.BLOCKSIZE
_SAFE_NAME = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_PLAIN, _FOLDER, _EXTENSION = (b"0", b"\0", b"7"), b"5", (b"x", b"g", b"L", b"K")


class BundledSweep(msgspec.Struct, kw_only=True):
    """A sweep of a bundle and the runs that it means, in their order."""

    sweep: str
    cluster: str
    run_ids: list[str]


class BundleHeader(msgspec.Struct, kw_only=True):
    """``bundle.json``."""

    format_version: int
    hpcbench: str
    schema_version: int
    python: str
    anonymous: bool
    logs: bool
    sweeps: list[BundledSweep]
    left_out: dict[str, str] = {}
    """Files that belong here and could not be read, with the reason."""


class FileEntry(msgspec.Struct):
    """What the manifest says of a file."""

    sha256: str
    size_bytes: int


class Manifest(msgspec.Struct):
    """``manifest.json``."""

    files: dict[str, FileEntry]


class BundleWriter:
    """Writes members one by one; leaving the ``with`` block adds the manifest."""

    def __init__(self, file: IO[bytes], header: BundleHeader) -> None:
        # No name and no time in gzip's header, none of ours in tar's: the same files make the same bytes.
        self._gzip = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
        self._tar = tarfile.open(fileobj=self._gzip, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed below
        self._files: dict[str, FileEntry] = {}
        self._add(HEADER, json_bytes(header))

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._add(MANIFEST, json_bytes(Manifest(self._files)))
        self._tar.close()
        self._gzip.close()

    def add(self, name: str, data: bytes) -> None:
        """Add a file; its name is one of a tree."""
        assert _SAFE_NAME.fullmatch(name), name
        assert name not in self._files, name
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{name} has {len(data)} bytes: a bundle's files have at most {MAX_FILE_BYTES}")
        if len(self._files) + 2 >= MAX_MEMBERS:
            raise ConfigError(f"more than {MAX_MEMBERS} files: bundle the sweep's clusters one by one, without --logs")
        self._files[name] = FileEntry(hashlib.sha256(data).hexdigest(), len(data))
        self._add(name, data)

    def _add(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._tar.addfile(member, io.BytesIO(data))


class BundleReader:
    """The members of a bundle in their order, each read once; what is no file of ours is a problem with its reason.

    Raises ``ConfigError`` where the file is no bundle, or one that is not to be read: a member larger than
    ``MAX_FILE_BYTES``, more than ``MAX_MEMBERS`` members, an archive that is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: dict[str, str] = {}
        """What was passed over and why, by the member's name."""
        self._digests: dict[str, str] = {}

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of every plain file; once all are read ``problems`` says which the manifest contradicts."""
        try:
            with open(open_regular(self.path), "rb") as file, gzip.GzipFile(fileobj=file) as stream:
                yield from self._files(stream)
        except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.HeaderError) as error:
            raise ConfigError(f"{self.path} is damaged, or no .tar.gz: {error}", hint=_HINT) from None
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _files(self, stream: gzip.GzipFile) -> Iterator[tuple[str, bytes]]:
        manifest: bytes | None = None
        for member in self._members(stream):
            name = member.name.removeprefix("./")
            reason = self._reason_against(member, name)
            if reason:
                known = name in self._digests or len(self.problems) < _MOST_PROBLEMS
                if known and member.type not in _EXTENSION and member.type != _FOLDER:
                    self.problems[name] = f"passed over: {reason}"
                _skip(stream, _padded(member.size))
                continue
            data = _exactly(stream, _padded(member.size))[: member.size]
            self._digests[name] = hashlib.sha256(data).hexdigest()
            if name == MANIFEST:
                manifest = data
            else:
                yield name, data
        if manifest is None:
            raise ConfigError(f"{self.path} has no {MANIFEST}: it is cut short, or no bundle", hint=_HINT)
        self._check(manifest)

    def _members(self, stream: gzip.GzipFile) -> Iterator[tarfile.TarInfo]:
        """Every header up to the end of the archive.

        tarfile's own reader follows extended headers into memory, however long they say they are; this one takes the
        512 bytes of a header and no more.
        """
        count = 0
        while True:
            block = stream.read(_BLOCK)
            if not block or block == bytes(_BLOCK):
                return
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            count += 1
            if count > MAX_MEMBERS:
                raise ConfigError(f"{self.path} has more than {MAX_MEMBERS} members (this is number {count})")
            if not 0 <= member.size <= MAX_FILE_BYTES:
                raise ConfigError(
                    f"{self.path}: member {member.name!r} says that it has {member.size} bytes, "
                    f"at most {MAX_FILE_BYTES} are read"
                )
            if count == 1 and member.name.removeprefix("./") not in (HEADER, "", "."):
                raise ConfigError(f"{self.path} is no bundle: it does not begin with {HEADER}", hint=_HINT)
            yield member

    def _reason_against(self, member: tarfile.TarInfo, name: str) -> str:
        if member.type not in _PLAIN:
            return f"it is no plain file (type {member.type!r})"
        if not _SAFE_NAME.fullmatch(name):
            return "its name is none of a file in a tree"
        if name in self._digests:
            return "its name is there twice: neither is believed"
        return ""

    def _check(self, data: bytes) -> None:
        try:
            listed = decode(data, Manifest).files
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path}: {MANIFEST} is broken: {error}") from None
        for name, digest in self._digests.items():
            if name in (HEADER, MANIFEST):
                continue
            if name not in listed:
                self.problems[name] = f"passed over: {MANIFEST} does not list it"
            elif listed[name].sha256 != digest:
                self.problems[name] = f"passed over: its SHA-256 is not the one in {MANIFEST}"
        for name in sorted(listed.keys() - self._digests.keys())[:_MOST_PROBLEMS]:
            self.problems.setdefault(name, f"{MANIFEST} lists it, but it is not there")


_HINT = "bundles are made by: hpcbench bundle SWEEP"


def is_bundle(given: str) -> bool:
    """Whether an argument names a bundle and not a sweep."""
    return given.endswith(ENDINGS)


def read_header(data: bytes, path: Path) -> BundleHeader:
    """``bundle.json``; ``ConfigError`` where it is broken or of a later format."""
    try:
        header = decode(data, BundleHeader)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {HEADER} is broken: {error}", hint=_HINT) from None
    if header.format_version > FORMAT_VERSION:
        made = f"format {header.format_version}, made by hpcbench {header.hpcbench}"
        raise ConfigError(
            f"{path} has {made}; this hpcbench reads format {FORMAT_VERSION}", hint="use a newer hpcbench"
        )
    return header


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _exactly(stream: gzip.GzipFile, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError("it ends within a member")
    return data


def _skip(stream: gzip.GzipFile, count: int) -> None:
    while count > 0:
        count -= len(_exactly(stream, min(count, 2**20)))


def json_bytes(value: Any) -> bytes:
    """JSON as the files of a tree hold it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
