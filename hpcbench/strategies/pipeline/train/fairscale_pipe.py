"""fairscale's Pipe (torchgpipe, Kim et al. 2020): one process with one thread per device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.pipeline.schedules import PipelineLayout
from hpcbench.strategies.pipeline.train.stage_assignment import assign_blocks
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import frozen_running_statistics
from hpcbench.worker.strategy import DataParallelStrategy, import_fairscale


class PipeModule(nn.Module):
    """The pipeline; its output is returned on the device of its input."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        self.pipe = pipe
        self._microbatch = import_fairscale("nn.pipe.microbatch")

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.pipe(x).to(x.device)
        return output

    def through(self, x: Tensor, parts: list[range]) -> Tensor:
        """Return the output for ``x`` in given micro-batches: [n, *sample shape] -> [n, ...].

        ``parts`` are the samples of each micro-batch; Pipe's own division makes the last one shorter.
        """
        batches = [self._microbatch.Batch(x[part.start : part.stop], number) for number, part in enumerate(parts)]
        self.pipe.pipeline.run(batches)
        output: Tensor = self._microbatch.gather(batches)
        return output


def _count_statistics_once(partition: nn.Module) -> None:
    """Keep the running statistics of ``partition`` unchanged when a backward pass recomputes it."""
    checkpoint, stack = import_fairscale("nn.pipe.checkpoint"), ExitStack()

    def before(_partition: nn.Module, _inputs: Any) -> None:
        if checkpoint.is_recomputing():
            stack.enter_context(frozen_running_statistics(partition))

    partition.register_forward_pre_hook(before)
    partition.register_forward_hook(lambda *_: stack.close())


class FairscalePipeStrategy(DataParallelStrategy):
    """Stages on the devices of this process; on a cpu all stages share it."""

    module: PipeModule

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        assert isinstance(module, nn.Sequential), "a pipeline of no sequence"
        blocks = assign_blocks(module, spec, self.options, PipelineLayout(spec.pp_degree))
        pipe = import_fairscale("nn").Pipe(
            module,
            balance=[len(held) for held in blocks],
            devices=_stage_devices(spec.pp_degree, context),
            chunks=spec.micro_batches,
            checkpoint=self.options["recompute"],
        )
        for partition in pipe.partitions:
            _count_statistics_once(partition)
        self.module = PipeModule(pipe)
        return self.module

    def step(self, feed: DataFeed, step: int) -> Tensor:
        with self.phases("data"):
            inputs, targets = feed.batch(step, self.replica)
        self.clear_gradients()
        with self.phases("forward"):
            outputs = self.module.through(inputs, feed.micro_batch_ranges(step, self.replica))
            loss = self.loss_sum(outputs, targets.to(outputs.device)) / feed.global_count(step)
        with self.phases("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with self.phases("optimizer"):
            self.update()
        return loss.detach().to(inputs.device)

    # In the whole model the names have no "pipe.partitions.<number>." in front.
    def weights(self) -> dict[str, Tensor]:
        return {name.split(".", 3)[3]: tensor for name, tensor in super().weights().items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name.split(".", 3)[3]: tensor for name, tensor in super().gradients().items()}


def _stage_devices(count: int, context: RankContext) -> list[torch.device]:
    if context.device.type != "cuda":
        return [context.device] * count
    available = torch.cuda.device_count()
    if available < count and not context.shares_device:
        message = f"fairscale_pipe with pp_degree {count} needs as many GPUs in one process, and sees {available}"
        raise unsupported(message, "the profile must give a task all of its devices_per_task")
    return [torch.device("cuda", number % available) for number in range(count)]
