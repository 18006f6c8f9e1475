"""A rank of a pipeline: its chunks of the layer table, its messages and its memory.

Four blocks on two ranks; with two chunks a rank (interleaved) every other block is on the same rank::

    blocks     0  1 | 2  3            0 | 1 | 2 | 3
    rank       0      1               0   1   0   1
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.row_cost import RowCost, unsharded_rows
from hpcbench.predict.tensor_sizes import (
    FP32_BYTES,
    input_bytes,
    parameter_bytes,
    parameter_number_bytes,
    saved_sample_bytes,
    tensor_bytes,
)
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, bucket_payload_bytes
from hpcbench.strategies.layer_table import LayerTable, TensorShape, cached_by_identity, memoized
from hpcbench.strategies.mesh import RankMesh, even_ranges
from hpcbench.strategies.pipeline.entry import PIPELINE_OPTIONS, pipeline_layout
from hpcbench.strategies.pipeline.schedules import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineLayout,
    rank_schedule_actions,
)
from hpcbench.strategies.pipeline.stage_balance import chunk_blocks
from hpcbench.strategies.tensor.rank_cost import TensorParallelRank
from hpcbench.strategies.traffic import Traffic

BUCKET_CAP_BYTES = int(DEFAULT_BUCKET_CAP_MB * MIB)
_PREFETCHED_MESSAGES = 2
"""Messages of a link that may have arrived before their action begins."""


class TiedWeight(NamedTuple):
    """A weight that several ranks of the pipeline use."""

    size_bytes: int
    ranks: tuple[int, ...]
    """Ranks along ``pp``; the first one sums the gradients."""

    def sends(self, rank: int) -> int:
        """Return the messages of ``rank`` with the weight or its gradient in a step."""
        return (len(self.ranks) - 1 if rank == self.ranks[0] else 1) if rank in self.ranks else 0


class ChunkSlices(NamedTuple):
    """The parts of a layer table, an entry a chunk in each list."""

    rows: list[list[int]]
    """Places in the table's ``layers``; the loss is the last chunk's."""
    tensors: list[list[int]]
    """Places in the table's ``parameter_tensors``, tied ones left out."""
    buffers: list[list[TensorShape]]
    ties: list[tuple[TensorShape, tuple[int, ...]]]
    """Tied weights of the whole model, with the chunks that use them."""


@cached_by_identity(64)
def slice_table(table: LayerTable, blocks: tuple[range, ...]) -> ChunkSlices:
    """Cut ``table`` into chunks of ``blocks``."""
    chunk_of = [chunk for chunk, held in enumerate(blocks) for _ in held]
    ties = _tied_weights(table, chunk_of)
    tied = {tensor.name for tensor, _ in ties}
    slices = ChunkSlices([[] for _ in blocks], [[] for _ in blocks], [[] for _ in blocks], ties)
    for number, row in enumerate(table.layers):
        slices.rows[chunk_of[min(row.block, table.blocks - 1)]].append(number)
    for place, tensor in enumerate(table.parameter_tensors):
        if tensor.name not in tied:
            slices.tensors[chunk_of[_block_number(tensor.name)]].append(place)
    for buffer in table.buffers:
        slices.buffers[chunk_of[_block_number(buffer.name)]].append(buffer)
    return slices


def _tied_weights(table: LayerTable, chunk_of: list[int]) -> list[tuple[TensorShape, tuple[int, ...]]]:
    """Linear layers without weights of their own use an earlier block's of the same shape."""
    ties: list[tuple[TensorShape, tuple[int, ...]]] = []
    for row in table.layers:
        shape = [row.attributes.get("out_features"), row.attributes.get("in_features")]
        if row.kind != "Linear" or row.parameters >= prod(extent or 0 for extent in shape):
            continue
        owner = next(tensor for tensor in table.parameter_tensors if tensor.shape == shape)
        chunks = (chunk_of[_block_number(owner.name)], chunk_of[_block_number(row.name)])
        if chunks[0] != chunks[1]:
            ties.append((owner, chunks))
    return ties


def _block_number(name: str) -> int:
    return int(name.partition(".")[0])


@memoized(16, lambda view: (view.table, (msgspec.json.encode(view.spec), view.index)))
def _tensor_rows(view: TensorParallelRank) -> list[RowCost]:
    """Return the rows of a tensor-parallel rank, which all stages share."""
    return view.describe_rows()


