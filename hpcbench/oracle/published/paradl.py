"""ParaDL's formulas (Kahira et al., HPDC'21; table III and equations 1 to 22 of its technical report of October 2020).

Times and bytes are those of the table: seconds per epoch, bytes per device. Sizes count items (numbers), per sample for
inputs and outputs and in all for weights; times of layers are seconds per sample, of updates seconds per iteration. The
paper calls a device PE; ``p = p1 * p2``, with ``p1`` replicas and ``p2`` devices inside each.

Where the table is silent or prints something else than its derivation, the reading is named in the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple


class Wire(NamedTuple):
    """The Hockney model of the narrowest link on a path: a message of m bytes takes ``alpha + m * beta``."""

    alpha_s: float
    beta_s_per_byte: float


class Layer(NamedTuple):
    """One layer as the table sums over it."""

    input_items: float
    output_items: float
    weight_items: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    halo_items: float = 0.0
    """Of the input and of the output's gradient together, that one neighbour needs; 0 for kernels of 1."""
    is_split: bool = True
    """Whether spatial, filter and channel split it: the authors list the layers that they do not."""


class Job(NamedTuple):
    """What is trained: ``D`` samples an epoch in global batches of ``B``, ``delta`` bytes an item."""

    samples: float
    batch: float
    layers: Sequence[Layer]
    item_bytes: int = 4

    @property
    def iterations(self) -> int:
        """Per epoch. The table writes D/B, the authors' program rounds it up."""
        return ceil(self.samples / self.batch)

    def sample_s(self, p: int = 1) -> float:
        """Forward and backward of one sample through all layers, each that is split by ``p`` devices."""
        return sum((layer.forward_s + layer.backward_s) / (p if layer.is_split else 1) for layer in self.layers)

    def update_s(self, p: int = 1) -> float:
        """Weight update of one iteration, where weights are split over ``p`` devices."""
        return sum(layer.update_s / (p if layer.is_split else 1) for layer in self.layers)

    def weight_bytes(self, p: int = 1) -> float:
        """That one device holds, where weights are split over ``p``."""
        return self.item_bytes * sum(layer.weight_items / (p if layer.is_split else 1) for layer in self.layers)

    def memory_bytes(self, activations: float = 1.0, weights_over: int = 1) -> float:
        """Twice, for gradients: ``activations`` of all activations, and the weights split over so many devices."""
        items = sum(layer.input_items + layer.output_items for layer in self.layers) * self.batch
        return 2 * (self.item_bytes * items * activations + self.weight_bytes(weights_over))


class Estimate(NamedTuple):
    """Per epoch, and per device."""

    compute_s: float
    comm_s: float
    memory_bytes: float

    @property
    def epoch_s(self) -> float:
        """Nothing overlaps in this model."""
        return self.compute_s + self.comm_s


def ring_all_reduce_s(p: int, message_bytes: float, wire: Wire) -> float:
    """Of a buffer of ``message_bytes`` on every device."""
    return 2 * (p - 1) * (wire.alpha_s + message_bytes / p * wire.beta_s_per_byte)


def ring_all_gather_s(p: int, part_bytes: float, wire: Wire) -> float:
    """Of ``part_bytes`` from every device."""
    return (p - 1) * (wire.alpha_s + part_bytes * wire.beta_s_per_byte)


def serial(job: Job) -> Estimate:
    """One device."""
    compute_s = job.samples * job.sample_s() + job.iterations * job.update_s()
    return Estimate(compute_s, 0.0, job.memory_bytes())


def data(job: Job, p: int, wire: Wire) -> Estimate:
    """Replicas; gradients all_reduced at once after the backward pass. The program rounds D/p up."""
    compute_s = ceil(job.samples / p) * job.sample_s() + job.iterations * job.update_s()
    comm_s = job.iterations * ring_all_reduce_s(p, job.weight_bytes(), wire)
    return Estimate(compute_s, comm_s, job.memory_bytes(1 / p))


