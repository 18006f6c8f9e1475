"""Recorder of the collectives that a rank calls, and the recorded step after the profiled ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.traffic import Traffic, merge_calls
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.measure.clocks import synchronize
from hpcbench.worker.measure.layer_trace import COMM_NAMESPACES, tensor_bytes
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategy import Strategy

_COLLECTIVES = {
    name: (operation, position)
    for operation, position, names in (
        ("all_reduce", 0, "allreduce_ allreduce_coalesced_ all_reduce all_reduce_"),
        ("all_gather", 1, "allgather_ _allgather_base_ allgather_into_tensor_coalesced_"),
        ("all_gather", 0, "all_gather_into_tensor all_gather_into_tensor_out"),
        ("reduce_scatter", 1, "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_"),
        ("reduce_scatter", 0, "reduce_scatter_tensor"),
        ("broadcast", 0, "broadcast_ broadcast"),
        ("reduce", 0, "reduce_"),
        ("all_to_all", 1, "alltoall_base_ alltoall_"),
        ("all_to_all", 0, "all_to_all_single"),
        ("send", 0, "send"),
    )
    for name in names.split()
}
"""Operators of torch's namespaces: the operation, and the argument that it sends."""

_WITHOUT_PAYLOAD = (
    "barrier", "monitored_barrier_", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd",
)  # fmt: skip


class TrafficRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context; the calls made within it by this thread, and by autograd for it, are in ``calls``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Traffic] = []
        """Calls in the order in which they were made."""
        self.unknown: set[str] = set()
        """Operators that communicate and of whose arguments nothing is known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COMM_NAMESPACES:
            self._note(func.__name__.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        if name in _WITHOUT_PAYLOAD:
            return
        if name not in _COLLECTIVES:
            # Not raised here: the other ranks are in the middle of a step with this one.
            self.unknown.add(name)
            return
        operation, position = _COLLECTIVES[name]
        payload_bytes = sum(tensor_bytes(tensor) for tensor in tree_leaves(args[position]))
        size = 2 if operation == "send" else _group_size(args)
        self.calls.append(Traffic(operation=operation, group_size=size, payload_bytes=payload_bytes))

    def merged(self) -> list[Traffic]:
        """Equal calls as one; all of them must be known."""
        assert not self.unknown, f"torch's {sorted(self.unknown)} communicate, and nothing is known of their arguments"
        return merge_calls(self.calls)


def _group_size(args: Any) -> int:
    """Functional operators end with their group's name; the others hold it as an object somewhere."""
    if isinstance(args[-1], str):
        named: dist.ProcessGroup = distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined, arg-type]
        return named.size()
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):
                return dist.ProcessGroup.unbox(argument).size()
    raise AssertionError("a collective without a group")


def run_recorded_step(
    strategy: Strategy, feed: DataFeed, spec: RunSpec, device: torch.device, stop: StopController,
    any_rank: Callable[[bool], bool], first: int, warnings: list[str],
) -> list[Traffic]:  # fmt: skip
    """Return this rank's traffic in one step with a whole batch, run by all ranks together.

    Empty if steps are not profiled, on a lone rank, with a compiled model (a recorder would have it compiled again),
    for a strategy whose communication the recorder does not see (``traffic_is_recorded``), and if a rank is stopped.

    Args:
        any_rank: whether a flag is true on any rank; the ranks wait for each other in it.
        first: number of the next step, which is recorded if its batch is whole, else the one after it.
        warnings: gets the operators of torch that the recorder cannot interpret.
    """
    is_possible = spec.profile_steps > 0 and spec.ranks > 1 and not spec.compile and strategy.traffic_is_recorded
    if not is_possible or any_rank(stop.should_stop()):
        return []
    if feed.global_count(first) < feed.global_batch_size:
        # Run without a record: a pipeline that runs across steps has begun it.
        strategy.step(feed, first)
        first += 1
    recorder = TrafficRecorder()
    with recorder:
        strategy.step(feed, first)
    synchronize(device)
    if recorder.unknown:
        names = ", ".join(sorted(recorder.unknown))
        warnings.append(f"no record of the traffic: nothing is known of torch's {names}")
        return []
    return recorder.merged()
