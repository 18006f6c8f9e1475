"""``python -m hpcbench.worker`` with one rank of a pipeline that computes and never sends: $SILENT is its number."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from hpcbench.strategies.pipeline.train.p2p import MessageTransport
from hpcbench.worker.__main__ import main
from hpcbench.worker.distributed import point_to_point

PATIENCE_S = 3.0

_exchange, _init = point_to_point.exchange, MessageTransport.__init__
_is_set_up = False


def exchange(sends: Any, receives: Any, group: Any) -> Any:
    is_silent = _is_set_up and dist.get_rank() == int(os.environ["SILENT"])
    return _exchange([] if is_silent else sends, receives, group)


def init(self: Any, channels: Any, device: Any, _wait_s: float) -> None:
    """Meeting the others takes its time on a busy machine; a message of a stage without work does not."""
    global _is_set_up  # noqa: PLW0603 - one run in this process
    _is_set_up = True
    _init(self, channels, device, PATIENCE_S)


point_to_point.exchange = exchange
MessageTransport.__init__ = init  # type: ignore[method-assign,assignment]

if __name__ == "__main__":
    sys.exit(main())
