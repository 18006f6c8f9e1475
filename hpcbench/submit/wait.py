"""Wait for the runs of a sweep, telling what changes."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcbench.config.cluster import ClusterProfile
from hpcbench.submit.state import ACTIVE, RunState
from hpcbench.submit.submit import send_waiting
from hpcbench.submit.watch import Watcher

ASK_EVERY_S = {"local": 1.0, "slurm": 10.0}
_LOOK_EVERY_S = 0.5
_REST = 9.0
_LONGEST_REST_S = 120.0


def pause_s(every_s: float, took_s: float) -> float:
    """The pause after a look that took ``took_s``: a file system or scheduler that is slow is asked less often.

    Looks take at most a tenth of the time, as long as that means no pause of more than two minutes.
    """
    return max(every_s, min(_REST * took_s, _LONGEST_REST_S))


def wait(watcher: Watcher, profile: ClusterProfile, tell: Callable[[dict[str, RunState]], None]) -> dict[str, RunState]:
    """Block until no run is waiting, pending or running; ``tell`` is called with every new look.

    Results are looked for often, because that costs little; the scheduler is asked rarely. What a submission could not
    send yet is offered again whenever the scheduler is asked. Raises ``SubmitError`` where that is refused.
    """
    began_s = time.monotonic()
    states = watcher.ask()
    asked_s, looked_s = time.monotonic(), 0.0
    ask_again_s = asked_s + pause_s(ASK_EVERY_S[profile.scheduler.kind], asked_s - began_s)
    tell(states)
    while any(state.state in ACTIVE for state in states.values()):
        time.sleep(pause_s(_LOOK_EVERY_S, looked_s))
        began_s = time.monotonic()
        if began_s >= ask_again_s:
            if any(state.state == "waiting" for state in states.values()):
                refused = send_waiting(watcher.tree, list(states), profile).refused
                if refused:
                    raise refused[0]
            states = watcher.ask()
            asked_s = time.monotonic()
            ask_again_s = asked_s + pause_s(ASK_EVERY_S[profile.scheduler.kind], asked_s - began_s)
        else:
            states = watcher.look(states)
            looked_s = time.monotonic() - began_s
        tell(states)
    return states
