"""Pipelines: chunks of the model on the ranks of ``pp``, micro-batches passed from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.schedule import Action, actions, message_after
from hpcbench.parallel.strategies.pipeline import layout_of, wrong_cuts
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.groups import Group, make_group, make_group_of
from hpcbench.worker.pipeline.batch_norm import DeferredStatistics
from hpcbench.worker.pipeline.boundary import Boundaries
from hpcbench.worker.pipeline.chunk import Chunk
from hpcbench.worker.pipeline.cutting import blocks_of_chunks
from hpcbench.worker.pipeline.mail import Mail, make_channels, open_links
from hpcbench.worker.pipeline.measured import is_measured, measure_blocks, predicted
from hpcbench.worker.pipeline.runtime import Batch, Runtime
from hpcbench.worker.pipeline.staged import Staged, gathered, slots, take_chunks, tied_names
from hpcbench.worker.pipeline.tied import Tie, sum_tied
from hpcbench.worker.reducer import GradientReducer
from hpcbench.worker.strategies.base import Place, make_optimizer
from hpcbench.worker.strategies.model_parallel import ModelParallel, Shard
from hpcbench.worker.strategies.model_parallel import gathered as whole
from hpcbench.worker.tensor.collectives import Sharing
from hpcbench.worker.tensor.layers import split_blocks

scheduled = cache(actions)


class Pipeline(ModelParallel):
    """Any of the synchronous schedules: one update per step, when all micro-batches have been through."""

    axis = "pp"
    module: Staged
    runtime_kind: type[Runtime] = Runtime

    def setup(self, model: nn.Sequential, spec: RunSpec, place: Place) -> None:
        """As the base; then the runtime, which needs the chunks on their device."""
        self._place = place
        super().setup(model, spec, place)

        def another(purpose: str) -> Group:
            return make_group(self.mesh, place, "pp", purpose=purpose)

        channels = make_channels(self.own, self.layout, another)
        every = (message_after(action, self.layout) for own in self.schedule(spec.micro_batches) for action in own)
        open_links(channels, [one for one in every if one is not None], self.own.place, place.device)
        self.runtime = self.runtime_kind(
            layout=self.layout,
            rank=self.own.place,
            chunks={one: Chunk(self.module.chunk(one), spec.strategy == "zero_bubble") for one in self._numbers},
            mail=Mail(channels, place.device, place.wait_s),
            boundaries=self.boundaries,
            arithmetic=self.arithmetic,
            recompute=self.options["recompute"],
            wait_s=place.wait_s,
            reducers=self._reducer_of,
        )

        self._statistics: DeferredStatistics | None = None
        if self.options.get("batch_norm") == "deferred":
            self._statistics = DeferredStatistics(self.module)
            self.runtime.hooks.before = self._statistics.before

    def divide(self, model: nn.Sequential, spec: RunSpec) -> Staged:
        """This rank's chunks, with the names that they have in ``model``; the rest is let go."""
        self.layout = layout_of(spec)
        reason = wrong_cuts(spec, self.layout, len(model))
        if reason is not None:
            raise WorkerError(reason, status="unsupported", hint="fewer stages, or other cuts")
        measured = measure_blocks(model, spec, self._place) if is_measured(self.options) else None
        blocks = self.blocks = blocks_of_chunks(model, spec, self.options, self.layout)
        self.predicted = None if measured is None else predicted(measured, spec, self.layout, blocks)
        self.boundaries = Boundaries(model, blocks, spec, self._place.device)
        self._state = slots(model.state_dict().items(), model, blocks)
        self._parameters = slots(model.named_parameters(), model, blocks)
        self._numbers = self.layout.chunks_of(self.own.place)
        every = dict(model.named_parameters(remove_duplicate=False))
        everywhere = slots(every.items(), model, blocks)
        self._ties = [
            Tie(tuple(dict.fromkeys(self.layout.rank(everywhere[name].chunk, 0) for name in names)), every[names[0]])
            for names in tied_names(model, everywhere)
        ]
        chunks = take_chunks(model, blocks, self._numbers)
        if spec.tp_degree > 1:
            split_blocks(chunks.values(), Sharing(self.groups["tp"], by_tokens=False), spec)
        return Staged(chunks, self.layout, self.own, self.boundaries)

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """One for each chunk, so that it can send when the chunk is done; one for tied weights, after their sum."""
        assert isinstance(module, Staged)
        mine = {id(one) for one in module.parameters()}
        self._ties = [tie if id(tie.parameter) in mine else Tie(tie.places, None) for tie in self._ties]
        tied = [tie.parameter for tie in self._ties if tie.parameter is not None]
        self._reducer_of: dict[int, GradientReducer] = {}
        group = self._replicas()
        if group.size == 1:
            return []
        for number in self._numbers:
            own = [one for one in module.chunk(number).parameters() if all(one is not other for other in tied)]
            if own:
                self._reducer_of[number] = GradientReducer(own, group.members())
        late = [GradientReducer(tied, group.members())] if tied else []
        for reducer in late:
            reducer.is_paused = True
        return [*self._reducer_of.values(), *late]

    def _replicas(self) -> Group:
        """The ranks that hold the same chunks."""
        if not self.layout.replicas:
            return self.groups["dp"]
        stage = self.layout.ranks_of(self.layout.stage_of(self.own.place))
        return make_group_of((self.own.ranks[place] for place in stage), self._place)

    def make_optimizer(self, spec: RunSpec, place: Place) -> torch.optim.Optimizer:
        """A stage of pooling and flattening alone has nothing to update."""
        if any(True for _ in self.module.parameters()):
            return make_optimizer(spec, self.module)
        return make_optimizer(spec, nn.ParameterList([torch.zeros(())]))

    def step(self, feed: Feed, step: int) -> Tensor:
        """See ``Strategy.step``: the loss is the last stage's to tell."""
        self.clear_gradients()
        batch = self.samples_of(feed, step)
        runtime = self.runtime
        runtime.phases = self.phases
        with self._statistics.step() if self._statistics is not None else nullcontext():
            runtime.begin(self.schedule(len(batch.sizes)), batch)
            runtime.execute()
            loss = runtime.end()
        with self.phases("backward"):
            sum_tied(self._ties, self.own)
            self.finish_backward()
        with self.phases("optimizer"):
            self.update()
        # The ranks that share layers have all computed it: one of them says it.
        return loss if self.groups["tp"].place == 0 else torch.zeros_like(loss)

    def state(self) -> str:
        """For a person: where this rank stands in the schedule."""
        return self.runtime.state()

    def schedule(self, micro_batches: int) -> list[list[Action]]:
        """What every rank of the pipeline does in a step of so many micro-batches."""
        return scheduled(self.spec.strategy, self.layout, micro_batches)

    def samples_of(self, feed: Feed, step: int) -> Batch:
        """The replica's samples of ``step``, on the ranks that read them."""
        parts = [slice(part.start, part.stop) for part in feed.micro_shares(step, self.replica)]
        sizes = [part.stop - part.start for part in parts]
        self._know_shapes(feed, sizes)
        inputs: list[Tensor] = []
        targets: list[Tensor] = []
        is_first, is_last = 0 in self._numbers, self.layout.chunks - 1 in self._numbers
        if is_first or is_last:
            with self.phases("data"):
                all_inputs, all_targets = feed.batch(step, self.replica)
            inputs = [all_inputs[part] for part in parts] if is_first else []
            targets = [all_targets[part] for part in parts] if is_last else []
        return Batch(inputs, targets, sizes, feed.global_count(step))

    def weights(self) -> dict[str, Tensor]:
        """Gathered on the pipeline's first rank, one tensor after another."""
        return self._gathered(self.module.state_dict(), self._state)

    def gradients(self) -> dict[str, Tensor]:
        """As ``weights``; a tied weight's goes by its first name."""
        named = self.module.named_parameters()
        return self._gathered({name: one.grad for name, one in named if one.grad is not None}, self._parameters)

    def _gathered(self, tensors: dict[str, Tensor], places: dict[str, Any]) -> dict[str, Tensor]:
        mine = {own_name(name): self._whole(name, one) for name, one in tensors.items()}
        held = {name: one for name, one in mine.items() if name in places}
        return gathered(held, places, self.layout, self.own, self._place.device)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """Put together by the ranks that share a layer."""
        owner, _, own = name.rpartition(".")
        shards: dict[str, Shard] = getattr(self.module.get_submodule(owner), "shards", {})
        return whole(tensor.detach(), shards[own], self.groups["tp"]) if own in shards else tensor

    def _know_shapes(self, feed: Feed, sizes: Iterable[int]) -> None:
        """Of the partial batch too, so that no timed step has to find them out."""
        partial = feed.micro_shares(feed.steps_per_epoch - 1, self.replica)
        for size in {*sizes, *(len(part) for part in partial)}:
            self.boundaries.after(0, size)


def own_name(name: str) -> str:
    """A tensor of ``Staged`` by its name in the whole model.

    >>> own_name("chunks.1.3.conv1.weight")
    '3.conv1.weight'
    """
    return name.split(".", 2)[2]
