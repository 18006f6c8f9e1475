"""The recorder of a step on a GPU: places of tensors, waits of the host, and the order of calls on each process group."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from hpcbench.worker.dry_run.step_recorder import UNNAMED_FILES, StepRecorder, calling_site, device_of
from hpcbench.worker.measure.layer_trace import COMM_NAMESPACES, tensor_bytes

UNNAMED_FILES.append(__file__)
_AT = torch.ops.aten
PRODUCTS = frozenset({
    _AT.mm, _AT.addmm, _AT.bmm, _AT.baddbmm, _AT.convolution, _AT.convolution_backward,
    _AT._scaled_dot_product_flash_attention, _AT._scaled_dot_product_efficient_attention,
    _AT._scaled_dot_product_cudnn_attention,
})  # fmt: skip
"""Operators whose type autocast lowers: those that tensor cores compute."""
_RECEIVES = ("recv_", "recv_any_source_")
_MAKES_ON_HOST = frozenset({
    _AT.empty, _AT.zeros, _AT.ones, _AT.full, _AT.arange, _AT.empty_strided, _AT.rand, _AT.randn, _AT.scalar_tensor,
})  # fmt: skip


class Call(NamedTuple):
    """A collective, or one side of a message, as its process group sees it."""

    operation: str
    ranks: tuple[int, ...]
    """The process group, ascending."""
    peer: int | None
    """Point to point: the rank of the other side."""
    payload_bytes: int


class GpuRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Adds to a step's record what only a device of its own type and number shows."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.order: list[Call] = []
        """All communication calls of this rank, receives included."""
        self.stray: dict[str, None] = {}
        """``file:line: reason`` where a tensor of another GPU, or of the host with a dimension, was made in a step."""
        self.product_types: set[torch.dtype] = set()
        """Types of the results of matrix products, convolutions and attention."""

    def begin_step(self) -> None:
        super().begin_step()
        self.order.clear()
        self.stray.clear()
        self.product_types.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COMM_NAMESPACES:
            self._note_call(func.__name__.partition(".")[0], args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "prim" or out is NotImplemented or not self._is_in_step:
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self._check_place(func, tensor)
        if results and func.overloadpacket in PRODUCTS:
            # Further results, such as attention's sums, are of another type.
            self.product_types.add(results[0].dtype)
        return out

    def _read_value(self, tensor: Tensor) -> Any:
        value = super()._read_value(tensor)
        # Of what loss scaling reads 1 would mean an overflow, and the update would be left out.
        is_overflow = device_of(tensor) == self.device and _is_called_by(torch.amp.GradScaler._maybe_opt_step)
        return 0.0 if is_overflow else value

    def _check_place(self, func: Any, tensor: Tensor) -> None:
        device = device_of(tensor)
        if device.type == self.device.type and device != self.device:
            self.stray[f"{calling_site()}: {func} makes a tensor on {device}, not on {self.device}"] = None
        elif device.type == "cpu" and tensor.dim() > 0 and func.overloadpacket in _MAKES_ON_HOST:
            self.stray[f"{calling_site()}: {func} makes a tensor of {tuple(tensor.shape)} on the host"] = None

    def _note_call(self, name: str, args: Any) -> None:
        group = _group_of(args)
        if group is None:
            return
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        peer = None
        if name == "send" or name in _RECEIVES:
            peer = dist.get_global_rank(group, next(argument for argument in args if isinstance(argument, int)))
        payload = sum(tensor_bytes(leaf) for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor))
        self.order.append(Call(name, ranks, peer, payload))


def _is_called_by(function: Any) -> bool:
    """Return whether ``function`` is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def _group_of(args: Any) -> dist.ProcessGroup | None:
    if args and isinstance(args[-1], str):
        named: Any = distributed_c10d
        group: dist.ProcessGroup = named._resolve_process_group(args[-1])
        return group
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue
    return None


def differing_calls(calls: list[Call], others: list[Call], ranks: tuple[int, int]) -> list[str]:
    """Return where two ranks call what they take part in together in different orders; empty if nowhere.

    A collective must be the same call on both, a message a send on one and a receive on the other. NCCL matches both
    by their order within a process group.
    """
    problems = []
    groups = {call.ranks for call in (*calls, *others) if set(ranks) <= set(call.ranks)}
    for group in sorted(groups):
        for what, first, second in _streams(calls, others, group, ranks):
            if len(first) != len(second):
                problems.append(f"{what} of {group}: {len(first)} on rank {ranks[0]}, {len(second)} on rank {ranks[1]}")
            for number, (mine, theirs) in enumerate(zip(first, second, strict=False)):
                if not _match(mine, theirs):
                    problems.append(
                        f"{what} {number} of {group}: {mine} on rank {ranks[0]}, {theirs} on rank {ranks[1]}"
                    )
                    break
    return problems


def _streams(
    calls: list[Call], others: list[Call], group: tuple[int, ...], ranks: tuple[int, int]
) -> list[tuple[str, list[Call], list[Call]]]:
    """Return what two ranks of ``group`` match by order: collectives, and the messages of each direction."""
    own, theirs = ([call for call in each if call.ranks == group] for each in (calls, others))
    down = [call for call in own if call.peer == ranks[1]]
    up = [call for call in theirs if call.peer == ranks[0]]

    def split(calls: list[Call], receives: bool) -> list[Call]:
        return [call for call in calls if (call.operation in _RECEIVES) == receives]

    return [
        ("collective", [call for call in own if call.peer is None], [call for call in theirs if call.peer is None]),
        ("message there", split(down, False), split(up, True)),
        ("message back", split(down, True), split(up, False)),
    ]


def _match(mine: Call, theirs: Call) -> bool:
    is_same = mine.operation == theirs.operation or mine.peer is not None
    return is_same and (mine.payload_bytes == theirs.payload_bytes or _may_differ(mine))


def _may_differ(call: Call) -> bool:
    """Return whether ranks may hand over different amounts, as to a gathering of unequal parts."""
    return "gather" in call.operation or "all_to_all" in call.operation or "alltoall" in call.operation
