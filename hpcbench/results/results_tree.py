"""The tree ``results/<cluster>/``: paths, the rule that decides which attempt counts, and the reading of results.
Several people may write into one tree, so no link below its root is followed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
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
from hpcbench.paths import is_folder, is_visible
from hpcbench.results.decode import BrokenFileError, date_of, decode_result
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK, ResultSummary, RunResult, result_document

RUN_ID_PATTERN = re.compile(r"[0-9a-f]{16}")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CLUSTER_CONTENT = ("runs", "sweeps", "submissions", "archive", "calibrations")
_STALE_LOCK_S = 10.0
_MAX_SINGLE_LOOKUPS = 100
"""So many are looked up one by one, whatever else is in the tree."""


class ClusterTree:
    """The results of one cluster: paths and files below ``results/<cluster>``.

    Several processes and hosts may read and write it at once. A result is replaced by a rename, under a lock; a link
    in place of a file or a folder is never followed. The folder need not exist before the first write::

        <root>/runs/<first two hex>/<run_id>/result.json        the result that counts
                                            /attempts/<n>/      see ``Attempt``
              /sweeps/<name>.json                               the runs of a sweep
              /submissions/<folder>/                            one folder per submit
              /archive/<environment key>/<first two hex>/<run_id>.json   replaced results

    Example::

        tree = ResultsTree(Path("results")).cluster("abci-v100")
        result = tree.read_result("0123456789abcdef")  # None: the run has no result
    """

    def __init__(self, root: Path) -> None:
        """``root`` is the folder of the cluster. Nothing is read yet."""
        self.root = root
        self._real_prefixes: set[str] = set()

    def run_folder(self, run_id: str) -> Path:
        """Return the folder of a run, ``runs/<first two hex>/<run_id>``; it need not exist.

        Raises:
            StorageError: ``run_id`` is not 16 hexadecimal digits, or a part of the path is a link.
        """
        if not RUN_ID_PATTERN.fullmatch(run_id):
            raise StorageError(f"{run_id!r} is not a run_id, which has 16 hexadecimal digits")
        return self.path("runs", run_id[:2], run_id)

    def result_path(self, run_id: str) -> Path:
        """Return the path of the result of a run that counts; raises as ``run_folder``."""
        return Path(self.run_folder(run_id), "result.json")

    def sweep_path(self, name: str) -> Path:
        """Return the path of the record that lists the runs of a sweep; ``StorageError`` if ``name`` is not valid."""
        if not _NAME_PATTERN.fullmatch(name):
            raise StorageError(f"{name!r} is not a name of a sweep: use letters, digits, '.', '_' and '-', 64 at most")
        return self.path("sweeps", f"{name}.json")

    @property
    def submissions(self) -> Path:
        """The folder with one folder per submit; ``StorageError`` if it is a link."""
        return self.path("submissions")

    def path(self, *parts: str) -> Path:
        """Return the path of ``parts`` below the root; ``StorageError`` if one of them is a link."""
        return join_without_links(self.root, *parts)

    def read_result(self, run_id: str) -> RunResult | None:
        """Return the result of a run that counts; ``None`` if it has none.

        Raises:
            msgspec.MsgspecError: the file is no result, or a link or a pipe is in its place (``BrokenFileError``).
            StorageError: the file system refuses to read it.
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
        """Return the summaries of the results among ``run_ids``, by ``run_id``; runs without a result are left out.

        A file that is no result has the status ``broken``. Raises ``StorageError`` if one cannot be read.
        """
        begun = self.existing_runs() if len(run_ids) > _MAX_SINGLE_LOOKUPS else run_ids
        heads = ((run_id, self.summary(run_id)) for run_id in run_ids if run_id in begun)
        return {run_id: head for run_id, head in heads if head is not None}

    def summary(self, run_id: str) -> ResultSummary | None:
        """Return the summary of a run's result, with status ``broken`` if the file is none; ``None`` without one.

        Raises:
            StorageError: the file system refuses to read it.
        """
        try:
            result = self.read_result(run_id)
        except msgspec.MsgspecError as broken:
            return ResultSummary(STATUS_BROKEN, message=str(broken).replace("\n ", ";"))
        if result is None:
            return None
        key, error, ended_at_s = environment_key(result), result.error, date_of(result)
        if error is None:
            return ResultSummary(result.status, result.attempt, "", key, ended_at_s=ended_at_s)
        lacks_software = result.status == "unsupported" and error.lacks_software
        return ResultSummary(result.status, result.attempt, error.message, key, lacks_software, error.nodes, ended_at_s)

    def existing_runs(self) -> set[str]:
        """Return the ids of ``run_ids`` without order, from one listing for every 256th of the runs.

        Raises:
            StorageError: a folder may not be read.
        """
        runs = self.root / "runs"
        names = (name for prefix in _list_names(runs) for name in _list_names(runs / prefix))
        return {name for name in names if RUN_ID_PATTERN.fullmatch(name)}

    def archive_path(self, run_id: str, key: str) -> Path:
        """Return the path of a replaced result that was measured in the environment ``key``.

        Raises:
            StorageError: ``key`` cannot be the name of a folder, or ``run_id`` is not 16 hexadecimal digits.
        """
        if not key or key in (".", "..") or "/" in key or "\0" in key:
            raise StorageError(f"{key!r} is not a key of an environment: it cannot name a folder")
        return self.path("archive", key, run_id[:2], f"{self.run_folder(run_id).name}.json")

    def write_result(self, result: RunResult, supersedes: str | None = None) -> bool:
        """Write ``result`` as the one that counts, unless the tree has a better one; return whether it was written.

        A result with status ``ok`` stays, and so does one of a later attempt. After the rename the two-digit folder
        is touched, so that a reader sees where something changed.

        Args:
            result: the result of an attempt that has ended.
            supersedes: environment key of an ``ok`` result that another ``ok`` result replaces; the replaced one is
                moved to ``archive_path``.

        Raises:
            StorageError: the file system refuses, or a part of the path is a link.
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
            write_atomic(path, encode_indented_json(result_document(result)))
            with contextlib.suppress(OSError):
                os.utime(path.parent.parent)
        return True

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
        """Yield the id of every run that has a folder, ascending, or a link in its place: reading a link reports it.

        Raises:
            StorageError: a folder may not be read.
        """
        for prefix in self._runs():
            if _is_real_folder(prefix):
                for entry in _sorted_entries(prefix.path):
                    if RUN_ID_PATTERN.fullmatch(entry.name) and (_is_real_folder(entry) or entry.is_symlink()):
                        yield entry.name

    def prefix_mtimes_ns(self) -> dict[str, int]:
        """Return the modification time (ns) of every real folder ``runs/<first two hex>``, by its name, ascending.

        Raises:
            StorageError: ``runs`` may not be read.
        """
        mtimes_ns: dict[str, int] = {}
        for entry in self._runs():
            with contextlib.suppress(FileNotFoundError):
                if _is_real_folder(entry):
                    mtimes_ns[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        return mtimes_ns

    def links(self) -> list[Path]:
        """Return the links in place of the folders that hold runs: hpcbench itself makes none."""
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


def _list_names(folder: Path) -> list[str]:
    """The names in a folder; none where there is no folder. ``StorageError`` where it may not be read."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_error(error, folder) from error


