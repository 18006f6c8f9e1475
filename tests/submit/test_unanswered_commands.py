"""A command of the scheduler that does not answer is announced while it is waited for."""

from __future__ import annotations

import os

import pytest

from hpcbench.submit import scheduler
from hpcbench.submit.lock import announce_silence
from hpcbench.submit.scheduler import run_program


def answer(words: str) -> str:
    """The output of a command that says ``words`` and ends."""
    return run_program(["sh", "-c", words], os.environ).output


def test_a_silent_command_is_announced_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SILENCE_S", 0.01)
    messages: list[str] = []
    with announce_silence(messages.append):
        assert answer("echo early; sleep 0.5; echo late") == "early\nlate\n"
    assert messages == ["sh has not answered for 0.01 s; waiting 59.99 s longer"]


def test_no_silence_is_announced_without_listener_or_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    with announce_silence(messages.append):
        assert answer("echo at once") == "at once\n"
    monkeypatch.setattr(scheduler, "SILENCE_S", 0.01)
    assert answer("sleep 0.1; echo late") == "late\n"
    assert messages == []
