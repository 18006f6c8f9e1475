"""The results of one tree, read folder by folder into frames: all of ``runs/<first two hex>``, or what is new there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hpcbench.fileio import UnsafeFileError, read_with_state, reading_error
from hpcbench.results.collect import Collected
from hpcbench.results.columns import broken_rows, frame_of
from hpcbench.results.decode import decode_bulk, decode_result
from hpcbench.results.store import RUN_ID, ClusterTree

if TYPE_CHECKING:
    import polars

    from hpcbench.results.schema import RunResult

_CHUNK = 2000
"""Results that are in memory as records at a time."""
NO_FILE = (0, 0)


class State(NamedTuple):
    """What tells a file from the one that was there before."""

    mtime_ns: int
    size_bytes: int


def folders(tree: ClusterTree) -> dict[str, int]:
    """Modification time (ns) of every real folder ``runs/<first two hex>``, by its name."""
    runs = tree.root / "runs"
    found: dict[str, int] = {}
    if runs.is_symlink():
        return found
    try:
        with os.scandir(runs) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return found
    except OSError as error:
        raise reading_error(error, runs) from error
    return dict(sorted(found.items()))


def state_of(path: Path | str) -> State | None:
    """The state of what lies at ``path``, a link included; ``None`` where there is nothing."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return State(found.st_mtime_ns, found.st_size)


@dataclass
class Reading:
    """What a reading of some folders found: results that are new or changed, and what else is there."""

    chunks: list[polars.DataFrame] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    """Runs whose result is as it is known."""
    unfinished: list[str] = field(default_factory=list)
    """Runs that have a folder and no result."""
    read: int = 0


class FolderReader:
    """Reads results of ``tree`` into chunks of a frame."""

    def __init__(self, tree: ClusterTree) -> None:
        self._tree = tree
        self._whole: list[tuple[RunResult, tuple[int, int]]] = []
        self._broken: list[tuple[Collected, tuple[int, int]]] = []
        self._found = Reading()

    def read(self, names: Iterable[str], known: Mapping[str, tuple[int, int]]) -> Reading:
        """All of the folders ``names``, without results that are still in the state ``known``.

        A file that is no result, and a link in place of a run, are rows with the reason. Raises ``StorageError``
        where a folder may not be read.
        """
        for name in names:
            folder = f"{self._tree.root}/runs/{name}"
            for run_id, is_link in self._changed(folder, known):
                if not (RUN_ID.fullmatch(run_id) and run_id.startswith(name)):
                    continue
                if is_link:
                    self._note(run_id, f"{folder}/{run_id} is a link: none is followed inside a results tree")
                else:
                    self._read(f"{folder}/{run_id}/result.json", run_id)
            if len(self._whole) >= _CHUNK:
                self._close_chunk()
        self._close_chunk()
        return self._found

    def _changed(self, folder: str, known: Mapping[str, tuple[int, int]]) -> list[tuple[str, bool]]:
        """What lies in ``folder`` and is not in the state ``known``, in order: its name, and whether it is a link."""
        changed = []
        kept = self._found.kept
        lstat = os.lstat
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    run_id, is_link = entry.name, entry.is_symlink()
                    if run_id in known and not is_link:
                        # In a large tree most of what is looked at takes this way.
                        with contextlib.suppress(OSError):
                            found = lstat(f"{folder}/{run_id}/result.json")
                            if (found.st_mtime_ns, found.st_size) == known[run_id]:
                                kept.add(run_id)
                                continue
                    changed.append((run_id, is_link))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise reading_error(error, Path(folder)) from error
        return sorted(changed)

    def _read(self, path: str, run_id: str) -> None:
        try:
            data, state = read_with_state(path)
        except (FileNotFoundError, NotADirectoryError):
            self._found.unfinished.append(run_id)
            return
        except UnsafeFileError as error:
            self._note(run_id, f"result.json is broken: {error.strerror}", state_of(path))
            return
        except OSError as error:
            failure = reading_error(error, Path(path))
            self._note(
                run_id, f"{failure.message}; {failure.hint}" if failure.hint else failure.message, state_of(path)
            )
            return
        seen = (state.st_mtime_ns, state.st_size)
        try:
            self._whole.append((decode_bulk(data, run_id), seen))
        except msgspec.MsgspecError as error:
            self._note(run_id, f"result.json is broken: {error}", seen)
        self._found.read += 1

    def _note(self, run_id: str, problem: str, state: tuple[int, int] | None = None) -> None:
        self._broken.append((Collected(self._tree.root.name, run_id, None, problem), state or NO_FILE))

    def _close_chunk(self) -> None:
        if self._whole:
            try:
                self._found.chunks.append(self._frame())
            except (TypeError, OverflowError):
                self._whole = [pair for pair in self._whole if self._fits(pair)]
                self._found.chunks.append(self._frame())
        if self._broken:
            self._found.chunks.append(broken_rows(*map(list, zip(*self._broken, strict=True))))
        self._whole, self._broken = [], []

    def _frame(self) -> polars.DataFrame:
        import polars

        frame = frame_of([result for result, _ in self._whole], [state for _, state in self._whole])
        # A result lies in the tree of the cluster that it is shown under, whatever it says.
        return frame.with_columns(cluster=polars.lit(self._tree.root.name, dtype=polars.String))

    def _fits(self, pair: tuple[RunResult, tuple[int, int]]) -> bool:
        """Whether every integer of a result fits into a column; it is noted where one does not."""
        result, state = pair
        try:
            decode_result(msgspec.json.encode(result), result.run_id)
            frame_of([result])
        except (msgspec.MsgspecError, TypeError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            self._note(result.run_id, f"result.json is broken: {reason}", state)
            return False
        return True
