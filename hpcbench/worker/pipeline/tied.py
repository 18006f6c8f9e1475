"""One weight on several stages (an embedding that is also the output layer): the sum of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hpcbench.worker.groups import Group


class Tie(NamedTuple):
    """A weight that the pipeline's ranks at ``places`` hold a copy of; ``parameter`` is this rank's, if it has one."""

    places: tuple[int, ...]
    parameter: nn.Parameter | None


def sum_tied(ties: Sequence[Tie], group: Group) -> None:
    """Replace every copy's gradient by the sum of all, which is formed on the first holder: alike to the last bit."""
    for places, parameter in ties:
        if parameter is None or len(places) == 1:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad, first = parameter.grad, places[0]
        if group.place != first:
            dist.send(grad.contiguous(), group=group.members(), group_dst=first)
            received = torch.empty_like(grad, memory_format=torch.contiguous_format)
            dist.recv(received, group=group.members(), group_src=first)
            grad.copy_(received)
            continue
        for other in places[1:]:
            received = torch.empty_like(grad, memory_format=torch.contiguous_format)
            dist.recv(received, group=group.members(), group_src=other)
            grad.add_(received)
        for other in places[1:]:
            dist.send(grad.contiguous(), group=group.members(), group_dst=other)
