"""One rank of one pipeline: its chunks of the layer table, its messages and its activations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.tensor_rank import TensorParallelRank
from hpcbench.parallel.layer_table import LayerRow, LayerTable, cached_by_identity
from hpcbench.parallel.mesh import RankMesh, even_ranges
from hpcbench.parallel.pipeline.schedules import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineLayout,
    rank_schedule_actions,
)
from hpcbench.parallel.pipeline.stage_balance import chunk_blocks
from hpcbench.parallel.strategies.pipeline import PIPELINE_OPTIONS, pipeline_layout
from hpcbench.parallel.traffic import Traffic


class TiedWeight(NamedTuple):
    """A weight that several chunks use."""

    name: str
    size_bytes: int
    chunks: tuple[int, ...]


class ChunkSlices(NamedTuple):
    """An entry a chunk in each list."""

    rows: list[list[int]]
    """Places in the table's ``layers``; the loss is the last chunk's."""
    tensors: list[list[int]]
    """Places in the table's ``parameter_tensors``, tied ones left out."""
    buffers: list[list[int]]
    """Places in the table's ``buffers``."""
    ties: list[TiedWeight]
    """Of the whole model."""
    outputs_bytes: list[int]
    """What is handed on, per sample: the output of the last row of the last block."""
    activations_bytes: list[tuple[int, int]]
    """What autograd keeps per sample, and for the batch."""


@cached_by_identity(64)
def slice_table(table: LayerTable, blocks: tuple[range, ...]) -> ChunkSlices:
    """``table`` with so many ``blocks`` in each chunk, in order. Bytes are of fp32."""
    chunk_of = [chunk for chunk, held in enumerate(blocks) for _ in held]
    rows: list[list[int]] = [[] for _ in blocks]
    for number, row in enumerate(table.layers):
        rows[chunk_of[min(row.block, table.blocks - 1)]].append(number)
    ties = _tied_weights(table, chunk_of)
    tied = {tie.name for tie in ties}
    tensors: list[list[int]] = [[] for _ in blocks]
    for place, one in enumerate(table.parameter_tensors):
        if one.name not in tied:
            tensors[chunk_of[_block_number(one.name)]].append(place)
    buffers: list[list[int]] = [[] for _ in blocks]
    for place, one in enumerate(table.buffers):
        buffers[chunk_of[_block_number(one.name)]].append(place)
    layers = [[table.layers[row] for row in own] for own in rows]
    return ChunkSlices(
        rows,
        tensors,
        buffers,
        ties,
        [own[-1].output_bytes for own in layers],
        [(sum(one.activation_bytes for one in own), sum(one.activation_fixed_bytes for one in own)) for own in layers],
    )


def _tied_weights(table: LayerTable, chunk_of: list[int]) -> list[TiedWeight]:
    """Linear layers without weights of their own use an earlier block's of the same shape."""
    found: list[TiedWeight] = []
    for row in table.layers:
        shape = [row.attributes.get("out_features"), row.attributes.get("in_features")]
        if row.kind != "Linear" or row.parameters >= prod(one or 0 for one in shape):
            continue
        owner = next(one for one in table.parameter_tensors if one.shape == shape)
        chunks = (chunk_of[_block_number(owner.name)], chunk_of[_block_number(row.name)])
        if chunks[0] != chunks[1]:
            found.append(TiedWeight(owner.name, owner.bytes_per_element * prod(owner.shape), chunks))
    return found


def _block_number(name: str) -> int:
    return int(name.partition(".")[0])


_PREFETCHED_MESSAGES = 2
"""As ``worker.pipeline.mail.PREFETCH``."""


class TiedWeightRanks:
    """A weight that several chunks use."""

    def __init__(self, places: tuple[int, ...], size: int) -> None:
        self.places, self.bytes = places, size
        self.first, self.holders = places[0], len(places)


