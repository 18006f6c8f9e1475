"""Random commands and random faults against hpcbench on the box, checked against what must always hold.

    python -m tests.slurm.chaos storm --minutes 20 --seed 7    play a storm; a violation is shrunk to a short storm
    python -m tests.slurm.chaos play FILE                      play the actions of a file again
    python -m tests.slurm.chaos remove                         remove what is left

It needs root and the box: make slurm-up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.slurm.chaos import history, storm
from tests.slurm.chaos.storm import Action
from tests.slurm.chaos.world import HISTORY, make_world, remove_world

_WINDOW_S = 240.0
"""What is older than this before the first violation is left out of the first shorter storm."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.chaos", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_storm = commands.add_parser("storm", help="play a storm")
    of_storm.add_argument("--minutes", type=float, default=20.0)
    of_storm.add_argument("--seed", type=int, default=1)
    of_storm.add_argument("--shrink-minutes", type=float, default=30.0, help="for shorter storms after a violation")
    of_play = commands.add_parser("play", help="play the actions of a file")
    of_play.add_argument("file", type=Path)
    commands.add_parser("remove", help="remove what is left")
    arguments = parser.parse_args()
    if arguments.command == "remove":
        remove_world()
        return 0
    if arguments.command == "play":
        return 1 if violations(storm.load(arguments.file)) else 0
    actions = storm.draw(arguments.seed, arguments.minutes * 60)
    found = violations(actions)
    if found:
        shrink(actions, found, arguments.shrink_minutes * 60, Path(f"chaos-{arguments.seed}.jsonl"))
    return 1 if found else 0


def violations(actions: Sequence[Action]) -> list[str]:
    """Play ``actions`` in a new world and print what did not hold."""
    make_world(max((action.at_s for action in actions), default=0.0))
    storm.save(actions, HISTORY / "actions.jsonl")
    storm.play(actions)
    states = storm.converge()
    found = history.check(states)
    print(history.summary())
    print("in the end:", dict(Counter(state for state, _ in states.values())))
    for sentence in found:
        print(f"  {sentence}")
    print(f"{len(found)} violations", flush=True)
    return found


def shrink(actions: Sequence[Action], found: Sequence[str], limit_s: float, path: Path) -> None:
    """Look for a short storm that violates the same: halves of the actions before, then quarters, are left out."""
    give_up = time.monotonic() + limit_s
    kinds = {sentence.split(":")[0] for sentence in found}
    shortest = list(actions)
    storm.save(shortest, path)
    last_s = actions[-1].at_s
    candidates = [[one for one in actions if one.at_s > last_s - _WINDOW_S * step] for step in (1, 2, 4)]
    parts = 2
    while time.monotonic() < give_up and len(shortest) > 2 and parts <= 16:
        if not candidates:
            size = -(-len(shortest) // parts)
            candidates = [shortest[:first] + shortest[first + size :] for first in range(0, len(shortest), size)]
            parts *= 2
        candidate = candidates.pop(0)
        if not candidate or len(candidate) >= len(shortest):
            continue
        print(f"shrinking: {len(candidate)} of {len(shortest)} actions", flush=True)
        again = violations(candidate)
        if kinds & {sentence.split(":")[0] for sentence in again}:
            shortest, candidates, parts = candidate, [], 2
            storm.save(shortest, path)
    print(f"the shortest storm has {len(shortest)} actions: python -m tests.slurm.chaos play {path}")


if __name__ == "__main__":
    sys.exit(main())
