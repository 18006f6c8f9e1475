"""The tree ``results/<cluster>/``: where a run's files lie, and the rule which attempt counts."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from hpcbench.errors import StorageError
from hpcbench.fileio import make_folder, storage_error, write_atomic
from hpcbench.results.schema import BROKEN, OK, Failure, ResultHead, RunResult, result_json

_RUN_ID = re.compile(r"[0-9a-f]{16}")
_decoder = msgspec.json.Decoder(RunResult)
_head_decoder = msgspec.json.Decoder(ResultHead)
_FEW_RUNS = 100
"""So many are looked up one by one, whatever else is in the tree."""


class ClusterTree:
    """Paths and files below ``results/<cluster>``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run_folder(self, run_id: str) -> Path:
        """``runs/<first two hex>/<run_id>``; ids that are not 16 hex digits never become a path."""
        if not _RUN_ID.fullmatch(run_id):
            raise StorageError(f"{run_id!r} is no run_id: 16 hexadecimal digits are")
        return Path(self.root, "runs", run_id[:2], run_id)

    def result_path(self, run_id: str) -> Path:
        """The result that counts."""
        return Path(self.run_folder(run_id), "result.json")

    def sweep_path(self, name: str) -> Path:
        """Which runs a sweep means."""
        return self.root / "sweeps" / f"{name}.json"

    @property
    def submissions(self) -> Path:
        """One folder per submit."""
        return self.root / "submissions"

    def read_result(self, run_id: str) -> RunResult | None:
        """The result that counts, or ``None`` where there is none; ``msgspec.MsgspecError`` where it is broken."""
        try:
            data = self.result_path(run_id).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"cannot read {self.result_path(run_id)}: {error.strerror}") from error
        return _decoder.decode(data)

    def heads(self, run_ids: Collection[str]) -> dict[str, ResultHead]:
        """The heads of the results that there are among ``run_ids``; a broken file is a head with status ``broken``."""
        begun = self.existing_runs() if len(run_ids) > _FEW_RUNS else run_ids
        found: dict[str, ResultHead] = {}
        for run_id in run_ids:
            if run_id in begun:
                head = self._read_head(run_id)
                if head is not None:
                    found[run_id] = head
        return found

    def _read_head(self, run_id: str) -> ResultHead | None:
        path = self.result_path(run_id)
        try:
            return _head_decoder.decode(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            return ResultHead(status=BROKEN, error=Failure(type="BrokenResult", message=str(error)))

    def existing_runs(self) -> set[str]:
        """As ``run_ids``, in no order and from names alone: one listing for every 256th of the runs."""
        found: set[str] = set()
        for number in range(256):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.update(filter(_RUN_ID.fullmatch, os.listdir(self.root / "runs" / f"{number:02x}")))
        return found

    def archive_path(self, run_id: str, key: str) -> Path:
        """Where the result that was measured in the environment ``key`` lies once a newer one stands in its place."""
        if not key or key in (".", "..") or "/" in key or "\0" in key:
            raise StorageError(f"{key!r} is no key of an environment: it cannot name a folder")
        return (
            self.root / "archive" / key / self.run_folder(run_id).relative_to(self.root / "runs").with_suffix(".json")
        )

    def write_result(self, result: RunResult, supersedes: str | None = None) -> bool:
        """Put ``result`` in place unless an ok one is there; ``False`` where it was kept out.

        An ok result from the environment ``supersedes`` gives way to another ok one, and goes to the archive.
        After the rename the two-digit folder is touched, so that a reader sees where something changed.
        """
        path = self.result_path(result.run_id)
        make_folder(path.parent)
        with _only_writer(path):
            try:
                present = self.read_result(result.run_id)
            except msgspec.MsgspecError:
                present = None
            if present is not None and present.status == OK:
                if result.status != OK or supersedes is None or environment_key(present) != supersedes:
                    return False
                self._archive(present, supersedes)
            elif present is not None and present.attempt > result.attempt:
                return False
            write_atomic(path, msgspec.json.format(msgspec.json.encode(result_json(result)), indent=1) + b"\n")
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
            raise storage_error(error, path) from error

    def run_ids(self) -> Iterator[str]:
        """Every run that has a folder."""
        runs = self.root / "runs"
        if not runs.is_dir():
            return
        for prefix in sorted(os.scandir(runs), key=lambda entry: entry.name):
            if prefix.is_dir(follow_symlinks=False):
                for entry in sorted(os.scandir(prefix.path), key=lambda entry: entry.name):
                    if _RUN_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        yield entry.name


def environment_key(result: RunResult) -> str | None:
    """What the submitter knew of the software that ``result`` was measured with."""
    key = result.provenance.get("environment_key")
    return key if isinstance(key, str) else None


@contextlib.contextmanager
def _only_writer(path: Path, wait_s: float = 10.0) -> Iterator[None]:
    """Read-decide-write of one result is short: a marker that stays for ``wait_s`` belongs to a writer that died."""
    marker = path.with_name(".result.lock")
    seen: tuple[int, float] | None = None
    while True:
        try:
            os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            break
        except FileExistsError:
            seen = _forget_stale(marker, seen, wait_s)
            time.sleep(0.02)
        except OSError as error:
            raise storage_error(error, marker) from error
    try:
        yield
    finally:
        marker.unlink(missing_ok=True)


def _forget_stale(marker: Path, seen: tuple[int, float] | None, wait_s: float) -> tuple[int, float] | None:
    """Remove ``marker`` once the very same file has been watched for ``wait_s`` by this process's own clock."""
    try:
        inode = marker.stat().st_ino
    except OSError:
        return None
    if seen is None or seen[0] != inode:
        return inode, time.monotonic()
    if time.monotonic() - seen[1] > wait_s:
        marker.unlink(missing_ok=True)
        return None
    return seen


class ResultsTree:
    """``results/``: one ``ClusterTree`` per cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def cluster(self, name: str) -> ClusterTree:
        """The tree of one cluster; it need not exist yet."""
        return ClusterTree(self.root / name)

    def clusters(self) -> list[str]:
        """Names of the clusters that have something here."""
        if not self.root.is_dir():
            return []
        return sorted(
            entry.name
            for entry in os.scandir(self.root)
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        )
