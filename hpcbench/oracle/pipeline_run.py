"""One rank of one pipeline, by the table of layers: what it computes, sends and keeps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.pieces import pieces_of
from hpcbench.oracle.split_model import SplitModel
from hpcbench.parallel.cutting import chunk_blocks
from hpcbench.parallel.layers import Layer, LayerTable
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.schedule import BACKWARD, FORWARD, WEIGHT, Action, Layout, rank_actions
from hpcbench.parallel.shard import even_ranges
from hpcbench.parallel.strategies.pipeline import OPTIONS, layout_of
from hpcbench.parallel.traffic import Traffic

_PREFETCH = 2
"""As ``worker.pipeline.mail.PREFETCH``."""


class Tie:
    """A weight that several chunks use."""

    def __init__(self, places: tuple[int, ...], size: int) -> None:
        self.places, self.bytes = places, size
        self.first, self.holders = places[0], len(places)


class PipelineRun:
    """One rank of one run, by the table."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int) -> None:
        self.spec, self.table = spec, table
        self.layout: Layout = layout_of(spec)
        self.place = Mesh.of(spec).coordinates(rank).pp
        self.chunks = self.layout.chunks_of(self.place)
        self.replicas = spec.dp_degree * self.layout.widths[self.layout.stage_of(self.place)]
        """Ranks that hold the same chunks."""
        options = {name: option.default for name, option in OPTIONS.items()} | spec.options
        self.recompute = options["recompute"]
        self.blocks = chunk_blocks(spec, options, self.layout, table)
        self._pieces = pieces_of(table, tuple(self.blocks))
        self.rows = self._pieces.rows
        """Of every chunk its rows of the table; the loss is the last one's."""
        self.sizes = [len(part) for part in even_ranges(spec.batch_size, spec.micro_batches)]
        self.split = SplitModel(spec, table, rank) if spec.tp_degree > 1 else None
        self._sizes: dict[int, list[int]] = {}
        self.scale = 2 if spec.precision == "fp64" else 1
        """Of the table's bytes, which are of fp32; lower precisions keep weights in it, and are an exception."""

    @cached_property
    def actions(self) -> list[Action]:
        """What this rank does in a step."""
        return rank_actions(self.spec.strategy, self.layout, self.place, self.spec.micro_batches)

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
    def ties(self) -> list[Tie]:
        """Weights that several ranks have."""
        placed = [(one, (self.layout.rank(chunk, 0) for chunk in one.chunks)) for one in self._pieces.ties]
        return [Tie(tuple(dict.fromkeys(places)), self.scale * one.size_bytes) for one, places in placed]

    def holds(self, tie: Tie) -> bool:
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
            if kind != WEIGHT:
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
            elif kind in (BACKWARD, WEIGHT):
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
        ready = min(_PREFETCH, len(self.sizes)) * max(self.sizes)
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
    def _kept_of(split: SplitModel, layer: Layer) -> int:
        share = split.kept_share(layer)
        return layer.activation_bytes * share.own // share.whole