class PipelineRank:
    """One rank of one run, by the table."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int) -> None:
        self.spec, self.table = spec, table
        self.layout: PipelineLayout = pipeline_layout(spec)
        self.place = RankMesh.of(spec).coordinates(rank).pp
        self.chunks = self.layout.chunks_of(self.place)
        self.replicas = spec.dp_degree * self.layout.stage_sizes[self.layout.stage_of(self.place)]
        """Ranks that hold the same chunks."""
        options = {name: option.default for name, option in PIPELINE_OPTIONS.items()} | spec.options
        self.recompute = options["recompute"]
        self.blocks = chunk_blocks(spec, options, self.layout, table)
        self._pieces = slice_table(table, tuple(self.blocks))
        self.rows = self._pieces.rows
        """Of every chunk its rows of the table; the loss is the last one's."""
        self.sizes = [len(part) for part in even_ranges(spec.batch_size, spec.micro_batches)]
        self.split = TensorParallelRank(spec, table, rank) if spec.tp_degree > 1 else None
        self._sizes: dict[int, list[int]] = {}
        self.scale = 2 if spec.precision == "fp64" else 1
        """Of the table's bytes, which are of fp32; lower precisions keep weights in it, and are an exception."""

    @cached_property
    def actions(self) -> list[Action]:
        """What this rank does in a step."""
        return rank_schedule_actions(self.spec.strategy, self.layout, self.place, self.spec.micro_batches)

    def boundary_bytes(self, chunk: int) -> int:
        """What ``chunk`` hands on, per sample: the output of the last row of its last block."""
        return self.scale * self._pieces.outputs_bytes[chunk]

    def message_bytes(self, action: Action) -> int:
        """Activations behind the chunk, or the gradient of what is before it."""
        chunk = action.chunk if action.kind == FORWARD else action.chunk - 1
        return self.sizes[action.micro_batch] * self.boundary_bytes(chunk)

    def own_places(self, chunk: int) -> list[int]:
        """Of the chunk's parameters in the table's, tied ones left out."""
        return self._pieces.tensors[chunk]

    @cached_property
    def ties(self) -> list[TiedWeightRanks]:
        """Weights that several ranks have."""
        placed = [(one, (self.layout.rank_of(chunk, 0) for chunk in one.chunks)) for one in self._pieces.ties]
        return [TiedWeightRanks(tuple(dict.fromkeys(places)), self.scale * one.size_bytes) for one, places in placed]

    def holds(self, tie: TiedWeightRanks) -> bool:
        """Whether this rank has a copy."""
        return self.place in tie.places

    def own_tensors(self, chunk: int) -> list[int]:
        """Bytes of the chunk's parameters, tied ones left out."""
        if chunk not in self._sizes:
            self._sizes[chunk] = self._sizes_of(chunk)
        return self._sizes[chunk]

    def _sizes_of(self, chunk: int) -> list[int]:
        chosen = [self.table.parameter_tensors[place] for place in self._pieces.tensors[chunk]]
        return [
            self.scale * one.bytes_per_element * prod(one.shape)
            if self.split is None
            else self.split.parameter_bytes(one.name, one.shape)
            for one in chosen
        ]

    def shared_layers(self) -> list[Traffic]:
        """All_reduces of transformer blocks that a stage's ranks share, by the rank's actions."""
        found = []
        for kind, chunk, one in self.actions:
            if kind != BACKWARD_WEIGHT:
                again = kind != FORWARD and self.is_recomputed(one, len(self.sizes))
                found += self.shared(chunk, self.sizes[one], again)
        return found

    def shared(self, chunk: int, samples: float, again: bool = False) -> list[Traffic]:
        """Of one pass through a chunk: two for each of its blocks (Shoeybi et al. 2019).

        ``again``: with the forward pass that is repeated before, which ends with the last layer that keeps something.
        """
        if self.split is None:
            return []
        held = [name for name in self.split.blocks if int(name) in self.blocks[chunk]]
        count = 2 * len(held)
        if again and held:
            is_at_end = int(held[-1]) == self.blocks[chunk].stop - 1
            drops = self.split.rows[f"{held[-1]}.dropout2"].attributes["p"] > 0
            count += 2 * len(held) - (is_at_end and not drops)
        payload = round(samples * self.split.tokens * self.split.width * self.split.sent_bytes)
        one = Traffic(operation="all_reduce", group_size=self.spec.tp_degree, payload_bytes=payload, count=count)
        return [one] if held else []

    def buffer_bytes(self) -> int:
        """BatchNorm's, of all chunks; counters are integers in every precision."""
        held = [self.table.buffers[place] for chunk in self.chunks for place in self._pieces.buffers[chunk]]
        return sum(
            (self.scale if one.bytes_per_element == 4 else 1) * one.bytes_per_element * prod(one.shape) for one in held
        )

    def _kept_bytes(self, chunk: int, micro_batch: int) -> int:
        """Of one micro-batch between its forward and its backward pass."""
        received = self.sizes[micro_batch] * self.boundary_bytes(chunk - 1) if chunk else 0
        if self.is_recomputed(micro_batch, len(self.sizes)):
            return received
        return received + self._activation_bytes(chunk, self.sizes[micro_batch])

    def is_recomputed(self, micro_batch: int, micro_batches: int) -> bool:
        """Whether a micro-batch's backward pass begins with another forward pass."""
        return self.recompute == "always" or (self.recompute == "except_last" and micro_batch < micro_batches - 1)

    def alive_bytes(self, own: Sequence[Action]) -> int:
        """Of the micro-batches that are between their passes when these are most, as ``own`` actions go on.

        From ``F`` until ``B``, or ``W`` of a split backward pass (``parallel.walk.live``).
        """
        alive = most = 0
        for kind, chunk, one in own:
            if kind == FORWARD:
                alive += self._kept_bytes(chunk, one % len(self.sizes))
                most = max(most, alive)
            elif kind in (BACKWARD, BACKWARD_WEIGHT):
                alive -= self._kept_bytes(chunk, one % len(self.sizes))
        return most

    def recomputed_bytes(self) -> int:
        """The largest chunk, whole again for one backward pass."""
        if self.recompute == "never":
            return 0
        return max(self._activation_bytes(chunk, max(self.sizes)) for chunk in self.chunks)

    def added_bytes(self) -> int:
        """Of a tensor's gradients that are added to those of the micro-batches before, what the activations that the
        first micro-batch has given back by then do not make up for.
        """
        if len(self.sizes) == 1:
            return 0
        largest = ((max(self.own_tensors(chunk), default=0), self._kept_bytes(chunk, 0)) for chunk in self.chunks)
        return max(max(0, fresh - kept) for fresh, kept in largest)

    def waiting_bytes(self) -> int:
        """Receives that stand ready: activations from before, gradients from behind."""
        ready = min(_PREFETCHED_MESSAGES, len(self.sizes)) * max(self.sizes)
        before = max((self.boundary_bytes(chunk - 1) for chunk in self.chunks if chunk), default=0)
        behind = max((self.boundary_bytes(one) for one in self.chunks if one < self.layout.chunks - 1), default=0)
        return ready * (before + behind) if self.layout.ranks > 1 else 0

    def _activation_bytes(self, chunk: int, samples: int) -> int:
        per_sample, fixed = self._activations[chunk]
        return self.scale * (samples * per_sample + fixed)

    @cached_property
    def _activations(self) -> Sequence[tuple[int, int]]:
        """Of every chunk: bytes per sample, and of the batch. Ranks that share blocks keep their part of each row."""
        if self.split is None:
            return self._pieces.activations_bytes
        kept = [[self._kept_of(self.split, self.table.layers[row]) for row in own] for own in self.rows]
        return [(sum(own), fixed) for own, (_, fixed) in zip(kept, self._pieces.activations_bytes, strict=True)]

    @staticmethod
    def _kept_of(split: TensorParallelRank, layer: LayerRow) -> int:
        share = split.kept_share(layer)
        return layer.activation_bytes * share.own // share.whole
