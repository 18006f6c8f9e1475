from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpcbench.errors import StorageError
from hpcbench.fileio import create_exclusive, printable, tail, write_atomic


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
    assert "belongs to uid" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_create_exclusive_has_one_winner_whose_content_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "marker"
    wins: list[int] = []

    def claim(number: int) -> None:
        if create_exclusive(path, str(number).encode() * 1000):
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
    assert create_exclusive(tmp_path / "marker", b"first")
    assert not create_exclusive(tmp_path / "marker", b"second")
    assert (tmp_path / "marker").read_bytes() == b"first"


def test_printable_takes_the_sting_out_of_terminal_codes() -> None:
    assert printable("a\x1b[31mred\u202e\n\tb") == "a\ufffd[31mred\ufffd\n\tb"


def test_tail_reads_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100 + b"end\x1b[0m")
    assert tail(path, 7) == "end\ufffd[0m"
    assert tail(tmp_path / "absent") == ""
