"""Print a pipeline's hang with receives posted ahead, or the search that finds none.

``python -m tests.device_model 1f1b 2 3 [paired]``: schedule, stages, micro-batches.
"""

from __future__ import annotations

import sys

from tests.device_model.device import Machine
from tests.device_model.programs import paired_programs, pipeline_steps, prefetching_programs
from tests.device_model.search import fewest_syncs, hangs_with_all_syncs, search_hang
from tests.device_model.timeline import timeline


def main(schedule: str, stages: str, micro_batches: str, order: str = "ahead") -> None:
    layout, steps = pipeline_steps(schedule, int(stages), int(micro_batches))
    write = paired_programs if order == "paired" else prefetching_programs
    machine = Machine(write(layout, steps))
    states, hang = search_hang(machine)
    print(f"{schedule}, {stages} stages, {micro_batches} micro-batches, {order}:")
    if hang is not None:
        print("\n".join(timeline(machine, fewest_syncs(machine, hang))))
        return
    every = Machine(write(layout, steps, every_action=True), hardware_queues=1)
    print(f"no hang where first kernels wait ({states} states without certain transitions)")
    verdict = "a" if hangs_with_all_syncs(every) else "no"
    print(f"{verdict} hang where every action waits and one kernel runs at a time")


if __name__ == "__main__":
    main(*sys.argv[1:])
