"""Seconds of a step from its work and a machine's fitted figures.

Only arithmetic that holds for numbers and for arrays of numbers is used (no ``max``, no branches): a fit prices all
its runs at once by giving arrays for the fields of ``Work``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise

from hpcbench.predict.decoder.work import Work

HOST_SHARPNESS = 8.0
"""Exponent of the smooth maximum of GPU time and host time of a stage."""
SHARD_SHARPNESS = 4.0
"""Exponent of the smooth maximum of a layer's computation and the gathering of the next layer's shards."""
BACKWARD_SHARE = 0.6
"""Share of a micro-batch that is backward pass."""


@dataclass(frozen=True)
class Figures:
    """Fitted figures of one machine and software. Efficiencies are relative to the vendor's peak."""

    matmul: float
    tile_passes: float
    attention: float
    attention_head_power: float
    memory: float
    host_layer_s: float
    host_tensor_s: float
    host_contended_s: float
    host_contended_power: float
    host_contended_hidden_power: float
    host_head_s: float
    tensor_rate: float
    tensor_wide_rate: float
    tensor_network_power: float
    tensor_message_s: float
    tensor_wide_message_s: float
    tensor_exposed: float
    send_rate: float
    send_s: float
    reduce_rate: float
    reduce_wide_rate: float
    network_power: float
    wide_share_power: float
    ring_hop_s: float
    overlap: float
    gather_rate: float
    gather_wide_rate: float
    gather_message_s: float
    gather_hop_s: float
    optimizer: float
    optimizer_tensor_s: float
    step_s: float
    straggling: float
    shard_rate: float
    shard_wide_rate: float
    shard_message_s: float


FIGURE_NAMES = tuple(field.name for field in fields(Figures))


@dataclass(frozen=True)
class StepTime:
    """Parts of a step in seconds; ``total_s`` is their sum."""

    pipeline_s: float
    reduce_exposed_s: float
    gather_s: float
    optimizer_s: float
    other_s: float
    micro_batch_s: float

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.reduce_exposed_s + self.gather_s + self.optimizer_s + self.other_s


@dataclass(frozen=True)
class StepTerms:
    """Seconds of a step by their purpose; together they are the step.

    Traffic counts as far as a step is longer by it.
    """

    compute: float
    tensor_traffic: float
    expert_traffic: float
    context_traffic: float
    shard_traffic: float
    stage_traffic: float
    gradient_traffic: float
    bubble: float
    straggling: float
    optimizer: float
    fixed: float

    @property
    def own_s(self) -> float:
        """Seconds of a device's own work."""
        return self.compute + self.optimizer + self.fixed

    @property
    def traffic_s(self) -> float:
        inside_layers = self.tensor_traffic + self.expert_traffic + self.context_traffic + self.shard_traffic
        return inside_layers + self.stage_traffic + self.gradient_traffic

    @property
    def total_s(self) -> float:
        return self.own_s + self.traffic_s + self.bubble + self.straggling


def step_terms(work: Work, figures: Figures) -> StepTerms:
    """Split a step: traffic is removed kind by kind, and each kind counts by how much shorter the step becomes."""
    step = step_time(work, figures)
    silenced: tuple[dict[str, float], ...] = (
        {"layer_tensor_s": 0.0, "head_tensor_s": 0.0, "tensor_messages": 0.0},
        {"layer_exchange_s": 0.0, "layer_wide_exchange_s": 0.0},
        {"layer_context_s": 0.0},
        {"shard_layer_s": 0.0, "shard_messages": 0.0},
        {"stage_sends": 0.0},
    )
    pipeline_s, silent = [step.pipeline_s], step
    for fields_of_kind in silenced:
        work = replace(work, **fields_of_kind)
        silent = step_time(work, figures)
        pipeline_s.append(silent.pipeline_s)
    tensor, expert, context, shard, stage = (before - after for before, after in pairwise(pipeline_s))
    slowdown = 1.0 + figures.straggling * work.log_nodes
    compute = work.accumulation * silent.micro_batch_s
    return StepTerms(
        compute=compute,
        tensor_traffic=tensor,
        expert_traffic=expert,
        context_traffic=context,
        shard_traffic=shard,
        stage_traffic=stage,
        gradient_traffic=step.reduce_exposed_s + step.gather_s,
        bubble=silent.pipeline_s / slowdown - compute,
        straggling=silent.pipeline_s * (1.0 - 1.0 / slowdown),
        optimizer=step.optimizer_s,
        fixed=step.other_s,
    )


def _larger(left: float, right: float) -> float:
    return (left + right + abs(left - right)) / 2


def _smooth_larger(left: float, right: float, sharpness: float) -> float:
    larger: float = (left**sharpness + right**sharpness) ** (1.0 / sharpness)
    return larger


def _tensor_rate(work: Work, figures: Figures) -> float:
    wide_rate: float = figures.tensor_wide_rate * work.tensor_rate_ratio**figures.tensor_network_power
    return figures.tensor_rate * (1.0 - work.tensor_is_wide) + wide_rate * work.tensor_is_wide


