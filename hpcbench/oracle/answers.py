"""Who can be asked about runs: what the oracle's own questions need of whoever finds tables and machines."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.predict import Prediction
from hpcbench.units import format_bytes


class Unpriced(NamedTuple):
    """Why nothing can be said of a run."""

    reason: str


class Room(NamedTuple):
    """What the fullest rank of a run holds, and how much there is."""

    peak_memory_bytes: int
    memory_limit_bytes: int | None
    """``None`` where nobody says."""

    @property
    def is_enough(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.memory_limit_bytes is None or self.peak_memory_bytes <= self.memory_limit_bytes


def need_and_limit(need_bytes: int, limit_bytes: int) -> tuple[str, str]:
    """Both as text, to the MiB where they would look the same otherwise."""
    texts = format_bytes(need_bytes), format_bytes(limit_bytes)
    return texts if texts[0] != texts[1] else (f"{need_bytes / 2**20:.0f} MiB", f"{limit_bytes / 2**20:.0f} MiB")


class Answers(Protocol):
    """Predictions for runs on one cluster."""

    def of(self, spec: RunSpec, *, quick: bool = False) -> Prediction | Unpriced:
        """The prediction, or why there is none; ``quick`` may be less exact about its interval."""

    def room(self, spec: RunSpec) -> Room | Unpriced:
        """Its memory alone, which is quick to tell."""

    def machine(self, spec: RunSpec) -> Machine:
        """What times on the run's nodes are made of."""
