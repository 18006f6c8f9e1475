from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from hpcbench.worker import shutdown as stop_module
from hpcbench.worker.shutdown import (
    PeerEnded,
    StopController,
    Stopped,
    is_limit_warning,
    stop_for_signal,
)


@pytest.mark.parametrize(
    ("number", "now", "deadline", "status"),
    [
        (signal.SIGUSR2, 0.0, None, "timeout"),
        (signal.SIGUSR2, 0.0, 100.0, "timeout"),
        (signal.SIGTERM, 0.0, None, "cancelled"),
        (signal.SIGTERM, 99.0, 100.0, "cancelled"),
        (signal.SIGTERM, 100.0, 100.0, "timeout"),
        (signal.SIGINT, 0.0, 100.0, "cancelled"),
        (signal.SIGHUP, 0.0, 100.0, "cancelled"),
        (signal.SIGUSR1, 0.0, 100.0, "cancelled"),
    ],
)
def test_a_signal_gives_its_status(number: int, now: float, deadline: float | None, status: str) -> None:
    reason = stop_for_signal(number, now, deadline)
    assert reason.status == status
    assert signal.Signals(number).name in str(reason)


@pytest.mark.parametrize(
    ("now", "deadline", "warning_s", "expected"),
    [
        (0.0, None, 60.0, True),
        (0.0, 1000.0, None, True),
        (0.0, 1000.0, 60.0, False),
        (819.0, 1000.0, 60.0, False),
        (820.0, 1000.0, 60.0, True),
    ],
)
def test_a_user_signal_long_before_the_limit_is_no_warning_of_it(
    now: float, deadline: float | None, warning_s: float | None, expected: bool
) -> None:
    """Some sites preempt by the signal that the job asked for as a warning (send_user_signal)."""
    assert is_limit_warning(now, deadline, warning_s) is expected
    assert stop_for_signal(signal.SIGUSR2, 0.0, deadline, warns_of_limit=expected).status == (
        "timeout" if expected else "cancelled"
    )


def test_a_rank_that_is_stuck_at_its_deadline_is_ended() -> None:
    """Nobody tells a run of a pack that its time is over."""
    stop = StopController()
    seen = threading.Event()
    stop.abort = lambda _: seen.set()
    stop.set_deadline(time.time() + 0.2, 1.0)
    assert seen.wait(30)
    assert isinstance(stop.reason, Stopped)
    assert stop.reason.status == "timeout"


def test_the_first_reason_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopController()
    abandoned: list[BaseException] = []
    stop.abort = abandoned.append
    first, second = Stopped("timeout", "first"), PeerEnded("second")
    stop.stop_after_grace(first, grace_s=0)
    stop.stop_after_grace(second, grace_s=0)
    assert stop.reason is first
    assert abandoned == [first, second], "each asks to end the process; whoever ends it first wins"


@pytest.mark.parametrize(
    ("number", "has_warning", "status"),
    [
        (signal.SIGUSR2, False, "timeout"),
        # torchrun passes nothing but TERM on to its ranks: the job script leaves its warning in a file.
        (signal.SIGTERM, False, "cancelled"),
        (signal.SIGTERM, True, "timeout"),
    ],
)
def test_a_signal_reaches_the_flag_while_the_main_thread_does_not_look(
    number: signal.Signals, has_warning: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wake-up socket is read by a thread; no python code of the main thread is needed."""
    monkeypatch.setattr(stop_module, "_SIGNALS", (number.name,))
    before = signal.getsignal(number)
    seen = threading.Event()
    stop = StopController()
    stop.abort = lambda _: seen.set()
    stop.warning_file = tmp_path / "limit-warning"
    if has_warning:
        stop.warning_file.touch()
    try:
        stop.install()
        signal.raise_signal(number)
        assert seen.wait(30)
        assert isinstance(stop.reason, Stopped)
        assert stop.reason.status == status
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup and a shell's `&` ignore HUP and INT for their children."""
    monkeypatch.setattr(stop_module, "_SIGNALS", ("SIGHUP",))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        StopController().install()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGHUP, before)
