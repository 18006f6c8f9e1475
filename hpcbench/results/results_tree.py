"""The tree ``results/<cluster>/``: paths, the rule that decides which attempt counts, and the reading of results.
Several people may write into one tree, so no link below its root is followed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcbench.errors import ConfigError, StorageError
from hpcbench.fileio import (
    UnsafeFileError,
    encode_indented_json,
    join_without_links,
    make_folder,
    read_error,
    read_regular,
    write_atomic,
    write_error,
)
from hpcbench.results.decode import BrokenFileError, decode_result
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK, ResultSummary, RunResult, result_document

RUN_ID_PATTERN = re.compile(r"[0-9a-f]{16}")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STALE_LOCK_S = 10.0
_MAX_SINGLE_LOOKUPS = 100
"""So many are looked up one by one, whatever else is in the tree."""


class ClusterTree:
    """Paths and files below ``results/<cluster>``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real_prefixes: set[str] = set()

    def run_folder(self, run_id: str) -> Path:
        """``runs/<first two hex>/<run_id>``; ids that are not 16 hex digits never become a path."""
        if not RUN_ID_PATTERN.fullmatch(run_id):
            raise StorageError(f"{run_id!r} is no run_id: 16 hexadecimal digits are")
        return self.path("runs", run_id[:2], run_id)

    def result_path(self, run_id: str) -> Path:
        """The result that counts."""
        return Path(self.run_folder(run_id), "result.json")

    def sweep_path(self, name: str) -> Path:
        """Return the path of the record that lists the runs of a sweep; ``ConfigError`` if ``name`` is no sweep's."""
        if not _NAME_PATTERN.fullmatch(name):
            raise StorageError(f"{name!r} is no sweep's name: letters, digits, '.', '_' and '-' are, 64 at most")
        return self.path("sweeps", f"{name}.json")

    @property
    def submissions(self) -> Path:
        """One folder per submit."""
        return self.path("submissions")

    def path(self, *parts: str) -> Path:
        """A path below the root; ``StorageError`` where one of its parts is a link."""
        return join_without_links(self.root, *parts)

    def read_result(self, run_id: str) -> RunResult | None:
        """The result that counts, or ``None`` where there is none; ``msgspec.MsgspecError`` where it is broken.

        A link or a pipe in its place is broken, too. ``StorageError`` where the file system refuses.
        """
        path = f"{self._folder_to_read(run_id)}/result.json"
        try:
            data = read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnsafeFileError as error:
            raise BrokenFileError(f"{path}: {error.strerror}") from None
        except OSError as error:
            raise read_error(error, Path(path)) from error
        return decode_result(data, run_id)

    def _folder_to_read(self, run_id: str) -> str:
        """Return ``run_folder`` with one system call per run: trees hold hundreds of thousands."""
        prefix = run_id[:2]
        folder = f"{self.root}/runs/{prefix}/{run_id}"
        try:
            if not RUN_ID_PATTERN.fullmatch(run_id) or os.path.islink(folder):  # noqa: PTH114 - a tenth of Path's time
                self.run_folder(run_id)
            if prefix not in self._real_prefixes:
                self.path("runs", prefix)
                self._real_prefixes.add(prefix)
        except StorageError as error:
            raise BrokenFileError(error.message) from None
        # Absent, or not to be looked at: opening the file tells which.
        return folder

    def summaries(self, run_ids: Collection[str]) -> dict[str, ResultSummary]:
        """The heads of the results that there are among ``run_ids``; a broken file is a head with status ``broken``."""
        begun = self.existing_runs() if len(run_ids) > _MAX_SINGLE_LOOKUPS else run_ids
        heads = ((run_id, self.summary(run_id)) for run_id in run_ids if run_id in begun)
        return {run_id: head for run_id, head in heads if head is not None}

    def summary(self, run_id: str) -> ResultSummary | None:
        """The head of one run's result, or ``None`` where there is none."""
        try:
            result = self.read_result(run_id)
        except (msgspec.MsgspecError, StorageError) as unreadable:
            return ResultSummary(STATUS_BROKEN, message=str(unreadable).replace("\n ", ";"))
        if result is None:
            return None
        key, error = environment_key(result), result.error
        if error is None:
            return ResultSummary(result.status, result.attempt, "", key)
        lacks_software = result.status == "unsupported" and error.lacks_software
        return ResultSummary(result.status, result.attempt, error.message, key, lacks_software, error.nodes)

    def existing_runs(self) -> set[str]:
        """Return the ids of ``run_ids`` without order, from one listing for every 256th of the runs."""
        run_ids: set[str] = set()
        runs = self.root / "runs"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for prefix in os.listdir(runs):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    run_ids.update(filter(RUN_ID_PATTERN.fullmatch, os.listdir(f"{runs}/{prefix}")))
        return run_ids

    def archive_path(self, run_id: str, key: str) -> Path:
        """Return the path of a replaced result that was measured in the environment ``key``."""
        if not key or key in (".", "..") or "/" in key or "\0" in key:
            raise StorageError(f"{key!r} is no key of an environment: it cannot name a folder")
        return self.path("archive", key, run_id[:2], f"{self.run_folder(run_id).name}.json")

    def write_result(self, result: RunResult, supersedes: str | None = None) -> bool:
        """Put ``result`` in place unless an ok one is there; ``False`` where it was kept out.

        An ok result from the environment ``supersedes`` gives way to another ok one, and goes to the archive.
        After the rename the two-digit folder is touched, so that a reader sees where something changed.
        """
        path = self.path("runs", result.run_id[:2], self.run_folder(result.run_id).name, "result.json")
        make_folder(path.parent)
        with _write_lock(path):
            try:
                present = self.read_result(result.run_id)
            except msgspec.MsgspecError:
                present = None
            if present is not None and present.status == STATUS_OK:
                if result.status != STATUS_OK or supersedes is None or environment_key(present) != supersedes:
                    return False
                self._archive(present, supersedes)
            elif present is not None and present.attempt > result.attempt:
                return False
            self._put_in_place(result, path)
        return True

    def update_result(self, run_id: str, change: Callable[[RunResult], bool]) -> bool:
        """Have ``change`` alter the result of ``run_id`` and write it; ``False`` where ``change`` returns that.

        Other writers wait meanwhile. A run without a result that can be read is left alone.
        """
        path = self.result_path(run_id)
        with _write_lock(path):
            try:
                result = self.read_result(run_id)
            except msgspec.MsgspecError:
                result = None
            if result is None or not change(result):
                return False
            self._put_in_place(result, path)
        return True

    def _put_in_place(self, result: RunResult, path: Path) -> None:
        write_atomic(path, encode_indented_json(result_document(result)))
        with contextlib.suppress(OSError):
            os.utime(path.parent.parent)

    def _archive(self, present: RunResult, key: str) -> None:
        path = self.archive_path(present.run_id, key)
        if path.exists():
            path = path.with_name(f"{present.run_id}.{present.attempt}.json")
        make_folder(path.parent)
        try:
            self.result_path(present.run_id).rename(path)
        except OSError as error:
            raise write_error(error, path) from error

    def run_ids(self) -> Iterator[str]:
        """Every run that has a folder, or a link in its place: reading a link reports it."""
        for prefix in self._runs():
            if _is_real_folder(prefix):
                for entry in _sorted_entries(prefix.path):
                    if RUN_ID_PATTERN.fullmatch(entry.name) and (_is_real_folder(entry) or entry.is_symlink()):
                        yield entry.name

    def prefix_mtimes_ns(self) -> dict[str, int]:
        """Modification time (ns) of every real folder ``runs/<first two hex>``, by its name in ascending order."""
        mtimes_ns: dict[str, int] = {}
        for entry in self._runs():
            with contextlib.suppress(FileNotFoundError):
                if _is_real_folder(entry):
                    mtimes_ns[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        return mtimes_ns

    def links(self) -> list[Path]:
        """Links in place of the folders that hold runs: hpcbench itself makes none."""
        if (self.root / "runs").is_symlink():
            return [self.root / "runs"]
        return [Path(entry.path) for entry in self._runs() if entry.is_symlink()]

    def _runs(self) -> list[os.DirEntry[str]]:
        runs = self.root / "runs"
        return [] if runs.is_symlink() else _sorted_entries(runs)


def _sorted_entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """The entries of a folder by name; none where there is no folder. ``StorageError`` where it may not be read."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_error(error, Path(folder)) from error


def environment_key(result: RunResult) -> str | None:
    """Return the environment key that the submitter recorded for ``result``."""
    key = result.provenance.get("environment_key")
    return key if isinstance(key, str) else None


@contextlib.contextmanager
def _write_lock(path: Path) -> Iterator[None]:
    """Read-decide-write of one result is short: a marker that stays for ``_STALE_LOCK_S`` is a dead writer's."""
    marker = path.with_name(".result.lock")
    seen: tuple[int, float] | None = None
    while True:
        try:
            os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            break
        except FileExistsError:
            seen = _remove_stale_lock(marker, seen)
            time.sleep(0.02)
        except OSError as error:
            raise write_error(error, marker) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()


def _remove_stale_lock(marker: Path, seen: tuple[int, float] | None) -> tuple[int, float] | None:
    """Remove ``marker`` once the very same file has been watched for ``_STALE_LOCK_S`` by this process's own clock."""
    try:
        inode = marker.lstat().st_ino
    except OSError:
        return None
    if seen is None or seen[0] != inode:
        return inode, time.monotonic()
    if time.monotonic() - seen[1] > _STALE_LOCK_S:
        try:
            marker.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(error, marker) from error
        return None
    return seen


class ResultsTree:
    """``results/``: one ``ClusterTree`` per cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def cluster(self, name: str) -> ClusterTree:
        """The tree of one cluster; it need not exist yet."""
        if not _NAME_PATTERN.fullmatch(name):
            raise ConfigError(f"{name!r} is no cluster's name: letters, digits, '.', '_' and '-' are, 64 at most")
        return ClusterTree(join_without_links(self.root, name))

    def clusters(self) -> list[str]:
        """Names of the clusters that have something here."""
        entries = _sorted_entries(self.root)
        return [entry.name for entry in entries if _NAME_PATTERN.fullmatch(entry.name) and _is_real_folder(entry)]


def _is_real_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


@dataclass(frozen=True)
class CollectedResult:
    """A result, or why there is none."""

    cluster: str
    run_id: str
    result: RunResult | None
    problem: str = ""


def collect_results(tree: ClusterTree, run_ids: Iterable[str] | None = None) -> Iterator[CollectedResult]:
    """The results of ``run_ids``, or of every run in the tree; runs without a result are passed over.

    A result that cannot be read, and a link where a run should be, are entries with the reason.
    """
    if run_ids is None:
        yield from collect_links(tree)
    for run_id in tree.run_ids() if run_ids is None else run_ids:
        try:
            result, problem = tree.read_result(run_id), ""
        except msgspec.MsgspecError as error:
            result, problem = None, f"result.json is broken: {error}"
        except StorageError as error:
            result, problem = None, str(error).replace("\n ", ";")
        if result is not None or problem:
            yield CollectedResult(tree.root.name, run_id, result, problem)


def collect_links(tree: ClusterTree) -> Iterator[CollectedResult]:
    """An entry for every link in place of the folders that hold runs."""
    for link in tree.links():
        name = link.relative_to(tree.root).as_posix()
        yield CollectedResult(tree.root.name, name, None, f"{link} is a link: none is followed inside a results tree")
