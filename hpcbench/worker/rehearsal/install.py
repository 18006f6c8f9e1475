"""A strategy whose steps are a rehearsal, labelled as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from hpcbench.errors import WorkerError
from hpcbench.parallel.kernel import Rehearsed
from hpcbench.worker.rehearsal.mode import Rehearsal

if TYPE_CHECKING:
    from torch import Tensor

    from hpcbench.worker.closing import Closing
    from hpcbench.worker.data.feed import Feed
    from hpcbench.worker.strategies.base import Strategy


def rehearse(closing: Closing, strategy: Strategy, device: torch.device) -> None:
    """Let the steps of ``strategy`` compute nothing, where the run asks for it, and say so in its result.

    Raises ``WorkerError`` (``unsupported``) on an accelerator, and where the task file lacks the cluster.
    """
    spec, header = closing.task.spec, closing.header
    if spec.rehearse is None:
        return
    if device.type != "cpu":
        raise WorkerError(f"a rehearsal sleeps on the host: it needs cpu ranks, not {device}", status="unsupported")
    if spec.rehearse not in header.rehearsed:
        raise WorkerError(f"the task file says nothing of {spec.rehearse}, which the run rehearses")
    given: Any = header.rehearsed[spec.rehearse]
    found = msgspec.convert(given, Rehearsed)
    closing.provenance["rehearsed"] = {"cluster": found.cluster, "source": found.source}
    closing.warnings.append(f"rehearsed: computation is timed sleeps as {found.cluster} ({found.source})")
    mode, whole_step = Rehearsal(found.compute, spec.precision, spec.model, device), strategy.step

    def rehearsed_step(feed: Feed, step: int) -> Tensor:
        with mode:
            return whole_step(feed, step)

    strategy.step = rehearsed_step  # type: ignore[method-assign]
