"""A scheduler that does not answer is announced while a command waits for it."""

from __future__ import annotations

import threading

import pytest

from hpcbench.cli import common


def test_a_silent_scheduler_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    announced = threading.Event()
    messages: list[str] = []
    monkeypatch.setattr(common, "_SILENCE_S", 0.0)

    def keep(text: str) -> None:
        messages.append(text)
        announced.set()

    monkeypatch.setattr(common, "print_message", keep)
    with common.announce_silence("status"):
        assert announced.wait(30)
    assert messages == ["the scheduler has not answered for 0 s: status waits up to a minute for it"]


def test_a_scheduler_that_answers_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(common, "_SILENCE_S", 3600.0)
    monkeypatch.setattr(common, "print_message", messages.append)
    before = threading.active_count()
    with common.announce_silence("status"):
        pass
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(30)
    assert (messages, threading.active_count()) == ([], before)
