"""What ranks tell each other beside the measured collectives: results, and that one of them cannot go on."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable

import msgspec

from hpcbench.errors import WorkerError
from hpcbench.results.attempts import Attempt
from hpcbench.results.schema import RankResult
from hpcbench.worker.rendezvous import absent_after
from hpcbench.worker.stores import TCPStore, another

_FOR_EVER = datetime.timedelta(days=7)
_POLL_S = 0.5
_LARGEST_VALUE_BYTES = 4 * 2**20
_ABORT = "abort"
_CAUSE = "cause"


class Cause(msgspec.Struct, kw_only=True):
    """Why the launch ends early, by the first rank that knew a cause of its own."""

    rank: int
    host: str
    status: str
    type: str
    message: str
    hint: str | None = None
    traceback_tail: str | None = None


class Link:
    """The shared store, seen from one rank. Nothing here waits without a limit."""

    def __init__(self, store: TCPStore, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def watch(self, told: Callable[[], None], lost: Callable[[], None]) -> None:
        """From a thread, call ``told`` when any rank gives up, ``lost`` when rank 0's process is gone.

        The thread sleeps in the store until then: it costs the measured steps nothing.
        """
        mine = another(self.store)

        def wait() -> None:
            try:
                mine.wait([_ABORT], _FOR_EVER)
            except RuntimeError:
                lost()
                return
            told()

        threading.Thread(target=wait, name="peers", daemon=True).start()

    def give_up(self, cause: Cause | None) -> None:
        """Tell the others that this rank ends; ``cause`` is ``None`` where it only follows from another's end."""
        with contextlib.suppress(RuntimeError):
            if cause is not None:
                self.store.compare_set(_CAUSE, "", msgspec.json.encode(cause).decode())
            self.store.set(_ABORT, "1")

    def cause(self) -> Cause | None:
        """What the first rank that gave up for a cause of its own has said."""
        try:
            if self.store.check([_CAUSE]):
                return msgspec.json.decode(self.store.get(_CAUSE), type=Cause)
        except (RuntimeError, msgspec.MsgspecError):
            return None
        return None

    def post(self, key: str, text: str) -> None:
        """Say something to whoever waits for it."""
        self.store.set(key, text)

    def follow(self, progress: str, done: str, patience_s: float, check: Callable[[], None], what: str) -> None:
        """Wait until ``done`` is posted, as long as ``progress`` changes at least every ``patience_s``.

        Sleeps between looks, and calls ``check`` after each, which may raise. ``WorkerError`` says what was waited
        for and how far it had got.
        """
        pause, seen, since = 0.002, "nothing yet", time.monotonic()
        while not self.store.check([done]):
            check()
            now = self.store.get(progress).decode() if self.store.check([progress]) else seen
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > patience_s:
                raise WorkerError(
                    f"rank {self.rank} waited {patience_s:g} s for {what} to get any further; last heard: {seen}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)

    def send(self, result: RankResult) -> None:
        """Hand ``result`` to rank 0. What is too large for a store is left to the rank's file."""
        data = msgspec.json.encode(result)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"result/{self.rank}", data.decode() if len(data) <= _LARGEST_VALUE_BYTES else "")

    def collect(self, attempt: Attempt, wait_s: float) -> dict[int, RankResult]:
        """What the ranks sent, by rank; files stand in for those that did not within ``wait_s``."""
        keys = {f"result/{rank}": rank for rank in range(self.world_size)}
        found: dict[int, RankResult] = {}
        with contextlib.suppress(RuntimeError):
            missing = absent_after(self.store, list(keys), wait_s)
            for key, rank in keys.items():
                data = b"" if key in missing else self.store.get(key)
                if data:
                    found[rank] = msgspec.json.decode(data, type=RankResult)
        return found if len(found) == self.world_size else {**attempt.read_ranks(), **found}