class PipelineRank:
    """A rank of a pipeline run: its chunks, messages and bytes, computed from the layer table."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int) -> None:
        self.spec, self.table = spec, table
        self.layout: PipelineLayout = pipeline_layout(spec)
        self.index = RankMesh.of(spec).coordinates(rank).pp
        self.chunks = self.layout.chunks_of(self.index)
        self.replicas = spec.dp_degree * self.layout.stage_sizes[self.layout.stage_of(self.index)]
        """Ranks that hold the same chunks."""
        options = {name: option.default for name, option in PIPELINE_OPTIONS.items()} | options_with_defaults(spec)
        self.recompute = options["recompute"]
        self.blocks = chunk_blocks(spec, options, self.layout, table)
        self._slices = slice_table(table, tuple(self.blocks))
        self.rows, self.parameter_places = self._slices.rows, self._slices.tensors
        """Places of each chunk's rows and of its parameter tensors: the loss is in the last chunk, tied tensors are
        left out."""
        self.micro_batch_sizes = [len(part) for part in even_ranges(spec.batch_size, spec.micro_batches)]
        self.tensor_rank = TensorParallelRank(spec, table, rank) if spec.tp_degree > 1 else None
        self._number_bytes = parameter_number_bytes(spec)
        """Bytes of a number between chunks: what autocast lowers is counted as fp32."""
        self._kept_bytes = lru_cache(maxsize=None)(self._chunk_kept_bytes)

    @cached_property
    def actions(self) -> list[Action]:
        """The rank's actions in a step."""
        return rank_schedule_actions(self.spec.strategy, self.layout, self.index, self.spec.micro_batches)

    def boundary_bytes(self, chunk: int) -> int:
        """Return the size of a chunk's output per sample: that of the last row of its last block."""
        return self.table.layers[self.rows[chunk][-1]].output_bytes * self._number_bytes // FP32_BYTES

    def message_bytes(self, action: Action) -> int:
        """Return the activations behind the action's chunk, or the gradient of its input."""
        chunk = action.chunk if action.kind == FORWARD else action.chunk - 1
        return self.micro_batch_sizes[action.micro_batch] * self.boundary_bytes(chunk)

    def parameter_bytes(self, chunk: int) -> list[int]:
        """Return the bytes of the chunk's parameters, tied ones left out."""
        return [self._tensor_bytes[place] for place in self.parameter_places[chunk]]

    @cached_property
    def _tensor_bytes(self) -> list[int]:
        view, tensors = self.tensor_rank, self.table.parameter_tensors
        if view is None:
            return parameter_bytes(self.spec, self.table)
        return [view.parameter_bytes(tensor.name, tensor.shape) for tensor in tensors]

    @cached_property
    def ties(self) -> list[TiedWeight]:
        """Weights that several ranks of the pipeline hold."""
        return [
            TiedWeight(
                tensor_bytes(self.spec, tensor), tuple(dict.fromkeys(self.layout.rank_of(chunk, 0) for chunk in chunks))
            )
            for tensor, chunks in self._slices.ties
        ]

    def tied_bytes(self, rank: int) -> list[int]:
        """Return the sizes of the tied weights on a rank of the pipeline."""
        return [tie.size_bytes for tie in self.ties if rank in tie.ranks]

    def bucket_traffic(self, sizes: Sequence[int]) -> list[Traffic]:
        """Return the all_reduces over replicas of gradients of ``sizes``; none without replicas."""
        if self.replicas < 2:
            return []
        return [
            Traffic(operation="all_reduce", group_size=self.replicas, payload_bytes=payload)
            for payload in bucket_payload_bytes(sizes, BUCKET_CAP_BYTES)
        ]

    def tensor_parallel_step_traffic(self) -> list[Traffic]:
        """Return the all_reduces of transformer blocks that a stage's ranks share, by the rank's actions."""
        calls = []
        for kind, chunk, micro_batch in self.actions:
            if kind != BACKWARD_WEIGHT:
                recomputed = kind != FORWARD and self.is_recomputed(micro_batch, len(self.micro_batch_sizes))
                calls += self.tensor_parallel_traffic(chunk, self.micro_batch_sizes[micro_batch], recomputed)
        return calls

    def tensor_parallel_traffic(self, chunk: int, samples: float, recomputed: bool = False) -> list[Traffic]:
        """Return the calls of one pass through a chunk: two for each of its blocks (Shoeybi et al. 2019).

        ``recomputed``: with the forward pass that is repeated before, which ends with the last layer that keeps
        something.
        """
        view = self.tensor_rank
        names = [] if view is None else [name for name in view.blocks if int(name) in self.blocks[chunk]]
        if view is None or not names:
            return []
        count = 2 * len(names)
        if recomputed:
            is_at_end = int(names[-1]) == self.blocks[chunk].stop - 1
            drops = view.rows[f"{names[-1]}.dropout2"].attributes["p"] > 0
            count += 2 * len(names) - (is_at_end and not drops)
        payload = round(samples * view.tokens * view.width * view.sent_bytes)
        return [Traffic(operation="all_reduce", group_size=self.spec.tp_degree, payload_bytes=payload, count=count)]

    def buffers(self, chunk: int) -> list[TensorShape]:
        """Return the chunk's buffers."""
        return self._slices.buffers[chunk]

    def kept_bytes(self, chunk: int, micro_batch: int) -> int:
        """Return the bytes of one micro-batch between its forward and its backward pass."""
        is_recomputed = self.is_recomputed(micro_batch, len(self.micro_batch_sizes))
        return self._kept_bytes(chunk, self.micro_batch_sizes[micro_batch], is_recomputed)

    def _chunk_kept_bytes(self, chunk: int, samples: int, is_recomputed: bool) -> int:
        boundary_kept = self.boundary_kept_bytes(chunk, samples)
        return boundary_kept if is_recomputed else boundary_kept + self.activation_bytes(chunk, samples)

    def boundary_kept_bytes(self, chunk: int, samples: int) -> int:
        """Return the bytes of a chunk's received input and of its output that are not in its rows.

        Both stay until the backward pass. The table has what lies between two chunks at its first user: where the next
        row keeps its input there, it is in the receiver's rows, and else in the sender's.
        """
        size = 0
        if chunk and not self._is_kept_behind(chunk - 1):
            size += self.boundary_bytes(chunk - 1)
        if chunk < self.layout.chunks - 1 and self._is_kept_behind(chunk):
            size += self.boundary_bytes(chunk)
        return samples * size

    def _is_kept_behind(self, chunk: int) -> bool:
        layer = self.table.layers[self.rows[chunk + 1][0]]
        return layer.activation_bytes >= input_bytes(layer)

    def is_recomputed(self, micro_batch: int, micro_batches: int) -> bool:
        """Return whether a micro-batch's backward pass begins with another forward pass."""
        return self.recompute == "always" or (self.recompute == "except_last" and micro_batch < micro_batches - 1)

    def alive_bytes(self, actions: Sequence[Action]) -> int:
        """Return the largest sum of activations of micro-batches between their passes, as ``actions`` go on.

        A micro-batch is alive from ``F`` until ``B``, or ``W`` of a split backward pass.
        """
        alive = peak = 0
        for kind, chunk, number in actions:
            micro_batch = number % len(self.micro_batch_sizes)
            if kind == FORWARD:
                alive += self.kept_bytes(chunk, micro_batch)
                peak = max(peak, alive)
            elif kind in (BACKWARD, BACKWARD_WEIGHT):
                alive -= self.kept_bytes(chunk, micro_batch)
        return peak

    def receive_buffer_bytes(self) -> int:
        """Return the bytes of receives that stand ready: activations from before, gradients from behind."""
        if self.layout.ranks == 1:
            return 0
        samples = min(_PREFETCHED_MESSAGES, len(self.micro_batch_sizes)) * max(self.micro_batch_sizes)
        before = max((self.boundary_bytes(chunk - 1) for chunk in self.chunks if chunk), default=0)
        behind = [self.boundary_bytes(chunk) for chunk in self.chunks if chunk < self.layout.chunks - 1]
        return samples * (before + max(behind, default=0))

    def activation_bytes(self, chunk: int, samples: int) -> int:
        """Return the bytes that autograd keeps of ``samples``, but for samples of the data set themselves."""
        views = 0 if chunk else samples * saved_sample_bytes(self.spec, self.table)
        saved = sum(self.row_costs[row].saved_bytes for row in self.rows[chunk])
        return saved * samples // self.row_samples - views

    @cached_property
    def row_costs(self) -> list[RowCost]:
        """Costs of the table's rows for ``row_samples``. Ranks that share blocks keep a part."""
        return unsharded_rows(self.spec, self.table) if self.tensor_rank is None else _tensor_rows(self.tensor_rank)

    @property
    def row_samples(self) -> int:
        """Samples of a micro-batch; some have one more."""
        return self.spec.batch_size // self.spec.micro_batches
