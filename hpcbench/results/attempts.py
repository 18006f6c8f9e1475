"""Attempts, each of which is one execution of a run. A start marker that only one process can create numbers them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.fileio import (
    join_without_links,
    make_folder,
    make_shared_folder,
    read_error,
    read_regular,
    write_atomic,
    write_error,
)
from hpcbench.identity import ProcessId
from hpcbench.results.decode import decode_record, read_record
from hpcbench.results.schema import RankResult

_RANK_FILE_PATTERN = re.compile(r"rank-([0-9]{1,9})\.json")
_ATTEMPT_NUMBER_PATTERN = re.compile(r"[1-9][0-9]{0,17}")


class AttemptStart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``attempt.json``: who began when. ``launch`` distinguishes two starts of the same job."""

    attempt: int
    launch: str
    host: str
    started_unix_s: float
    job_id: str | None = None
    job_cluster: str | None = None
    """The scheduler's name of the cluster that the job runs on."""
    restart_count: int = 0
    process: ProcessId | None = None
    """The job's script, where no scheduler can be asked for the job."""
    deadline_unix_s: float | None = None
    oom_kills: int | None = None
    """The memory cgroup's count when the attempt began."""
    task_file: str | None = None
    index: int | None = None
    tree: str | None = None

    def belongs_to(self, submission: str) -> bool:
        """Whether a job of that submission began the attempt."""
        return self.task_file is not None and Path(self.task_file).parent.name == submission


class Attempt:
    """One execution of a run: the folder ``attempts/<n>`` with its files.

    ``attempt.json`` is the start marker, ``rendezvous.json`` the address of rank 0, ``rank-<r>.json`` the record of
    each rank, ``out.log`` and ``err.log`` the output of the ranks. ``begin_attempt`` makes a new one; the constructor
    reads and writes nothing.

    Example::

        attempt = Attempt(tree.run_folder(run_id), 1)
        ranks = attempt.read_ranks()  # RankResult by rank
    """

    def __init__(self, run_folder: Path, number: int) -> None:
        """Set the place of the attempt.

        Args:
            run_folder: the run's folder (``ClusterTree.run_folder``).
            number: the attempt's number, from 1.

        Raises:
            StorageError: ``attempts`` or the folder in it is a link.
        """
        self.number = number
        self.folder = join_without_links(run_folder, "attempts", str(number))

    @property
    def rendezvous_path(self) -> Path:
        """Return the path of the file with rank 0's address."""
        return self.folder / "rendezvous.json"

    def read_start(self) -> AttemptStart | None:
        """Return the start marker of this attempt; ``None`` if it is absent or broken.

        Raises:
            StorageError: it may not be read.
        """
        return read_record(self.folder / "attempt.json", AttemptStart)

    def write_rank(self, result: RankResult) -> None:
        """Write the file of one rank, ``rank-<r>.json``; ``StorageError`` if the file system refuses."""
        write_atomic(self.folder / f"rank-{result.rank}.json", msgspec.json.encode(result) + b"\n")

    def read_ranks(self) -> dict[int, RankResult]:
        """Return the rank files written so far, by rank, without broken ones."""
        results: dict[int, RankResult] = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                match = _RANK_FILE_PATTERN.fullmatch(entry.name)
                if match:
                    with contextlib.suppress(OSError, msgspec.MsgspecError):
                        result = decode_record(read_regular(Path(entry.path)), RankResult)
                        if result.rank == int(match[1]):
                            results[result.rank] = result
        return results


def attempt_numbers(run_folder: Path) -> list[int]:
    """Return the numbers of a run's attempts, ascending; empty if ``attempts`` is absent or a link.

    Raises ``StorageError`` if the folder may not be read.
    """
    folder = run_folder / "attempts"
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return []
        entries = [entry for entry in os.scandir(folder) if _ATTEMPT_NUMBER_PATTERN.fullmatch(entry.name)]
        return sorted(int(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_error(error, folder) from error


def latest_attempt(run_folder: Path) -> Attempt | None:
    """Return the newest attempt; ``None`` if there is none. ``StorageError`` if its folder was replaced by a link."""
    numbers = attempt_numbers(run_folder)
    return Attempt(run_folder, numbers[-1]) if numbers else None


def latest_start(run_folder: Path) -> tuple[Attempt, AttemptStart] | None:
    """Return the newest attempt and its start marker; ``None`` if there is no attempt or its marker is broken."""
    attempt = latest_attempt(run_folder)
    marker = attempt.read_start() if attempt else None
    return (attempt, marker) if attempt and marker else None


def begin_attempt(run_folder: Path, look: Callable[[Attempt], None] = lambda _: None, **start: Any) -> Attempt:
    """Begin the next attempt of a run: its folder appears at once, with the start marker in it.

    Several processes may call it at once: each number goes to one of them, and the others look at the attempt that was
    faster before they try the next number.

    Args:
        run_folder: the run's folder (``ClusterTree.run_folder``); it need not exist.
        look: called once with each attempt that there is, the newest first; an exception of it ends the call.
        start: the fields of ``AttemptStart`` except ``attempt``; times in seconds since 1970.

    Raises:
        StorageError: the file system refuses, or a part of the path is a link.

    Example::

        attempt = begin_attempt(folder, launch="4711.0", host="node01", started_unix_s=time.time(), job_id="4711")
    """
    seen: set[int] = set()
    while True:
        for number in sorted({*attempt_numbers(run_folder)} - seen, reverse=True):
            seen.add(number)
            look(Attempt(run_folder, number))
        attempt = Attempt(run_folder, max(seen, default=0) + 1)
        make_folder(attempt.folder.parent)
        marker = AttemptStart(attempt=attempt.number, **start)
        if _claim_folder(attempt.folder, msgspec.json.encode(marker) + b"\n"):
            return attempt
        # A cached listing may not show the other attempt yet. A file that is no attempt also occupies the number.
        seen.add(attempt.number)
        look(attempt)


def _claim_folder(folder: Path, marker: bytes) -> bool:
    """Make ``folder`` with its start marker by one rename; ``False`` if something is there already.

    The system renames a folder onto an empty one at most, and no attempt is empty: of several processes one succeeds.
    """
    temporary = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}.tmp")
    try:
        make_shared_folder(temporary)
        write_atomic(temporary / "attempt.json", marker)
        try:
            temporary.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            return False
    except OSError as error:
        raise write_error(error, folder) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True
