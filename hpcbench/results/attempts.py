"""Attempts, each of which is one execution of a run. A start marker that only one process can create numbers them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.fileio import (
    join_without_links,
    make_folder,
    read_regular,
    share_with_group,
    write_atomic,
    write_error,
    write_exclusive,
)
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
    restart_count: int = 0
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
    """One folder ``attempts/<n>`` of a run; ``StorageError`` where a link lies in its place."""

    def __init__(self, run_folder: Path, number: int) -> None:
        self.number = number
        self.folder = join_without_links(run_folder, "attempts", str(number))

    @property
    def rendezvous_path(self) -> Path:
        """Return the path of the file with rank 0's address."""
        return self.folder / "rendezvous.json"

    def read_start(self) -> AttemptStart | None:
        """Return the start marker of this attempt; ``None`` if it is absent or broken."""
        return read_record(self.folder / "attempt.json", AttemptStart)

    def write_rank(self, result: RankResult) -> None:
        """Leave what one rank measured."""
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
    """The attempts that a run has, ascending; none where ``attempts`` is a link."""
    folder = run_folder / "attempts"
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return []
        entries = [entry for entry in os.scandir(folder) if _ATTEMPT_NUMBER_PATTERN.fullmatch(entry.name)]
        return sorted(int(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def latest_attempt(run_folder: Path) -> Attempt | None:
    """The newest attempt, if there is one."""
    numbers = attempt_numbers(run_folder)
    return Attempt(run_folder, numbers[-1]) if numbers else None


def latest_start(run_folder: Path) -> tuple[Attempt, AttemptStart] | None:
    """The newest attempt and its start marker; ``None`` where one of them is absent."""
    attempt = latest_attempt(run_folder)
    marker = attempt.read_start() if attempt else None
    return (attempt, marker) if attempt and marker else None


def begin_attempt(run_folder: Path, **start: Any) -> Attempt:
    """Claim the next number and leave its start marker (``AttemptStart`` without ``attempt``)."""
    number = 0
    while True:
        # What lies there and is no attempt has its number all the same.
        number = max([number, *attempt_numbers(run_folder)]) + 1
        attempt = Attempt(run_folder, number)
        make_folder(attempt.folder.parent)
        try:
            attempt.folder.mkdir()
            share_with_group(attempt.folder)
        except FileExistsError:
            continue
        except OSError as error:
            raise write_error(error, attempt.folder) from error
        marker = AttemptStart(attempt=number, **start)
        if write_exclusive(attempt.folder / "attempt.json", msgspec.json.encode(marker) + b"\n"):
            return attempt
