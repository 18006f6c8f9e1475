"""The published models of DDLBench (Jansen, MSc thesis 2020; Jansen et al., SC20) and ParaDL (Kahira et al.,
HPDC'21).

DDLBench: equation numbers are those of chapters 5 and 6 of the thesis, which has no formulas of memory. ParaDL:
table III and equations 1 to 22 of its technical report of October 2020, in seconds per epoch and bytes per
device. Its sizes count items (numbers), per sample for inputs and outputs and in total for weights; times of
layers are seconds per sample, of updates seconds per iteration. The paper calls a device PE; ``p = p1 * p2``,
with ``p1`` replicas of ``p2`` devices each. Where its table is silent or differs from its derivation, the
function names the reading."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from hpcbench.predict.collective_formulas import HockneyLink


def ddlbench_horovod_step_s(
    sequential_s: float, links: Sequence[HockneyLink], gradient_bytes: float, fusion_threshold_bytes: float
) -> float:
    """Equation 5.1: one batch on as many workers as the ring has links, all but the last fused all_reduce hidden.

    ``sequential_s`` is one device's time for the whole batch.
    """
    workers = len(links)
    last_bytes = min(gradient_bytes, fusion_threshold_bytes)
    hop_s = max(link.message_s(last_bytes / workers) for link in links)
    return sequential_s / workers + 2 * (workers - 1) * hop_s


def ddlbench_gpipe_compute_s(sequential_s: float, workers: int, micro_batches: int) -> float:
    """Equation 6.1. ``sequential_s`` is measured at the micro-batch size; stages are taken to be equal."""
    return sequential_s * (workers + micro_batches - 1) / (workers * micro_batches)


def ddlbench_gpipe_comm_s(transfers_s: Sequence[float], micro_batches: int) -> float:
    """Equation 6.2, with ``transfers_s[j]`` the time of one micro-batch from stage j to the next, both directions.

    While the pipeline fills, the slowest link so far counts, then the slowest of all, then that of what is left. Pipes
    of one or two stages have no such phases.
    """
    links = len(transfers_s)
    if links == 0:
        return 0.0
    filling_s = sum(max(transfers_s[: i + 1]) for i in range(links - 1))
    draining_s = sum(max(transfers_s[i:]) for i in range(1, links))
    return 2 * (filling_s + (micro_batches - (links - 1)) * max(transfers_s) + draining_s)


class ParadlLayer(NamedTuple):
    """The quantities of a layer that the table sums over."""

    input_items: float
    output_items: float
    weight_items: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    halo_items: float = 0.0
    """Items per sample that one neighbour needs of the input and of the output's gradient together; 0 for kernels of
    1."""
    is_split: bool = True
    """Whether spatial, filter and channel split it: the authors list the layers that they do not."""


class ParadlJob(NamedTuple):
    """A training job: ``D`` samples an epoch in global batches of ``B``, ``delta`` bytes an item."""

    samples: float
    batch: float
    layers: Sequence[ParadlLayer]
    item_bytes: int = 4

    @property
    def iterations(self) -> int:
        """Number of iterations per epoch. The table has D/B; the authors' program rounds it up."""
        return ceil(self.samples / self.batch)

    def sample_s(self, p: int = 1) -> float:
        """Forward and backward of one sample through all layers, each that is split by ``p`` devices."""
        return sum((layer.forward_s + layer.backward_s) / (p if layer.is_split else 1) for layer in self.layers)

    def update_s(self, p: int = 1) -> float:
        """Weight update of one iteration, where weights are split over ``p`` devices."""
        return sum(layer.update_s / (p if layer.is_split else 1) for layer in self.layers)

    def weight_bytes(self, p: int = 1) -> float:
        """Return the bytes of weights on one device, split over ``p``."""
        return self.item_bytes * sum(layer.weight_items / (p if layer.is_split else 1) for layer in self.layers)

    def memory_bytes(self, activations: float = 1.0, weights_over: int = 1) -> float:
        """Return the bytes of the share ``activations`` of activations and of split weights, doubled for gradients."""
        items = sum(layer.input_items + layer.output_items for layer in self.layers) * self.batch
        return 2 * (self.item_bytes * items * activations + self.weight_bytes(weights_over))


