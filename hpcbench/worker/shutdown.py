"""Signals, deadlines and stop requests of a rank. A stopped run keeps its measurements."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

STEP_GRACE_S = 2.0
"""Seconds that a rank may take to reach the next step's boundary before its process is ended."""

_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")
_WARNING_LEAD_S = 120.0
"""A scheduler may send its warning a minute early, and its clock began before ours."""


class Stopped(Exception):
    """The run ends here, with what was measured; ``status`` is ``timeout`` or ``cancelled``."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class PeerEnded(Exception):
    """Another rank ended, so this one must end too; the cause is recorded by the other rank."""


def stop_margin_s(limit_s: float) -> float:
    """Return the seconds before its deadline at which a run of ``limit_s`` ends itself to write its result in time."""
    return min(5.0, 0.05 * limit_s)


def deadline_window_s(limit_s: float) -> float:
    """Return the seconds before the deadline from which a TERM means the time limit: SLURM's clock began earlier."""
    return min(30.0, 0.1 * limit_s)


def is_limit_warning(now: float, deadline: float | None, warning_s: float | None) -> bool:
    """Whether a ``SIGUSR2`` at ``now`` is the scheduler's warning of the time limit.

    Long before the deadline (both unix seconds) it is not: some sites preempt by the same signal. ``warning_s``: how
    long before the limit the scheduler warns; ``None`` if it is unknown.
    """
    return deadline is None or warning_s is None or now >= deadline - warning_s - _WARNING_LEAD_S


def stop_for_signal(number: int, now: float, deadline: float | None, *, warns_of_limit: bool = True) -> Stopped:
    """Return the meaning of a signal.

    ``SIGUSR2`` is the scheduler's early warning of the time limit if it ``warns_of_limit``. ``now`` and ``deadline``
    are unix seconds.
    """
    name = signal.Signals(number).name
    if name == "SIGUSR2" and not warns_of_limit:
        return Stopped("cancelled", "stopped by SIGUSR2 long before the time limit")
    if name == "SIGUSR2":
        return Stopped("timeout", "stopped by SIGUSR2, the scheduler's warning of the time limit")
    if deadline is not None and now >= deadline:
        return Stopped("timeout", f"stopped by {name} at the time limit")
    return Stopped("cancelled", f"stopped by {name}")


class StopController:
    """Whether to stop, and why: looked at by the loop once a step, set by signals, the clock, or another rank.

    Signals reach a Python handler only between two byte codes of the main thread, which may sit in a collective
    whose peer is dead. The C-level handler also writes the signal's number to a socket; a thread reads it there, and
    calls the abort callback when the main thread has not come back within ``STEP_GRACE_S``.
    """

    def __init__(self) -> None:
        self.reason: Stopped | PeerEnded | None = None
        self.deadline: float | None = None
        self._deadline_step = float("inf")
        self._near = 0.0
        self._warning_s: float | None = None
        self.abort: Callable[[BaseException], None] | None = None
        """Called by a thread when the main thread is stuck; it must not return."""
        self.warning_file: Path | None = None
        """The job script makes it before it passes a warning of the time limit on as TERM."""
        self._lock = threading.Lock()
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None

    def install(self) -> None:
        """Take over the signals of this process; one that is ignored (nohup, ``&``) stays ignored."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for name in _SIGNALS:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                # A Python handler must exist for the wake-up socket to be written; the thread does the rest.
                signal.signal(number, lambda *_: None)
        threading.Thread(target=self._read, args=(self._reader,), name="stop", daemon=True).start()

    def set_deadline(self, deadline: float | None, limit_s: float, warning_s: float | None = None) -> None:
        """``deadline`` in unix seconds; the loop ends ``stop_margin_s`` before it, and a rank that is stuck a little
        later.

        In a pack no scheduler warns the ranks of their own run's limit. ``warning_s``: see ``is_limit_warning``.
        """
        self.deadline = deadline
        self._warning_s = warning_s
        self._near = deadline_window_s(limit_s)
        self._deadline_step = float("inf") if deadline is None else deadline - stop_margin_s(limit_s)
        if deadline is not None:
            threading.Thread(target=self._watch_clock, name="deadline", daemon=True).start()

    def should_stop(self) -> bool:
        """Whether the loop should end before its next step. Costs well under a microsecond."""
        if self.reason is None and time.time() >= self._deadline_step:
            self._set(_time_limit_stop())
        return self.reason is not None

    def raise_if_stopped(self) -> None:
        """Raise the reason to stop, if there is one."""
        if self.should_stop() and self.reason is not None:
            raise self.reason

    def stop_after_grace(self, cause: Stopped | PeerEnded, grace_s: float = STEP_GRACE_S) -> None:
        """Ask the loop to stop for ``cause``, and end the process from here unless it does within ``grace_s``.

        Only a thread beside the main one may call this: it waits.
        """
        self._set(cause)
        time.sleep(grace_s)
        if self.abort is not None:
            self.abort(cause)

    def _set(self, reason: Stopped | PeerEnded) -> None:
        with self._lock:
            self.reason = self.reason or reason

    def _watch_clock(self) -> None:
        time.sleep(max(0.0, self._deadline_step - time.time()))
        self.stop_after_grace(_time_limit_stop())

    def _read(self, reader: socket.socket) -> None:
        while True:
            for number in reader.recv(1):
                if signal.Signals(number).name not in _SIGNALS:
                    continue
                deadline = None if self.deadline is None else self.deadline - self._near
                is_warning = self.warning_file is not None and self.warning_file.exists()
                meant = signal.SIGUSR2 if number == signal.SIGTERM and is_warning else number
                warns_of_limit = is_limit_warning(time.time(), self.deadline, self._warning_s)
                cause = stop_for_signal(meant, time.time(), deadline, warns_of_limit=warns_of_limit)
                self._set(cause)
                # Every signal gets its own patience, so that a second one is not read only after the first's.
                threading.Thread(target=self.stop_after_grace, args=(cause,), daemon=True).start()


def _time_limit_stop() -> Stopped:
    return Stopped("timeout", "reached the time limit")


def exit_now(code: int) -> None:
    """End the process without waiting for threads that sit in a store or a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
