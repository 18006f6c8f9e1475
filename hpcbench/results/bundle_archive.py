"""Bundles: part of a results tree as one ``.tar.gz`` with a manifest of sizes and SHA-256 digests, written
reproducibly and read without unpacking.
A bundle is untrusted data: nothing of it is written to disk, and members with unexpected names are skipped."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.fileio import MAX_FILE_BYTES, encode_indented_json, open_regular
from hpcbench.results.decode import decode_record, decode_result
from hpcbench.results.results_tree import CollectedResult

BUNDLE_FORMAT_VERSION = 1
MAX_MEMBERS = 1_000_000
_MAX_PROBLEMS_KEPT = 1000
"""An archive made to annoy has a million; those of files that were read are kept all."""
HEADER_NAME, MANIFEST_NAME = "bundle.json", "manifest.json"
BUNDLE_SUFFIXES = (".tar.gz", ".tgz")

_TAR_BLOCK_BYTES = tarfile.BLOCKSIZE
_SKIP_BYTES = 2**20
_SAFE_NAME_PATTERN = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_PLAIN_TYPES, _FOLDER_TYPE, _EXTENSION_TYPES = (b"0", b"\0", b"7"), b"5", (b"x", b"g", b"L", b"K")


class BundledSweep(msgspec.Struct, kw_only=True):
    """A sweep of a bundle and the runs that it means, in their order."""

    sweep: str
    cluster: str
    run_ids: list[str]


class BundleHeader(msgspec.Struct, kw_only=True):
    """``bundle.json``."""

    format_version: int
    hpcbench: str
    python: str
    logs: bool
    sweeps: list[BundledSweep]
    left_out: dict[str, str] = {}
    """Files that belong here and could not be read, with the reason."""


class BundleFileEntry(msgspec.Struct):
    """The manifest's entry of a file."""

    sha256: str
    size_bytes: int


class BundleManifest(msgspec.Struct):
    """``manifest.json``."""

    files: dict[str, BundleFileEntry]


