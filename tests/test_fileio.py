from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcbench.errors import StorageError
from hpcbench.fileio import (
    TEMPORARY_REFUSALS,
    escape_control_characters,
    make_folder,
    printable_excerpt,
    printable_text,
    read_tail,
    shared_umask,
    write_atomic,
    write_error,
    write_exclusive,
    write_patiently,
)


def test_write_atomic_replaces_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]


def test_write_atomic_names_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "file"
    with pytest.raises(StorageError, match=r"cannot write .*absent/file") as caught:
        write_atomic(path, b"data")
    assert f"the folder {tmp_path}/absent does not exist" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_create_exclusive_has_one_winner_whose_content_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "marker"
    wins: list[int] = []

    def claim(number: int) -> None:
        if write_exclusive(path, str(number).encode() * 1000):
            wins.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert path.read_bytes() == str(wins[0]).encode() * 1000
    assert os.listdir(tmp_path) == ["marker"]


def test_create_exclusive_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert write_exclusive(tmp_path / "marker", b"first")
    assert not write_exclusive(tmp_path / "marker", b"second")
    assert (tmp_path / "marker").read_bytes() == b"first"


def test_printable_replaces_terminal_codes() -> None:
    assert printable_text("a\x1b[31mred\u202e\n\tb") == "a\ufffd[31mred\ufffd\n\tb"


@pytest.mark.parametrize(
    "mark",
    ["\x00", "\x07", "\r", "\x7f", "\x9b", "\u061c", "\u200f", "\u2028", "\u2067", "\ufeff", "\udcff", "\U000e0041"],
)
def test_marks_that_hide_or_break_text_are_shown_as_such(mark: str) -> None:
    assert printable_text(f"a{mark}b") == "a\ufffdb"
    document = json.dumps({"text": f"a{mark}b"}, ensure_ascii=False)
    escaped = escape_control_characters(document)
    assert (escaped.isascii(), json.loads(escaped)) == (True, {"text": f"a{mark}b"})


def test_long_text_is_cut_for_printing() -> None:
    assert printable_excerpt("short\x1b") == "short\ufffd"
    assert printable_excerpt("x" * 2003) == "x" * 2000 + " ... (3 more characters)"


def test_a_failed_write_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        write_atomic(tmp_path / "file" / "x", b"")
    with pytest.raises(StorageError, match="Not a directory"):
        write_exclusive(tmp_path / "file" / "x", b"")


def test_tail_reads_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100 + b"end\x1b[0m")
    assert read_tail(path, 7) == "end\ufffd[0m"
    assert read_tail(tmp_path / "absent") == ""


@pytest.fixture
def closed_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("closed_umask")
@pytest.mark.parametrize(
    ("folder_mode", "file_mode"), [(0o2775, 0o640), (0o2770, 0o640), (0o2755, 0o600), (0o775, 0o600)]
)
def test_the_group_reads_every_file_of_a_folder_that_it_shares(
    folder_mode: int, file_mode: int, tmp_path: Path
) -> None:
    tmp_path.chmod(folder_mode)
    write_atomic(tmp_path / "replaced", b"1")
    write_atomic(tmp_path / "replaced", b"2")
    write_exclusive(tmp_path / "exclusive", b"3")
    make_folder(tmp_path / "a" / "b")
    write_atomic(tmp_path / "a" / "b" / "deep", b"4")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {file_mode}
    assert shared_umask(tmp_path) == (0o027 if file_mode == 0o640 else 0o077)


class Refusals:
    """A write that the file system refuses so many times."""

    def __init__(self, code: int, times: int) -> None:
        self.code, self.left = code, times

    def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise write_error(OSError(self.code, os.strerror(self.code)), Path("/results/result.json"))
        return "written"


@pytest.mark.parametrize("code", sorted(TEMPORARY_REFUSALS))
def test_a_write_waits_for_a_file_system_that_may_recover(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("hpcbench.fileio.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("hpcbench.fileio.time.sleep", lambda seconds: now_s.append(now_s.pop() + seconds))
    assert write_patiently(Refusals(code, 55), 60.0) == "written"
    assert now_s[0] >= 55
    with pytest.raises(StorageError, match=rf"{os.strerror(code)}, for 60 s"):
        write_patiently(Refusals(code, 10**6), 60.0)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT, errno.ENOTDIR])
def test_a_write_that_will_never_succeed_is_not_repeated(code: int) -> None:
    refusals = Refusals(code, 10)
    with pytest.raises(StorageError):
        write_patiently(refusals, 60.0)
    assert refusals.left == 9
