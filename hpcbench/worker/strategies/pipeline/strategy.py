"""The synchronous pipeline strategies: each rank holds chunks of the model and micro-batches pass from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.pipeline.schedules import Action, message_after, schedule_actions
from hpcbench.parallel.strategies.pipeline import cuts_exclusion, pipeline_layout
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext, RankGroup, make_group, make_group_of_ranks
from hpcbench.worker.strategies.base import make_optimizer
from hpcbench.worker.strategies.model_parallel import ModelParallelStrategy, TensorSharding
from hpcbench.worker.strategies.model_parallel import gather_shards as whole
from hpcbench.worker.strategies.pipeline.chunk import ActivationMetaCache, ModelChunk
from hpcbench.worker.strategies.pipeline.p2p import P2PTransport, make_p2p_groups, warm_up_links
from hpcbench.worker.strategies.pipeline.pipeline_runtime import PipelineBatch, PipelineRuntime
from hpcbench.worker.strategies.pipeline.stage_assignment import (
    assign_blocks,
    is_balance_measured,
    measure_blocks,
    predict_step,
)
from hpcbench.worker.strategies.pipeline.stage_module import (
    DeferredBatchNorm,
    StageModule,
    TiedParameter,
    gather_on_first_rank,
    locate_tensors,
    slice_chunks,
    sum_tied_gradients,
    tied_parameter_names,
)
from hpcbench.worker.strategies.tensor_layers import TensorParallelComm, split_transformer_blocks

cached_actions = cache(schedule_actions)


class PipelineStrategy(ModelParallelStrategy):
    """Any of the synchronous schedules: one update per step, when all micro-batches have been through."""

    axis = "pp"
    module: StageModule
    runtime_kind: type[PipelineRuntime] = PipelineRuntime

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """As the base; then the runtime, which needs the chunks on their device."""
        self._place = place
        super().setup(model, spec, place)

        def another(purpose: str) -> RankGroup:
            return make_group(self.mesh, place, "pp", purpose=purpose)

        channels = make_p2p_groups(self.own, self.layout, another)
        every = (message_after(action, self.layout) for own in self.schedule(spec.micro_batches) for action in own)
        warm_up_links(channels, [one for one in every if one is not None], self.own.place, place.device)
        splits_backward = get_strategy(spec.strategy).splits_backward
        self.runtime = self.runtime_kind(
            layout=self.layout,
            rank=self.own.place,
            chunks={one: ModelChunk(self.module.chunk(one), splits_backward) for one in self._numbers},
            mail=P2PTransport(channels, place.device, place.wait_s),
            boundaries=self.boundaries,
            arithmetic=self.arithmetic,
            recompute=self.options["recompute"],
            wait_s=place.wait_s,
            reducers=self._reducer_of,
        )

        self._statistics: DeferredBatchNorm | None = None
        if self.options.get("batch_norm") == "deferred":
            self._statistics = DeferredBatchNorm(self.module)
            self.runtime.hooks.before = self._statistics.before

    def divide(self, model: nn.Sequential, spec: RunSpec) -> StageModule:
        """This rank's chunks, with the names that they have in ``model``; the rest is let go."""
        self.layout = pipeline_layout(spec)
        reason = cuts_exclusion(spec, self.layout, len(model))
        if reason is not None:
            raise WorkerError(reason, status="unsupported", hint="fewer stages, or other cuts")
        measured = measure_blocks(model, spec, self._place) if is_balance_measured(self.options) else None
        blocks = self.blocks = assign_blocks(model, spec, self.options, self.layout)
        self.predicted = None if measured is None else predict_step(measured, spec, self.layout, blocks)
        self.boundaries = ActivationMetaCache(model, blocks, spec, self._place.device)
        self._state = locate_tensors(model.state_dict().items(), model, blocks)
        self._parameters = locate_tensors(model.named_parameters(), model, blocks)
        self._numbers = self.layout.chunks_of(self.own.place)
        every = dict(model.named_parameters(remove_duplicate=False))
        everywhere = locate_tensors(every.items(), model, blocks)
        self._ties = [
            TiedParameter(
                tuple(dict.fromkeys(self.layout.rank_of(everywhere[name].chunk, 0) for name in names)), every[names[0]]
            )
            for names in tied_parameter_names(model, everywhere)
        ]
        chunks = slice_chunks(model, blocks, self._numbers)
        if spec.tp_degree > 1:
            split_transformer_blocks(chunks.values(), TensorParallelComm(self.groups["tp"], by_tokens=False), spec)
        return StageModule(chunks, self.layout, self.own, self.boundaries)

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """One for each chunk, so that it can send when the chunk is done; one for tied weights, after their sum."""
        assert isinstance(module, StageModule)
        mine = {id(one) for one in module.parameters()}
        self._ties = [tie if id(tie.parameter) in mine else TiedParameter(tie.places, None) for tie in self._ties]
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

    def _replicas(self) -> RankGroup:
        """The ranks that hold the same chunks."""
        if not self.layout.replicas:
            return self.groups["dp"]
        stage = self.layout.ranks_of(self.layout.stage_of(self.own.place))
        return make_group_of_ranks((self.own.ranks[place] for place in stage), self._place)

    def make_optimizer(self, spec: RunSpec, place: RankContext) -> torch.optim.Optimizer:
        """A stage of pooling and flattening alone has nothing to update."""
        if any(True for _ in self.module.parameters()):
            return make_optimizer(spec, self.module)
        return make_optimizer(spec, nn.ParameterList([torch.zeros(())]))

    def step(self, feed: DataFeed, step: int) -> Tensor:
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
            sum_tied_gradients(self._ties, self.own)
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
        return cached_actions(self.spec.strategy, self.layout, micro_batches)

    def samples_of(self, feed: DataFeed, step: int) -> PipelineBatch:
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
        return PipelineBatch(inputs, targets, sizes, feed.global_count(step))

    def weights(self) -> dict[str, Tensor]:
        """Gathered on the pipeline's first rank, one tensor after another."""
        return self._gathered(self.module.state_dict(), self._state)

    def gradients(self) -> dict[str, Tensor]:
        """As ``weights``; a tied weight's goes by its first name."""
        named = self.module.named_parameters()
        return self._gathered({name: one.grad for name, one in named if one.grad is not None}, self._parameters)

    def _gathered(self, tensors: dict[str, Tensor], places: dict[str, Any]) -> dict[str, Tensor]:
        mine = {name_in_model(name): self._whole(name, one) for name, one in tensors.items()}
        held = {name: one for name, one in mine.items() if name in places}
        return gather_on_first_rank(held, places, self.layout, self.own, self._place.device)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """Put together by the ranks that share a layer."""
        owner, _, own = name.rpartition(".")
        shards: dict[str, TensorSharding] = getattr(self.module.get_submodule(owner), "shards", {})
        return whole(tensor.detach(), shards[own], self.groups["tp"]) if own in shards else tensor

    def _know_shapes(self, feed: DataFeed, sizes: Iterable[int]) -> None:
        """Of the partial batch too, so that no timed step has to find them out."""
        partial = feed.micro_shares(feed.steps_per_epoch - 1, self.replica)
        for size in {*sizes, *(len(part) for part in partial)}:
            self.boundaries.after(0, size)


def name_in_model(name: str) -> str:
    """A tensor of ``StageModule`` by its name in the whole model.

    >>> own_name("chunks.1.3.conv1.weight")
    '3.conv1.weight'
    """
    return name.split(".", 2)[2]