class BundleWriter:
    """Writes members one by one; leaving the ``with`` block adds the manifest."""

    def __init__(self, file: IO[bytes], header: BundleHeader) -> None:
        # No name and no time in gzip's header, none of ours in tar's: the same files make the same bytes.
        self._gzip = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
        self._tar = tarfile.open(fileobj=self._gzip, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed below
        self._files: dict[str, BundleFileEntry] = {}
        self._add(HEADER_NAME, encode_indented_json(header))

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        if failure[0] is None:
            self._add(MANIFEST_NAME, encode_indented_json(BundleManifest(self._files)))
        self._tar.close()
        self._gzip.close()

    def add(self, name: str, data: bytes) -> None:
        """Add a file to the bundle.

        Args:
            name: relative path in the bundle; each name is added once.
            data: the content.

        Raises:
            ConfigError: the file has more than ``MAX_FILE_BYTES``, or the bundle has ``MAX_MEMBERS`` files already.
        """
        assert _SAFE_NAME_PATTERN.fullmatch(name), name
        assert name not in self._files, name
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{name} has {len(data)} bytes: a bundle's files have at most {MAX_FILE_BYTES}")
        if len(self._files) + 2 >= MAX_MEMBERS:
            raise ConfigError(f"more than {MAX_MEMBERS} files: bundle the sweep's clusters one by one, without --logs")
        self._files[name] = BundleFileEntry(hashlib.sha256(data).hexdigest(), len(data))
        self._add(name, data)

    def _add(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._tar.addfile(member, io.BytesIO(data))


class BundleReader:
    """The members of a bundle in their order, each read once; what is no file of ours is a problem with its reason.

    Raises ``ConfigError`` where the file is not a bundle, or one that is not to be read: a member larger than
    ``MAX_FILE_BYTES``, more than ``MAX_MEMBERS`` members, an archive that is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: dict[str, str] = {}
        """Reasons why members were passed over, by the member's name."""
        self._digests: dict[str, str] = {}

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of every plain file; then ``problems`` lists those that contradict the manifest.

        Raises:
            ConfigError: the archive cannot be read, is damaged, or is no ``.tar.gz``.
        """
        try:
            with open(open_regular(self.path), "rb") as file, gzip.GzipFile(fileobj=file) as stream:
                yield from self._files(stream)
        except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.HeaderError) as error:
            raise ConfigError(f"{self.path} is damaged, or no .tar.gz: {error}", hint=_BUNDLE_HINT) from None
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _files(self, stream: gzip.GzipFile) -> Iterator[tuple[str, bytes]]:
        manifest: bytes | None = None
        for member in self._members(stream):
            name = member.name.removeprefix("./")
            padded_size = -(-member.size // _TAR_BLOCK_BYTES) * _TAR_BLOCK_BYTES
            reason = self._reason_against(member, name)
            if reason:
                is_reported = name in self._digests or len(self.problems) < _MAX_PROBLEMS_KEPT
                if is_reported and member.type not in _EXTENSION_TYPES and member.type != _FOLDER_TYPE:
                    self.problems[name] = f"passed over: {reason}"
                for start in range(0, padded_size, _SKIP_BYTES):
                    _read_exactly(stream, min(_SKIP_BYTES, padded_size - start))
                continue
            data = _read_exactly(stream, padded_size)[: member.size]
            self._digests[name] = hashlib.sha256(data).hexdigest()
            if name == MANIFEST_NAME:
                manifest = data
            else:
                yield name, data
        if manifest is None:
            raise ConfigError(f"{self.path} has no {MANIFEST_NAME}: it is cut short, or no bundle", hint=_BUNDLE_HINT)
        self._check(manifest)

    def _members(self, stream: gzip.GzipFile) -> Iterator[tarfile.TarInfo]:
        """Every header up to the end of the archive.

        tarfile's own reader follows extended headers into memory, whatever length they declare; this one takes the
        512 bytes of a header and no more.
        """
        count = 0
        while True:
            block = stream.read(_TAR_BLOCK_BYTES)
            if not block or block == bytes(_TAR_BLOCK_BYTES):
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
            if count == 1 and member.name.removeprefix("./") not in (HEADER_NAME, "", "."):
                raise ConfigError(
                    f"{self.path} is not a bundle: it does not begin with {HEADER_NAME}", hint=_BUNDLE_HINT
                )
            yield member

    def _reason_against(self, member: tarfile.TarInfo, name: str) -> str:
        if member.type not in _PLAIN_TYPES:
            return f"it is not a plain file (type {member.type!r})"
        if not _SAFE_NAME_PATTERN.fullmatch(name):
            return "its name is none of a file in a tree"
        return "its name is there twice: neither is believed" if name in self._digests else ""

    def _check(self, data: bytes) -> None:
        try:
            listed = decode_record(data, BundleManifest).files
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path}: {MANIFEST_NAME} is broken: {error}") from None
        for name, digest in self._digests.items():
            if name in (HEADER_NAME, MANIFEST_NAME):
                continue
            if name not in listed:
                self.problems[name] = f"passed over: {MANIFEST_NAME} does not list it"
            elif listed[name].sha256 != digest:
                self.problems[name] = f"passed over: its SHA-256 is not the one in {MANIFEST_NAME}"
        for name in sorted(listed.keys() - self._digests.keys())[:_MAX_PROBLEMS_KEPT]:
            self.problems.setdefault(name, f"{MANIFEST_NAME} lists it, but it is not there")


_BUNDLE_HINT = "bundles are made by: hpcbench bundle SWEEP"


def is_bundle_path(argument: str) -> bool:
    """Whether an argument names a bundle and not a sweep."""
    return argument.endswith(BUNDLE_SUFFIXES)


def read_bundle_header(data: bytes, path: Path) -> BundleHeader:
    """``bundle.json``; ``ConfigError`` where it is broken or of another format."""
    try:
        header = decode_record(data, BundleHeader)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {HEADER_NAME} is broken: {error}", hint=_BUNDLE_HINT) from None
    if header.format_version != BUNDLE_FORMAT_VERSION:
        format_text = f"format {header.format_version}, made by hpcbench {header.hpcbench}"
        raise ConfigError(f"{path} has {format_text}; this hpcbench reads format {BUNDLE_FORMAT_VERSION}")
    return header


def _read_exactly(stream: gzip.GzipFile, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError("it ends within a member")
    return data


_RESULT_NAME_PATTERN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})/runs/([0-9a-f]{2})/(\2[0-9a-f]{14})/result\.json")
_MAX_PROBLEMS_LISTED = 20


def collect_bundle_results(path: Path, clusters: Sequence[str] | None = None) -> list[CollectedResult]:
    """The results in a bundle, in the order of its sweeps; of some clusters, or of all.

    What is broken, or was passed over, is an entry with its reason. Raises ``ConfigError`` for another file.
    """
    reader = BundleReader(path)
    header: BundleHeader | None = None
    members: dict[tuple[str, str], tuple[str, CollectedResult]] = {}
    for name, data in reader.files():
        if name == HEADER_NAME:
            header = read_bundle_header(data, path)
        elif match := _RESULT_NAME_PATTERN.fullmatch(name):
            members[match[1], match[3]] = (name, _decode_member(match[1], match[3], data))
    if header is None:
        raise ConfigError(f"{path} holds no {HEADER_NAME}")
    wanted = dict.fromkeys((sweep.cluster, run_id) for sweep in header.sweeps for run_id in sweep.run_ids)
    for key in members.keys() - wanted.keys():
        reader.problems[members[key][0]] = f"passed over: no sweep of {HEADER_NAME} means this run"
    entries = []
    for cluster, run_id in (key for key in wanted if key in members):
        name, entry = members[cluster, run_id]
        problem = reader.problems.pop(name, None)
        if not clusters or cluster in clusters:
            entries.append(CollectedResult(cluster, run_id, None, f"{name}: {problem}") if problem else entry)
    problems = [CollectedResult(path.name, name, None, reason) for name, reason in reader.problems.items()]
    rest = len(problems) - _MAX_PROBLEMS_LISTED
    if rest > 0:
        summary = CollectedResult(path.name, "...", None, f"{rest} or more other members were passed over, too")
        problems[_MAX_PROBLEMS_LISTED:] = [summary]
    return entries + problems


def _decode_member(cluster: str, run_id: str, data: bytes) -> CollectedResult:
    try:
        return CollectedResult(cluster, run_id, decode_result(data, run_id))
    except msgspec.MsgspecError as error:
        return CollectedResult(cluster, run_id, None, f"result.json is broken: {error}")