def spatial(job: Job, p: int, wire: Wire) -> Estimate:
    """The extent of every sample split; halos per layer, and the gradients of weights that all devices hold."""
    return data_spatial(job, 1, p, wire, wire)


def pipeline(job: Job, stages: Sequence[Sequence[Layer]], segments: int, wire: Wire) -> Estimate:
    """GPipe: ``segments`` micro-batches through ``stages``.

    The update happens once per iteration, though equation 12 multiplies it by the bubble; memory is the table's, where
    equation 14 has a further factor of 2.
    """
    p = len(stages)
    forward_s = max(sum(layer.forward_s for layer in stage) for stage in stages)
    backward_s = max(sum(layer.backward_s for layer in stage) for stage in stages)
    update_s = max(sum(layer.update_s for layer in stage) for stage in stages)
    compute_s = job.samples * (p + segments - 1) / segments * (forward_s + backward_s) + job.iterations * update_s
    part_bytes = job.batch / segments * job.item_bytes
    sent_s = [wire.alpha_s + part_bytes * stage[-1].output_items * wire.beta_s_per_byte for stage in stages[:-1]]
    comm_s = 2 * job.iterations * (p + segments - 2) * max(sent_s, default=0.0)
    return Estimate(compute_s, comm_s, max(job._replace(layers=stage).memory_bytes() for stage in stages))


def filter_(job: Job, p: int, wire: Wire) -> Estimate:
    """Output channels split: all_gather of every layer's output but the last one's forward, all_reduce backward."""
    return data_filter(job, 1, p, wire, wire)


def channel(job: Job, p: int, wire: Wire) -> Estimate:
    """Input channels split: all_reduce forward and all_gather backward, which costs what ``filter_`` costs."""
    return filter_(job, p, wire)


def data_filter(job: Job, p1: int, p2: int, inner: Wire, outer: Wire, phi: float = 1.0) -> Estimate:
    """``p1`` replicas of ``p2`` devices each, which split filters; ``phi`` flows share a link between replicas.

    ``job.batch`` is the global batch.
    """
    batch = job.batch / p1
    parts_bytes = [batch * layer.output_items / p2 * job.item_bytes for layer in job.layers[:-1] if layer.is_split]
    gathered_s = 3 * sum(ring_all_gather_s(p2, part, inner) for part in parts_bytes)
    reduced_s = ring_all_reduce_s(p1, job.weight_bytes(p2), _crowded(outer, phi))
    compute_s = job.samples / p1 * job.sample_s(p2) + job.iterations * job.update_s(p2)
    return Estimate(compute_s, job.iterations * (gathered_s + reduced_s), job.memory_bytes(1 / p1, p2))


def data_spatial(job: Job, p1: int, p2: int, inner: Wire, outer: Wire, phi: float = 1.0) -> Estimate:
    """``p1`` replicas of ``p2`` devices each, which split the extent. Read from the authors' program.

    Gradients are reduced inside a replica first, then between replicas; the table has no row for it.
    """
    batch = job.batch / p1
    halos_s = [
        inner.alpha_s * 2 + batch * layer.halo_items * job.item_bytes * inner.beta_s_per_byte
        for layer in job.layers
        if layer.halo_items and layer.is_split and p2 > 1
    ]
    inside_s = ring_all_reduce_s(p2, job.weight_bytes(), inner)
    between_s = ring_all_reduce_s(p1, job.weight_bytes(), _crowded(outer, phi))
    compute_s = job.samples / p1 * job.sample_s(p2) + job.iterations * job.update_s()
    return Estimate(
        compute_s, job.iterations * (2 * sum(halos_s) + inside_s + between_s), job.memory_bytes(1 / (p1 * p2))
    )


def _crowded(wire: Wire, phi: float) -> Wire:
    return wire._replace(beta_s_per_byte=wire.beta_s_per_byte * phi)