def environment_key(result: RunResult) -> str | None:
    """Return the environment key that the submitter recorded for ``result``; ``None`` if it recorded none."""
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
        """Return the tree of one cluster; it need not exist yet.

        Raises:
            ConfigError: ``name`` is no valid name of a cluster.
            StorageError: the cluster's folder is a link.
        """
        if not _NAME_PATTERN.fullmatch(name):
            raise ConfigError(f"{name!r} is not a name of a cluster: use letters, digits, '.', '_' and '-', 64 at most")
        return ClusterTree(join_without_links(self.root, name))

    def clusters(self) -> list[str]:
        """Return the names of the clusters that have a folder here, ascending.

        Raises:
            StorageError: it is unreadable.
            ConfigError: it is no results tree, but a file, or a folder with other content.
        """
        entries = _sorted_entries(self.root)
        names = [entry.name for entry in entries if _NAME_PATTERN.fullmatch(entry.name) and _is_real_folder(entry)]
        hint = "name a results tree, a folder with CLUSTER/runs: --results, HPCBENCH_RESULTS"
        if "runs" in names:
            raise ConfigError(
                f"{self.root} is the folder of one cluster", hint=f"name the results tree {self.root.parent}"
            )
        if is_visible(self.root) and not is_folder(self.root):
            raise ConfigError(f"{self.root} is a file, no results tree", hint=hint)
        seen = [entry.name for entry in entries if not entry.name.startswith(".")]
        if seen and not any(is_visible(self.root / name / part) for name in names for part in _CLUSTER_CONTENT):
            message = f"{self.root} is no results tree: it has {seen[0]!r:.80}, and no CLUSTER/runs"
            raise ConfigError(message, hint=hint)
        return names


def _is_real_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


@dataclass(frozen=True)
class CollectedResult:
    """A result, or in ``problem`` the reason why there is none."""

    cluster: str
    run_id: str
    result: RunResult | None
    problem: str = ""


def collect_results(tree: ClusterTree, run_ids: Iterable[str] | None = None) -> Iterator[CollectedResult]:
    """Yield the results of ``run_ids``, or of every run in the tree; runs without a result are left out.

    A result that cannot be read, and a link in place of a run, are entries with the reason in ``problem``.

    Raises:
        StorageError: without ``run_ids``, if a folder of the tree may not be read.
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
    """Yield an entry with the reason for every link in place of the folders that hold runs."""
    for link in tree.links():
        name = link.relative_to(tree.root).as_posix()
        yield CollectedResult(tree.root.name, name, None, f"{link} is a link: none is followed inside a results tree")
