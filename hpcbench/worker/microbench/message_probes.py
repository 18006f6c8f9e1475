"""Times of given messages, in groups of given places, with as many of these at once as the machine's nodes hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.message_shapes import MessageShape
from hpcbench.results.probe_records import CollectiveProbe
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.microbench.collective_probes import (
    ProbeGroup,
    collective_probe,
    make_collective_call,
    time_collective,
)


def measure_messages(
    spec: RunSpec, context: RankContext, shapes: Sequence[MessageShape], budget_s: float, check: Callable[[], None]
) -> list[CollectiveProbe]:
    """Time every one of ``shapes``; none is left out, however long it takes.

    Groups are neighbours on each node: on one node all of them send at the same time, on several as many as the shape
    has rivals. ``check`` raises on all ranks where one received a signal to stop.
    """
    world = context.members()
    team = ProbeGroup(world, dist.get_process_group_ranks(world), context.rank, context.device)
    widths = sorted({shape.ranks_per_node for shape in shapes})
    own_groups = {width: _own_group(team, spec, width) for width in widths}
    probes = []
    for shape in shapes:
        check()
        # Ranks of other groups wait here, not in the measured calls.
        team.barrier()
        count = spec.tasks_per_node // shape.ranks_per_node
        active = count if spec.nodes == 1 else min(shape.rivals, count)
        mine, number = own_groups[shape.ranks_per_node]
        if mine is None:
            continue
        readings = time_collective(
            mine,
            make_collective_call(mine, shape.operation, shape.payload_bytes),
            budget_s / len(shapes),
            halves=shape.operation == "send",
            is_active=number < active,
            is_required=True,
        )
        probes.append(collective_probe(shape.operation, shape.ranks, spec.nodes, shape.payload_bytes, active, readings))
    return probes


def _own_group(team: ProbeGroup, spec: RunSpec, width: int) -> tuple[ProbeGroup | None, int]:
    """Return this rank's group of ``width`` neighbours on every node, and its number; all ranks make all groups."""
    found: tuple[ProbeGroup | None, int] = (None, -1)
    for number in range(spec.tasks_per_node // width):
        places = [
            node * spec.tasks_per_node + number * width + place for node in range(spec.nodes) for place in range(width)
        ]
        members = [team.ranks[place] for place in places]
        group = dist.new_group(members)
        if team.own in places:
            found = ProbeGroup(group, members, places.index(team.own), team.device), number
    return found
