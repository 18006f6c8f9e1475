"""Notices a pipeline that gets no further, where nothing else on the rank could tell.

On a cpu every wait for a message has a limit of its own. On cuda the host does not wait: it asks for the whole step and
sits in some later call until the device is done, and NCCL's own limit ends the process without a word of the schedule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcbench.errors import WorkerError

SHARE = 0.9
"""Of NCCL's limit: said before that ends the process."""

_LOOKS = 20


@contextmanager
def watched(
    progress: Callable[[], int | None],
    state: Callable[[], str],
    patience_s: float,
    stuck: Callable[[WorkerError], None],
) -> Iterator[None]:
    """While in here, ``stuck`` is called from a thread when ``progress`` has stayed the same for ``patience_s``.

    ``progress`` is ``None`` while nothing is under way.
    """
    done = threading.Event()

    def watch() -> None:
        seen, since = progress(), time.monotonic()
        while not done.wait(patience_s / _LOOKS):
            now = progress()
            if now is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > patience_s:
                stuck(stuck_error(state(), patience_s))
                return

    thread = threading.Thread(target=watch, name="pipeline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def stuck_error(state: str, waited_s: float) -> WorkerError:
    """What a run that is stuck has failed of."""
    return WorkerError(
        f"the pipeline is stuck: for {waited_s:g} s nothing was done ({state})",
        hint="the state of every rank is in the result's ranks",
    )
