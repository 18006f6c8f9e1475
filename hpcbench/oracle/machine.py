"""What times are made of: a machine's rates and latencies, from its profile or from measurements on it."""

from __future__ import annotations

from typing import Literal

import msgspec

from hpcbench.oracle.collectives import Wire
from hpcbench.parallel.kernel import Compute, KernelSample

__all__ = ["CollectiveSample", "Comm", "Compute", "Depth", "KernelSample", "Machine", "Strategy"]

Depth = Literal["nominal", "calibrated", "fitted"]
"""By the profile; by measurements of parts; by whole runs."""


class CollectiveSample(msgspec.Struct, frozen=True, kw_only=True):
    """A measured collective, as a correction of its formula in ``oracle.collectives``.

    ``latency_s`` replaces the link's, ``beta_ratio`` multiplies its time per byte.
    """

    operation: str
    ranks: int
    nodes: int
    latency_s: float
    beta_ratio: float
    spread: float = 0.0
    from_bytes: float = 0.0
    """The smallest payload that it is for: of those for the same ranks the one with the largest that is not above."""


class Comm(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks reach each other."""

    intra_node: Wire
    inter_node: Wire
    links_per_node: int = 1
    """Links between nodes that a node has; groups that send at the same time share them."""
    striped: bool = False
    """Whether one group uses all links of a node (NCCL does, gloo does not)."""
    collectives: list[CollectiveSample] = []
    contention: dict[int, float] = {}
    """By flows that share a link: how much longer each takes (ParaDL's phi); without a figure their number."""
    overlap_slowdown: float = 1.0
    """How much slower a rank computes while a collective is under way (kappa of facts on Galvatron: 1.0 to 1.3)."""
    comm_slowdown: float = 1.0
    """How much slower a collective is while its rank computes: 1 where somebody else than the processor sends."""
    spread: float = 0.4
    """Relative uncertainty of a step's communication."""
    call_s: float = 0.0
    """What issuing a collective takes of the computing thread."""
    trees: bool = True
    """Whether the library knows tree all_reduces (NCCL from 2.4 on)."""
    by_hop: bool = False
    """Whether the latencies of a ring's links add up (NCCL), or every step waits for the longest."""


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy's library adds on this machine, found in runs of the calibration."""

    compute_factor: float = 1.0
    step_s: float = 0.0
    sample_s: float = 0.0
    """Per sample of a replica: where one rank reads and hands out what its group computes on."""


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a machine that whole runs were fitted with (``oracle.fitting``)."""

    name: str
    log_factor: float
    """Logarithm of the number found over the one before."""
    prior_spread: float
    """Standard deviation of its logarithm before any run was seen."""
    spread: float
    """And after."""

    @property
    def learned(self) -> float:
        """0: the runs say nothing of it, it is drawn to what it was before. Near 1: they alone decide."""
        return 1.0 - (self.spread / self.prior_spread) ** 2


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was fitted, and what the fitted machine says of it, without delays."""

    run: str
    measured_s: float
    predicted_s: float
    weight: float
    """1 where it counts fully; less for one that lies far off (Student's t)."""


class Posterior(msgspec.Struct, frozen=True, kw_only=True):
    """How sure the fitted numbers are: logarithms, normally distributed around those that the machine holds."""

    parameters: list[Fitted]
    roots: list[list[float]]
    """Lower triangular: its product with its transpose is the covariance of the logarithms."""
    run_spread: float
    """Of a run around the model: what launches of the same run differ by, and what the model lacks."""
    ranks: int
    """The most that a fitted run had."""
    doubling_spread: float
    """Uncertainty of the model's form, for the first doubling beyond; it grows with the root of their number."""
    residuals: list[Residual] = []


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as the oracle sees it. ``depth`` says where the numbers come from."""

    cluster: str
    device: str
    """``cpu`` or ``cuda``."""
    depth: Depth = "nominal"
    source: str = ""
    """The profile, or the calibration with its date and hash."""
    compute: Compute
    comm: Comm
    strategies: dict[str, Strategy] = {}
    straggling: float = 0.0
    """Relative spread of one rank's step around its mean: of p ranks the slowest counts."""
    delay_s: float = 0.0
    """What others on the machine (network, file system) hold a node up by in a step, on average: exponentially
    distributed, and of all nodes the one that is held up most counts."""
    base_bytes: float = 0.0
    """What a rank's process holds on the device before any tensor of the run."""
    memory_bytes: float | None = None
    """Of one rank: the device's, or its part of the node's."""
    notes: list[str] = []
    """What had to be guessed."""
    posterior: Posterior | None = None
