from __future__ import annotations

import errno
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
from hpcbench.submit.lock import LeaseLock, LockHeldError, LockHolder, announce_silence, exclusive_lock


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


def test_a_holder_that_waits_for_something_else_keeps_its_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with exclusive_lock(path, lease_s=0.2) as held:
        made, content = path.stat().st_mtime_ns, path.read_bytes()
        while path.stat().st_mtime_ns == made:
            time.sleep(0.01)
        assert path.read_bytes() == content
        held.check_held()


def test_a_holder_that_was_stopped_leaves_the_lock_to_its_successor(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with exclusive_lock(path) as held:
        hold(path)
        with pytest.raises(LockHeldError, match="was taken over by another process"):
            held.check_held()
    assert path.exists()


def test_a_file_system_that_refuses_has_taken_no_lock_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with exclusive_lock(tmp_path / ".lock") as held:
        with monkeypatch.context() as patched:
            patched.setattr(lock, "read_regular", refuse)
            with pytest.raises(StorageError, match="Stale file handle"):
                held.check_held()
        held.check_held()


def test_a_lock_of_this_process_is_not_another_one_of_it(tmp_path: Path) -> None:
    first, second = LeaseLock(tmp_path / ".lock", 60.0), LeaseLock(tmp_path / ".lock", 60.0)
    assert first.data != second.data


def test_a_process_number_of_another_machine_of_that_name_means_nothing_here(tmp_path: Path) -> None:
    hold(tmp_path / ".lock", host=socket.gethostname(), pid=2**22 + 1, machine="login:another boot:7")
    with pytest.raises(LockHeldError), exclusive_lock(tmp_path / ".lock", wait_s=0.2):
        pass


def test_a_lock_that_may_not_be_read_is_waited_for_by_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".lock"
    hold(path)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lock, "read_regular", refuse)
    with (
        pytest.raises(LockHeldError, match=r"another submit, of account \w+, whose lock"),
        exclusive_lock(path, lease_s=60, wait_s=0.2),
    ):
        pass
    with exclusive_lock(path, lease_s=0.2, wait_s=10):
        pass


def test_a_wait_is_announced_with_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(tmp_path / ".lock")
    monkeypatch.setattr(lock, "SILENCE_S", 0.05)
    heard: list[str] = []
    with announce_silence(heard.append), pytest.raises(LockHeldError), exclusive_lock(tmp_path / ".lock", wait_s=0.5):
        pass
    assert len(heard) == 1
    assert heard[0].startswith("waiting for ada (process 1 on elsewhere)")
