"""torch's key-value stores under names that a type checker can see: torch.distributed does not declare them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "another", "seconds"]


def seconds(value: float) -> datetime.timedelta:
    """What the stores take as a time limit."""
    return datetime.timedelta(seconds=max(value, 0.001))


def another(store: TCPStore) -> TCPStore:
    """A connection of its own to the same store: one that waits in a call blocks every other caller."""
    return TCPStore(store.host, store.port, None, False, seconds(300), wait_for_workers=False)
