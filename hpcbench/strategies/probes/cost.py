"""A probe needs the memory of a single device's run."""

from __future__ import annotations

from hpcbench.strategies.data.cost import SingleCost
from hpcbench.strategies.probes.entry import PROBE_BLOCKS

COSTS = {PROBE_BLOCKS: SingleCost}
"""The cost of probes that train."""