class ParadlEstimate(NamedTuple):
    """Seconds per epoch, and bytes per device."""

    compute_s: float
    comm_s: float
    memory_bytes: float

    @property
    def epoch_s(self) -> float:
        """Nothing overlaps in this model."""
        return self.compute_s + self.comm_s


def _shared(link: HockneyLink, flows: float) -> HockneyLink:
    """Return the link as seen by each of ``flows`` concurrent messages: the paper's contention penalty phi."""
    return link._replace(beta_s_per_byte=link.beta_s_per_byte * flows)


def paradl_all_reduce_s(p: int, message_bytes: float, link: HockneyLink) -> float:
    """Return the time of an all_reduce of ``message_bytes`` on every device."""
    return 2 * (p - 1) * link.message_s(message_bytes / p)


def paradl_all_gather_s(p: int, part_bytes: float, link: HockneyLink) -> float:
    """Return the time of an all_gather of ``part_bytes`` from every device."""
    return (p - 1) * link.message_s(part_bytes)


def paradl_data(job: ParadlJob, p: int, link: HockneyLink) -> ParadlEstimate:
    """Replicas, or one device; gradients all_reduced at once after the backward pass. The program rounds D/p up."""
    compute_s = ceil(job.samples / p) * job.sample_s() + job.iterations * job.update_s()
    comm_s = job.iterations * paradl_all_reduce_s(p, job.weight_bytes(), link)
    return ParadlEstimate(compute_s, comm_s, job.memory_bytes(1 / p))


def paradl_pipeline(
    job: ParadlJob, stages: Sequence[Sequence[ParadlLayer]], segments: int, link: HockneyLink
) -> ParadlEstimate:
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
    sent_s = [link.message_s(part_bytes * stage[-1].output_items) for stage in stages[:-1]]
    comm_s = 2 * job.iterations * (p + segments - 2) * max(sent_s, default=0.0)
    return ParadlEstimate(compute_s, comm_s, max(job._replace(layers=stage).memory_bytes() for stage in stages))


def paradl_data_filter(
    job: ParadlJob, p1: int, p2: int, inner: HockneyLink, outer: HockneyLink, phi: float = 1.0
) -> ParadlEstimate:
    """Estimate ``p1`` replicas of ``p2`` devices, which split filters; ``phi`` flows share a link between replicas.

    Forward an all_gather of every layer's output but the last one's, backward an all_reduce. Input channels split are
    an all_reduce forward and an all_gather backward, which costs as much.

    ``job.batch`` is the global batch.
    """
    batch = job.batch / p1
    parts_bytes = [batch * layer.output_items / p2 * job.item_bytes for layer in job.layers[:-1] if layer.is_split]
    gathered_s = 3 * sum(paradl_all_gather_s(p2, part, inner) for part in parts_bytes)
    reduced_s = paradl_all_reduce_s(p1, job.weight_bytes(p2), _shared(outer, phi))
    compute_s = job.samples / p1 * job.sample_s(p2) + job.iterations * job.update_s(p2)
    return ParadlEstimate(compute_s, job.iterations * (gathered_s + reduced_s), job.memory_bytes(1 / p1, p2))


def paradl_data_spatial(
    job: ParadlJob, p1: int, p2: int, inner: HockneyLink, outer: HockneyLink, phi: float = 1.0
) -> ParadlEstimate:
    """Estimate ``p1`` replicas of ``p2`` devices each, which split the extent, as in the authors' program.

    Gradients are reduced inside a replica first, then between replicas; the table has no row for it.
    """
    batch = job.batch / p1
    halos_s = [
        inner.latency_s * 2 + batch * layer.halo_items * job.item_bytes * inner.beta_s_per_byte
        for layer in job.layers
        if layer.halo_items and layer.is_split and p2 > 1
    ]
    inside_s = paradl_all_reduce_s(p2, job.weight_bytes(), inner)
    between_s = paradl_all_reduce_s(p1, job.weight_bytes(), _shared(outer, phi))
    compute_s = job.samples / p1 * job.sample_s(p2) + job.iterations * job.update_s()
    return ParadlEstimate(
        compute_s, job.iterations * (2 * sum(halos_s) + inside_s + between_s), job.memory_bytes(1 / (p1 * p2))
    )
