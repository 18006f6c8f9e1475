"""fairscale's FullyShardedDataParallel on a cpu: its CUDA streams replaced by ones that have nothing to do.

A cpu runs everything in order, so waiting for a stream is nothing. The replacements hold for this process alone, and
only where torch has no CUDA device, so nothing else of the process can want the real ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

STREAMS = ("fp32_to_fp16", "all_gather", "post_backward")


class InOrder:
    """The only stream of a cpu."""

    def wait_stream(self, _other: Any) -> None:
        """Nothing runs beside this one."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InOrder)

    def __hash__(self) -> int:
        return 0


def replace_cuda_calls(wrapper: Any) -> None:
    """Let ``wrapper`` (fairscale's class) find streams on a machine without CUDA. Twice is once."""
    assert not torch.cuda.is_available(), "the real streams are there"
    if hasattr(wrapper, "_setup_streams_for_cuda"):
        return
    only = InOrder()
    wrapper._setup_streams_for_cuda = wrapper._setup_streams

    def set_up(self: Any) -> None:
        # The children share this very dictionary with their root.
        if not self._streams and self._is_root:
            self._setup_streams_for_cuda()
            self._streams.update(dict.fromkeys(STREAMS, only))

    wrapper._setup_streams = set_up
    torch.cuda.current_stream = lambda *_args, **_kwargs: only  # type: ignore[assignment]
    torch.cuda.stream = lambda *_args, **_kwargs: nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.Tensor.record_stream = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
