"""Live tensor bytes of a rank, by what they are."""

from __future__ import annotations

import msgspec


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Live tensor bytes of one rank when it holds most, by what they are."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """What autograd keeps for the backward pass, the micro-batches that are alive together."""
    buffers_bytes: int = 0
    """BatchNorm's statistics."""
    communication_bytes: int = 0
    """Buckets, gathered parameters, halos: copies that exist to be sent or were received."""
    stashed_bytes: int = 0
    """Further versions of the parameters (PipeDream)."""
    untouched_bytes: int = 0
    """Asked for and never written to. A CPU has no pages for it, an accelerator keeps it all the same."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in self.__struct_fields__)
