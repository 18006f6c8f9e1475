"""The synchronous pipeline strategies: each rank holds chunks of the model; micro-batches pass from rank to rank.

On cuda each chunk runs once before the first step, and communicators are created: CUDA loads a kernel at its first
launch and may then wait for the whole device; NCCL creates a communicator with its first call, in which each member
waits for the others. Neither should happen while messages are awaited, or be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.results.schema import TimelineSpan
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.pipeline.entry import cuts_exclusion, pipeline_layout
from hpcbench.strategies.pipeline.exchange_order import pipeline_links
from hpcbench.strategies.pipeline.schedules import Action, schedule_actions
from hpcbench.strategies.pipeline.train import action_timeline, p2p, stage_module
from hpcbench.strategies.pipeline.train.chunk import ActivationMetaCache, ModelChunk, backward_from, in_run_format
from hpcbench.strategies.pipeline.train.pipeline_runtime import PipelineBatch, PipelineRuntime
from hpcbench.strategies.pipeline.train.stage_assignment import assign_blocks, measure_blocks, predict_step
from hpcbench.strategies.pipeline.train.stage_module import TiedParameter
from hpcbench.strategies.tensor.train.layers import TensorParallelComm, refuse_shared_layers, split_transformer_blocks
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed import point_to_point
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext, RankGroup, make_group_of_ranks
from hpcbench.worker.layers import zero_batch
from hpcbench.worker.model_execution import MixedPrecision, summed_loss
from hpcbench.worker.model_parallel_layers import ModelParallelStrategy, group_reducers
from hpcbench.worker.strategy import make_optimizer

cached_actions = cache(schedule_actions)


class PipelineStrategy(ModelParallelStrategy):
    """Any of the synchronous schedules: one update per step, after the backward passes of all micro-batches."""

    reference = "pipeline"

    axis = "pp"
    module: stage_module.StageModule

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        self.context = context
        super().setup(model, spec, context)
        splits = get_strategy(spec.strategy).pipeline.splits_backward
        chunks = {number: ModelChunk(self.module.chunk(number), splits) for number in self._chunk_numbers}
        self.runtime = PipelineRuntime(
            layout=self.layout,
            rank=self.group.place,
            chunks=chunks,
            transport=self._make_transport(chunks),
            boundaries=self.boundaries,
            arithmetic=self.arithmetic,
            recompute=str(self.options["recompute"]),
            wait_s=context.wait_s,
            reducers=self._reducer_of,
        )
        self._statistics: stage_module.DeferredBatchNorm | None = None
        if self.options.get("batch_norm") == "deferred":
            self._statistics = stage_module.DeferredBatchNorm(self.module)
            self.runtime.hooks.before = self._statistics.before

    def _make_transport(self, chunks: Mapping[int, ModelChunk]) -> p2p.MessageTransport:
        """Run the chunks once, create all communicators, and open the links last."""
        context, schedule = self.context, self.schedule(self.spec.micro_batches)
        recomputes = self.options["recompute"] != "never"
        run_chunks_once(chunks, self.boundaries, self.spec, self.arithmetic, self.reducers, recomputes)
        open_communicators([self._reduced_group] if self.reducers else [], self._ties, self.group, context.device)
        links = p2p.open_links(self.group, pipeline_links(schedule, self.layout), context)
        return p2p.MessageTransport(links, context.device, context.wait_s)

    def split_model(self, model: nn.Sequential, spec: RunSpec) -> stage_module.StageModule:
        """Return this rank's chunks, with their names in ``model``.

        Raises:
            WorkerError: ``unsupported`` if the model has too few blocks or the cuts do not fit.
        """
        self.layout = pipeline_layout(spec)
        reason = cuts_exclusion(spec, self.layout, len(model))
        if reason is not None:
            raise unsupported(reason, "fewer stages, or other cuts")
        if spec.tp_degree > 1:
            refuse_shared_layers(model)
        profile = measure_blocks(model, spec, self.options, self.context)
        self.blocks = blocks = assign_blocks(model, spec, self.options, self.layout)
        self.predicted = None if profile is None else predict_step(profile, spec, self.layout, blocks)
        self.boundaries = ActivationMetaCache(model, blocks, spec, self.context.device)
        self._chunk_of_state = stage_module.chunks_of_tensors(model.state_dict(), model, blocks)
        self._chunk_of_parameter = stage_module.chunks_of_tensors(dict(model.named_parameters()), model, blocks)
        self._chunk_numbers = self.layout.chunks_of(self.group.place)
        self._ties = stage_module.tied_parameters(model, blocks, self.layout)
        chunks = stage_module.slice_chunks(model, blocks, self._chunk_numbers)
        if spec.tp_degree > 1:
            split_transformer_blocks(chunks.values(), TensorParallelComm(self.groups["tp"], by_tokens=False), spec)
        return stage_module.StageModule(chunks, self.layout, self.group, self.boundaries)

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """Create a reducer per chunk, which sends when the chunk is done, and one for tied weights, after their sum."""
        assert isinstance(module, stage_module.StageModule)
        own_ids = {id(parameter) for parameter in module.parameters()}
        self._ties = [tie if id(tie.parameter) in own_ids else tie._replace(parameter=None) for tie in self._ties]
        tied = [tie.parameter for tie in self._ties if tie.parameter is not None]
        self._reducer_of: dict[int, GradientReducer] = {}
        group = self.groups["dp"]
        if self.layout.replicas:
            stage_ranks = self.layout.ranks_of(self.layout.stage_of(self.group.place))
            group = make_group_of_ranks((self.group.ranks[rank] for rank in stage_ranks), self.context)
        self._reduced_group = group
        tied_ids = {id(parameter) for parameter in tied}
        for number in self._chunk_numbers:
            untied = [parameter for parameter in module.chunk(number).parameters() if id(parameter) not in tied_ids]
            for reducer in group_reducers((untied, group)):
                self._reducer_of[number] = reducer
        tied_reducers = group_reducers((tied, group))
        for reducer in tied_reducers:
            reducer.is_paused = True
        return [*self._reducer_of.values(), *tied_reducers]

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> torch.optim.Optimizer:
        # A stage of pooling and flattening has no parameters; optimizers refuse an empty list.
        has_parameters = any(True for _ in self.module.parameters())
        return make_optimizer(spec, self.module if has_parameters else nn.ParameterList([torch.zeros(())]))

    def step(self, feed: DataFeed, step: int) -> Tensor:
        self.clear_gradients()
        batch = self.samples_of(feed, step)
        self.runtime.phases = self.phases
        with self._statistics.step() if self._statistics is not None else nullcontext():
            self.runtime.begin(self.schedule(len(batch.sizes)), batch)
            self.runtime.execute()
            loss = self.runtime.end()
        with self.phases("backward"):
            stage_module.sum_tied_gradients(self._ties, self.group)
            self.finish_gradient_reduction()
        with self.phases("optimizer"):
            self.update()
        # All ranks that share layers have computed the loss; only the first one reports it.
        return loss if self.groups["tp"].place == 0 else torch.zeros_like(loss)

    def progress_report(self) -> str:
        return self.runtime.progress_report()

    def watchdog(self, context: RankContext, abandon: Callable[[BaseException], None]) -> AbstractContextManager[None]:
        """Watch the progress on cuda; on a cpu every wait has its own time limit."""
        if context.device.type != "cuda":
            return nullcontext()
        timeout_s = action_timeline.WATCHDOG_TIMEOUT_FRACTION * context.wait_s
        return action_timeline.watch_progress(self.runtime.progress, self.runtime.progress_report, timeout_s, abandon)

    def record_actions(self, feed: DataFeed, step: int, device: torch.device) -> list[TimelineSpan]:
        """Record the first step with a whole batch from number ``step`` on; the ranks begin it together."""
        while feed.global_count(step) < feed.global_batch_size and feed.steps_per_epoch > 1:
            step += 1
        self.runtime.recorder = recorder = action_timeline.ActionRecorder(device)
        try:
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
            recorder.start()
            self.step(feed, step)
        finally:
            self.runtime.recorder = None
        return [
            TimelineSpan(span.action.kind, span.action.chunk, span.action.micro_batch, span.begin, span.end)
            for span in recorder.spans_s()
        ]

    def schedule(self, micro_batches: int) -> list[list[Action]]:
        """Return the actions of every rank of the pipeline in a step of ``micro_batches``."""
        return cached_actions(self.spec.strategy, self.layout, micro_batches)

    def samples_of(self, feed: DataFeed, step: int) -> PipelineBatch:
        """Return the replica's samples of ``step``; inputs and targets only on the ranks that read them."""
        parts = [slice(part.start, part.stop) for part in feed.micro_batch_ranges(step, self.replica)]
        sizes = {number: part.stop - part.start for number, part in enumerate(parts)}
        self._prepare_boundaries(feed, sizes.values())
        is_first, is_last = 0 in self._chunk_numbers, self.layout.chunks - 1 in self._chunk_numbers
        inputs: dict[int, Tensor] = {}
        targets: dict[int, Tensor] = {}
        if is_first or is_last:
            with self.phases("data"):
                whole_inputs, whole_targets = feed.batch(step, self.replica)
            inputs = {number: whole_inputs[part] for number, part in enumerate(parts) if is_first}
            targets = {number: whole_targets[part] for number, part in enumerate(parts) if is_last}
        divisors = dict.fromkeys(sizes, feed.global_count(step))
        return PipelineBatch(inputs, targets, sizes, divisors, dict.fromkeys(sizes, 1.0))

    def weights(self) -> dict[str, Tensor]:
        return self._gather_stages(super().weights(), self._chunk_of_state)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by name; a tied weight has its first name."""
        return self._gather_stages(super().gradients(), self._chunk_of_parameter)

    def _gather_stages(self, tensors: dict[str, Tensor], chunk_of: dict[str, int]) -> dict[str, Tensor]:
        # In the whole model the names have no "chunks.<number>." in front.
        own_tensors = {name.split(".", 2)[2]: tensor for name, tensor in tensors.items()}
        return stage_module.gather_on_first_rank(own_tensors, chunk_of, self.layout, self.group, self.context.device)

    def _prepare_boundaries(self, feed: DataFeed, sizes: Iterable[int]) -> None:
        """Compute the shapes between chunks, also for the partial batch, so that no timed step does it."""
        partial = feed.micro_batch_ranges(feed.steps_per_epoch - 1, self.replica)
        for size in {*sizes, *map(len, partial)}:
            self.boundaries.outputs_of(0, size)


_MICRO_BATCH = -1
"""A number that no micro-batch of a step has."""


def run_chunks_once(
    chunks: Mapping[int, ModelChunk],
    boundaries: ActivationMetaCache,
    spec: RunSpec,
    arithmetic: MixedPrecision,
    reducers: Iterable[GradientReducer],
    recompute: bool,
) -> None:
    """Run a forward and a backward pass of every chunk on zeros, without a trace in weights, buffers or random numbers.

    Ranks that share layers (tensor parallelism) call it together.

    Args:
        chunks: This rank's chunks by number.
        boundaries: The shapes between chunks.
        spec: The run; the largest micro-batch of its steps is computed.
        arithmetic: The run's autocast.
        reducers: Of the chunks' gradients; they send nothing.
        recompute: Whether activations are computed again in the backward pass.

    Raises:
        WorkerError: ``unsupported`` if the model cannot run with micro-batches of that size.
    """
    device = boundaries.device
    samples = -(-spec.batch_size // spec.micro_batches)
    modules = nn.ModuleList([chunk.module for chunk in chunks.values()])

    def run_once(number: int, chunk: ModelChunk) -> None:
        is_last = number == boundaries.chunks - 1
        inputs, targets = (tensor.to(device) for tensor in zero_batch(spec, samples))
        input_meta = None if number == 0 else boundaries.outputs_of(number - 1, samples)
        tensors: tuple[Tensor, ...] = (in_run_format(inputs, spec),)
        if input_meta is not None:
            tensors = tuple(shape.empty(device).zero_() for shape in input_meta.shapes)
        output_meta = boundaries.outputs_of(number, samples)

        def loss(output: Tensor) -> Tensor:
            return summed_loss(output, targets) / samples

        def run_backward(outputs: tuple[Tensor, ...]) -> None:
            if is_last:
                arithmetic.backward(outputs[0])
            else:
                shapes = [output_meta.shapes[index] for index in output_meta.differentiable]
                backward_from(outputs, tuple(shape.empty(device).zero_() for shape in shapes))

        chunk.forward(_MICRO_BATCH, tensors, input_meta, recompute, arithmetic.autocast(), loss if is_last else None)
        chunk.backward(_MICRO_BATCH, run_backward)
        if chunk.splits_backward:
            chunk.finish_weights(_MICRO_BATCH)

    with torch.random.fork_rng([device.index] if device.type == "cuda" else []), _without_trace(modules, reducers):
        for number, chunk in chunks.items():
            run_once(number, chunk)
    modules.zero_grad()


@contextmanager
def _without_trace(modules: nn.Module, reducers: Iterable[GradientReducer]) -> Iterator[None]:
    """Restore buffers at the end, and let ``reducers`` send nothing."""
    saved = [(buffer, buffer.clone()) for buffer in modules.buffers()]
    paused = [(reducer, reducer.is_paused) for reducer in reducers]
    for reducer, _ in paused:
        reducer.is_paused = True
    yield
    for reducer, was_paused in paused:
        reducer.is_paused = was_paused
    for buffer, value in saved:
        buffer.copy_(value)


def open_communicators(
    reduced: Sequence[RankGroup], ties: Sequence[TiedParameter], group: RankGroup, device: torch.device
) -> None:
    """Let every communicator of a step that is no link carry one number, in one order on all ranks.

    Args:
        reduced: This rank's groups that sum gradients.
        ties: The weights of which several ranks of the pipeline hold a copy.
        group: The pipeline's ranks.
        device: This rank's device.
    """
    number = torch.zeros(1, device=device)
    for members in dict.fromkeys(reduced):
        dist.all_reduce(number, group=members.members())
    pairs = {(ranks[0], other) for ranks, _, _ in ties for other in ranks[1:]}
    for source, target in sorted({*pairs, *((target, source) for source, target in pairs)}):
        if group.place == source:
            point_to_point.send(number, group.members(), target)
        elif group.place == target:
            point_to_point.receive(number, group.members(), source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