def _exchange_s(work: Work, figures: Figures) -> float:
    """Seconds of a layer's exchange of tokens with experts, at the rates of tensor parallelism: inside nodes and
    between them at once."""
    return _larger(work.layer_exchange_s / figures.tensor_rate, work.layer_wide_exchange_s / figures.tensor_wide_rate)


def _context_s(work: Work, figures: Figures) -> float:
    """Seconds of a layer's messages around a context group."""
    wide = work.context_is_wide
    return work.layer_context_s / (figures.tensor_rate * (1.0 - wide) + figures.tensor_wide_rate * wide)


def _exposed(share: float, work: Work) -> float:
    """Return the part of messages that computation waits for: all where nothing overlaps."""
    return share + (1.0 - share) * work.is_exposed


def _layer_s(work: Work, figures: Figures) -> float:
    """GPU seconds of one layer, forward and backward, for one micro-batch."""
    attention = work.layer_attention_s / (figures.attention * work.head_width_ratio**figures.attention_head_power)
    # A block of keys and values arrives while attention reads the one before.
    attention = attention + _larger(_context_s(work, figures) - attention * (1.0 - work.is_exposed), 0.0)
    matmul = (work.layer_matmul_s + figures.tile_passes * work.layer_tile_s) / figures.matmul
    forward_again = 1.0 + work.recompute_share / 3.0
    wide = work.tensor_is_wide
    rate = _tensor_rate(work, figures)
    message = figures.tensor_message_s * (1.0 - wide) + figures.tensor_wide_message_s * wide * work.tensor / 16.0
    tensor = _exposed(figures.tensor_exposed, work) * work.layer_tensor_s / rate + work.tensor_messages * message
    messages = tensor + _exchange_s(work, figures)
    compute = (matmul + attention + work.layer_memory_s / figures.memory + messages) * forward_again
    shard_rate = figures.shard_rate * (1.0 - work.shard_is_wide) + figures.shard_wide_rate * work.shard_is_wide
    shards = work.shard_layer_s / shard_rate + work.shard_messages * figures.shard_message_s * (
        1.0 + work.shard_log_nodes
    )
    return _smooth_larger(compute + work.layer_accumulate_s / figures.memory, shards, SHARD_SHARPNESS)


def _head_s(work: Work, figures: Figures) -> float:
    """GPU seconds of the output head and the loss."""
    rate = _tensor_rate(work, figures)
    return (
        (work.head_matmul_s + figures.tile_passes * work.head_tile_s) / figures.matmul
        + (work.head_memory_s + work.head_accumulate_s) / figures.memory
        + _exposed(figures.tensor_exposed, work) * work.head_tensor_s / rate
    )


def step_time(work: Work, figures: Figures) -> StepTime:
    """Price a step: micro-batches through the slowest stage, fill and drain, exposed collectives, optimizer."""
    layer, head = _layer_s(work, figures), _head_s(work, figures)
    contended = figures.host_contended_s * work.tensor**figures.host_contended_power
    contended = contended * work.hidden_ratio**figures.host_contended_hidden_power
    host = figures.host_layer_s * work.host_ratio + figures.host_tensor_s * work.is_tensor
    host = (host + contended * work.is_host_contended) * (1.0 + work.recompute_share / 3.0)

    def stage(layers: float, heads: float) -> float:
        return _smooth_larger(
            layers * layer + heads * head, layers * host + heads * figures.host_head_s, HOST_SHARPNESS
        )

    sends = work.stage_sends * (work.stage_send_s / figures.send_rate + figures.send_s)
    slowest = _larger(
        _larger(stage(work.layers_first, 0.0), stage(work.layers_middle, 0.0)), stage(work.layers_last, 1.0)
    )
    slowest = slowest + sends
    all_stages = work.is_pipelined * stage(work.layers_total, 1.0) + (1.0 - work.is_pipelined) * slowest
    fill_and_drain = (all_stages + sends * (work.pipeline - 1.0) - slowest) / work.chunks
    pipeline = (work.accumulation * slowest + fill_and_drain) * (1.0 + figures.straggling * work.log_nodes)

    wide = work.reduce_is_wide
    share = work.data_node_share**figures.wide_share_power * work.reduce_rate_ratio**figures.network_power
    reduce_rate = figures.reduce_rate * (1.0 - wide) + figures.reduce_wide_rate * wide * share
    reduce = work.reduce_s / reduce_rate + work.reduce_messages * work.data_nodes * figures.ring_hop_s
    hidden = figures.overlap * BACKWARD_SHARE * slowest * (1.0 - work.is_exposed)
    exposed = _larger(reduce - hidden, 0.02 * reduce)
    wide = work.gather_is_wide
    gather_rate = figures.gather_rate * (1.0 - wide) + figures.gather_wide_rate * wide * share
    gather = work.gather_s / gather_rate
    gather = gather + work.gather_messages * (figures.gather_message_s + work.gather_nodes * figures.gather_hop_s)
    return StepTime(
        pipeline_s=pipeline,
        reduce_exposed_s=exposed,
        gather_s=gather,
        optimizer_s=work.optimizer_s / figures.optimizer + work.optimizer_tensors * figures.optimizer_tensor_s,
        other_s=figures.step_s,
        micro_batch_s=slowest,
    )
