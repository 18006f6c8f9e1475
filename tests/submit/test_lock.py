from __future__ import annotations

import inspect
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from hpcbench.errors import StorageError
from hpcbench.fileio import write_atomic
from hpcbench.submit import lock
from hpcbench.submit.lock import LockHolder, exclusive_lock


def test_only_one_is_inside(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def enter() -> None:
        with exclusive_lock(tmp_path / ".lock"):
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
        pytest.raises(
            StorageError, match=r"waited 0.2 s for ada \(process 1 on elsewhere\), whose lock has not changed for"
        ),
        exclusive_lock(tmp_path / ".lock", wait_s=0.2),
    ):
        pass


def test_the_lock_of_a_dead_process_of_this_host_is_taken_over(tmp_path: Path) -> None:
    hold(tmp_path / ".lock", host=socket.gethostname(), pid=2**22 + 1)
    with exclusive_lock(tmp_path / ".lock", wait_s=5):
        assert msgspec.json.decode((tmp_path / ".lock").read_bytes(), type=LockHolder).owner != "ada"


def test_an_expired_lease_is_taken_over(tmp_path: Path) -> None:
    hold(tmp_path / ".lock", lease_s=0.2)
    with exclusive_lock(tmp_path / ".lock", wait_s=10):
        pass


@pytest.mark.parametrize(("content", "left"), [(b"dead", []), (b"its successor's", [b"its successor's"])])
def test_removing_a_stale_lock_keeps_a_new_one(content: bytes, left: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_bytes(b"dead")
    dead = lock._look_at(path)
    assert dead is not None
    if content != b"dead":
        write_atomic(path, content)
    lock._remove_stale_file(path, dead)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == left


def test_waiting_lasts_longer_than_a_dead_holders_lease() -> None:
    defaults = inspect.signature(exclusive_lock).parameters
    assert defaults["wait_s"].default > defaults["lease_s"].default
