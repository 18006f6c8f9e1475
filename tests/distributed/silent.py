"""``python -m hpcbench.worker`` with one rank of a pipeline that computes and never sends: $SILENT is its number."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from hpcbench.worker.__main__ import main
from hpcbench.worker.strategies.pipeline.p2p import P2PTransport

PATIENCE_S = 3.0

_send, _init = P2PTransport.send, P2PTransport.__init__


def send(self: Any, *given: Any) -> None:
    if dist.get_rank() != int(os.environ["SILENT"]):
        _send(self, *given)


def init(self: Any, channels: Any, device: Any, _wait_s: float) -> None:
    """Meeting the others takes its time on a busy machine; a message of a stage without work does not."""
    _init(self, channels, device, PATIENCE_S)


P2PTransport.send = send  # type: ignore[method-assign,assignment]
P2PTransport.__init__ = init  # type: ignore[method-assign,assignment]

if __name__ == "__main__":
    sys.exit(main())
