"""Wait for the runs of a sweep, telling what changes."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcbench.config.cluster import ClusterProfile
from hpcbench.results.store import ClusterTree
from hpcbench.submit.state import ACTIVE, RunState, result_state, run_states
from hpcbench.submit.submit import send_waiting

_ASK_EVERY_S = {"local": 1.0, "slurm": 10.0}
_LOOK_EVERY_S = 0.5


def wait(
    tree: ClusterTree,
    run_ids: list[str],
    profile: ClusterProfile,
    tell: Callable[[dict[str, RunState]], None],
) -> dict[str, RunState]:
    """Block until no run of ``run_ids`` is waiting, pending or running; ``tell`` is called with every new look.

    Results are looked for often, because that costs one file each; the scheduler is asked rarely. What a submission
    could not send yet is offered again whenever the scheduler is asked. Raises ``SubmitError`` where that is refused.
    """
    states = run_states(tree, run_ids, profile, time.time())
    asked_at = time.monotonic()
    tell(states)
    while any(state.state in ACTIVE for state in states.values()):
        time.sleep(_LOOK_EVERY_S)
        if time.monotonic() - asked_at >= _ASK_EVERY_S[profile.scheduler.kind]:
            if any(state.state == "waiting" for state in states.values()):
                refused = send_waiting(tree, run_ids, profile).refused
                if refused:
                    raise refused[0]
            states = run_states(tree, run_ids, profile, time.time())
            asked_at = time.monotonic()
        else:
            states = {key: _look(tree, key, state) for key, state in states.items()}
        tell(states)
    return states


def _look(tree: ClusterTree, run_id: str, state: RunState) -> RunState:
    if state.state not in ACTIVE or not tree.result_path(run_id).exists():
        return state
    found = result_state(tree, run_id)
    return found if found is not None and found.state == "ok" else state
