from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from hpcbench.errors import StorageError
from hpcbench.submit.lock import Holder, exclusive


def test_only_one_is_inside(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def enter() -> None:
        with exclusive(tmp_path / ".lock"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert list(tmp_path.iterdir()) == []


def hold(path: Path, **changes: object) -> None:
    holder = {"owner": "ada", "host": "elsewhere", "pid": 1, "since_unix_s": 0.0, "lease_s": 60.0, **changes}
    path.write_bytes(msgspec.json.encode(holder))


def test_a_living_holder_is_named(tmp_path: Path) -> None:
    hold(tmp_path / ".lock")
    with (
        pytest.raises(StorageError, match=r"waited 0.2 s for ada \(process 1 on elsewhere\)"),
        exclusive(tmp_path / ".lock", wait_s=0.2),
    ):
        pass


def test_the_lock_of_a_dead_process_of_this_host_is_taken_over(tmp_path: Path) -> None:
    hold(tmp_path / ".lock", host=socket.gethostname(), pid=2**22 + 1)
    with exclusive(tmp_path / ".lock", wait_s=5):
        assert msgspec.json.decode((tmp_path / ".lock").read_bytes(), type=Holder).owner != "ada"


def test_an_expired_lease_is_taken_over(tmp_path: Path) -> None:
    hold(tmp_path / ".lock", lease_s=0.2)
    with exclusive(tmp_path / ".lock", wait_s=10):
        pass
