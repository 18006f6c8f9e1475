"""Pipelines: what a stage sends and holds, from its blocks' rows of the table and the schedule itself."""

from __future__ import annotations

from functools import cached_property
from math import prod

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.split_model import SplitModel
from hpcbench.parallel.buckets import BUCKET_CAP_MB, MIB, bucket_bytes
from hpcbench.parallel.cutting import chunk_blocks
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.schedule import FORWARD, WEIGHT, Action, Layout, actions, message_after
from hpcbench.parallel.shard import even_ranges
from hpcbench.parallel.strategies.pipeline import OPTIONS, layout_of
from hpcbench.parallel.traffic import Traffic, merged
from hpcbench.parallel.walk import live

_PREFETCH = 2
"""As ``worker.pipeline.mail.PREFETCH``."""


class PipelineCost:
    """``oracle.cost.Cost`` of all synchronous pipelines. Derivations are in docs/formulas.md."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Activations and gradients by the schedule, gradients of weights by the buckets of each chunk."""
        run = PipelineRun(spec, table, rank)
        calls = [
            Traffic(operation="send", group_size=2, payload_bytes=run.message_bytes(action))
            for action in run.schedule[run.place]
            if message_after(action, run.layout) is not None
        ]
        calls += run.shared_layers()
        for names in run.ties:
            if run.place == names.first:
                calls += [Traffic(operation="send", group_size=2, payload_bytes=names.bytes)] * (names.holders - 1)
            elif run.holds(names):
                calls.append(Traffic(operation="send", group_size=2, payload_bytes=names.bytes))
        if run.replicas > 1:
            late = [names.bytes for names in run.ties if run.holds(names)]
            groups = [run.own_tensors(chunk) for chunk in run.chunks]
            calls += [
                Traffic(operation="all_reduce", group_size=run.replicas, payload_bytes=payload)
                for sizes in [*groups, late]
                for payload in bucket_bytes(sizes, int(BUCKET_CAP_MB * MIB))
            ]
        return merged(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """The stage's weights, and the activations of the micro-batches that are alive together when most are."""
        run = PipelineRun(spec, table, rank)
        parameters = sum(sum(run.own_tensors(chunk)) for chunk in run.chunks)
        parameters += sum(names.bytes for names in run.ties if run.holds(names))
        copies = {"sgd": 1 if spec.momentum else 0}.get(spec.optimizer, 2)
        alive = (
            sum(run.kept_bytes(one.chunk, one.micro_batch) for one in kept) for kept in live(run.schedule[run.place])
        )
        return Memory(
            parameters_bytes=parameters,
            gradients_bytes=parameters,
            optimizer_bytes=copies * parameters,
            activations_bytes=max(alive, default=0) + run.recomputed_bytes(),
            buffers_bytes=run.buffer_bytes(),
            communication_bytes=run.waiting_bytes(),
        )


def boundary_bytes(table: LayerTable, blocks: range) -> int:
    """What a chunk of ``blocks`` hands on for one sample, in fp32."""
    return [row for row in table.layers if row.block == blocks.stop - 1][-1].output_bytes


class _Tie:
    """A weight that several chunks use."""

    def __init__(self, places: tuple[int, ...], size: int, name: str) -> None:
        self.places, self.bytes, self.name = places, size, name
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
        self.sizes = [len(part) for part in even_ranges(spec.batch_size, spec.micro_batches)]
        self.schedule = actions(spec.strategy, self.layout, spec.micro_batches)
        self.split = SplitModel(spec, table, rank) if spec.tp_degree > 1 else None
        self.scale = 2 if spec.precision == "fp64" else 1
        """Of the table's bytes, which are of fp32; lower precisions keep weights in it, and are an exception."""

    def boundary_bytes(self, chunk: int) -> int:
        """What ``chunk`` hands on, per sample: the output of the last row of its last block."""
        return self.scale * boundary_bytes(self.table, self.blocks[chunk])

    def message_bytes(self, action: Action) -> int:
        """Activations behind the chunk, or the gradient of what is before it."""
        chunk = action.chunk if action.kind == FORWARD else action.chunk - 1
        return self.sizes[action.micro_batch] * self.boundary_bytes(chunk)

    def _chunk_of(self, tensor: str) -> int:
        block = int(tensor.partition(".")[0])
        return next(number for number, held in enumerate(self.blocks) if block in held)

    @cached_property
    def ties(self) -> list[_Tie]:
        """Linear layers without weights of their own use an earlier block's of the same shape."""
        found: list[_Tie] = []
        for row in self.table.layers:
            shape = [row.attributes.get("out_features"), row.attributes.get("in_features")]
            if row.kind != "Linear" or row.parameters >= prod(one or 0 for one in shape):
                continue
            owner = next(one for one in self.table.parameter_tensors if one.shape == shape)
            chunks = (self._chunk_of(owner.name), self._chunk_of(row.name))
            places = tuple(dict.fromkeys(self.layout.rank(chunk, 0) for chunk in chunks))
            if chunks[0] != chunks[1]:
                found.append(_Tie(places, self.scale * owner.bytes_per_element * prod(owner.shape), owner.name))
        return found

    def holds(self, tie: _Tie) -> bool:
        """Whether this rank has a copy."""
        return self.place in tie.places

    def own_tensors(self, chunk: int) -> list[int]:
        """Bytes of the chunk's parameters, tied ones left out."""
        tied = {tie.name for tie in self.ties}
        return [
            self.scale * one.bytes_per_element * prod(one.shape)
            if self.split is None
            else self.split.parameter_bytes(one.name, one.shape)
            for one in self.table.parameter_tensors
            if one.name not in tied and self._chunk_of(one.name) == chunk
        ]

    def shared_layers(self) -> list[Traffic]:
        """Of transformer blocks that a stage's ranks share: two all_reduces in either pass (Shoeybi et al. 2019)."""
        if self.split is None:
            return []
        found = []
        for action in self.schedule[self.place]:
            held = sum(int(name) in self.blocks[action.chunk] for name in self.split.blocks)
            payload = self.sizes[action.micro_batch] * self.split.tokens * self.split.width * self.split.sent_bytes
            if held and action.kind != WEIGHT:
                one = Traffic(
                    operation="all_reduce", group_size=self.spec.tp_degree, payload_bytes=payload, count=2 * held
                )
                found.append(one)
        return found

    def buffer_bytes(self) -> int:
        """BatchNorm's, of all chunks; counters are integers in every precision."""
        return sum(
            (self.scale if one.bytes_per_element == 4 else 1) * one.bytes_per_element * prod(one.shape)
            for one in self.table.buffers
            if self._chunk_of(one.name) in self.chunks
        )

    def kept_bytes(self, chunk: int, micro_batch: int) -> int:
        """Of one micro-batch between its forward and its backward pass."""
        received = self.sizes[micro_batch] * self.boundary_bytes(chunk - 1) if chunk else 0
        is_last = micro_batch == len(self.sizes) - 1
        if self.recompute == "always" or (self.recompute == "except_last" and not is_last):
            return received
        return received + self._activation_bytes(chunk, self.sizes[micro_batch])

    def recomputed_bytes(self) -> int:
        """The largest chunk, whole again for one backward pass."""
        if self.recompute == "never":
            return 0
        return max(self._activation_bytes(chunk, max(self.sizes)) for chunk in self.chunks)

    def waiting_bytes(self) -> int:
        """Receives that stand ready: activations from before, gradients from behind."""
        ready = min(_PREFETCH, len(self.sizes)) * max(self.sizes)
        before = max((self.boundary_bytes(chunk - 1) for chunk in self.chunks if chunk), default=0)
        behind = max((self.boundary_bytes(one) for one in self.chunks if one < self.layout.chunks - 1), default=0)
        return ready * (before + behind) if self.layout.ranks > 1 else 0

    def _activation_bytes(self, chunk: int, samples: int) -> int:
        rows = [row for row in self.table.layers if min(row.block, self.table.blocks - 1) in self.blocks[chunk]]
        return self.scale * sum(samples * row.activation_bytes + row.activation_fixed_bytes for row in rows)
