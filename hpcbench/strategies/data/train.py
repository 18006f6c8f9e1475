"""Data parallelism: torch's DistributedDataParallel (DDP) with its compression hooks, and ZeRO by torch and fairscale.

fairscale's FSDP uses CUDA streams. On a CPU they are replaced by streams without effect, in this process only and only
where torch has no CUDA device.

Sources: Li et al. 2020 (DDP), Rajbhandari et al. 2020 (ZeRO-1 to ZeRO-3).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.gradient_buckets import DEFAULT_BUCKET_CAP_MB
from hpcbench.worker import strategy as base
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import is_host


class SingleStrategy(base.DataParallelStrategy):
    """The unchanged model on one device: the baseline of every speed-up."""


class DdpStrategy(base.WrapperStrategy):
    """A replica per rank; gradients are all-reduced in buckets during the backward pass.

    Buffers (BatchNorm's running statistics) are those of rank 0: DDP broadcasts them before every forward pass.
    """

    @classmethod
    def steps_until_steady(cls, spec: RunSpec) -> int:
        """PowerSGD compresses from the third step on."""
        return 3 if spec.options.get("compression") == "powersgd" else 2

    _checks_gradients = True

    def finish_gradient_reduction(self) -> None:
        """Raise ``WorkerError`` (``unsupported``) in the first step if no output depends on a parameter.

        DDP sends no bucket with such a parameter, and ends the second step with an error.
        """
        for name, parameter in self.module.named_parameters() if self._checks_gradients else ():
            if parameter.requires_grad and parameter.grad is None:
                message = f"DDP waits for the gradients of all parameters, but no output depends on {name}"
                raise unsupported(message, "leave it out, or freeze it: requires_grad_(False)")
        self._checks_gradients = False

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        # PowerSGD communicates from threads of the process group.
        self.traffic_is_recorded = self.options.get("compression") != "powersgd"
        runner = DistributedDataParallel(
            module,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            process_group=context.group,
            bucket_cap_mb=ddp_bucket_cap(float(self.options["bucket_cap_mb"])),
            gradient_as_bucket_view=self.options["gradient_as_bucket_view"],
            static_graph=self.options.get("static_graph", False),
        )
        self._register_compression_hook(runner, context)
        return runner

    def _register_compression_hook(self, runner: DistributedDataParallel, context: RankContext) -> None:
        kind, is_cuda = self.options.get("compression", "none"), not is_host(context.device)
        if kind == "bf16" and not is_cuda:
            raise unsupported(
                f"torch's bf16 gradient compression needs NCCL on a cuda device; this run's is {context.device.type}",
                'set options.compression to "fp16", "powersgd" or "none"',
            )
        if kind == "powersgd":
            # The first steps are uncompressed, as in the paper; two are enough for a run that only measures.
            rank = self.options["powersgd_rank"]
            state = PowerSGDState(context.group, rank, start_powerSGD_iter=2, min_compression_rate=1)
            runner.register_comm_hook(state, powerSGD_hook if is_cuda else power_sgd_one_bucket_at_a_time)
        elif kind != "none":
            hook = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook
            runner.register_comm_hook(context.group, hook)


def power_sgd_one_bucket_at_a_time(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """Run torch's PowerSGD hook over gloo.

    The hook starts further collectives when the first one of a bucket has ended. gloo's threads do so in a different
    order on each rank: with two buckets in flight the ranks would match the wrong collectives.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def ddp_bucket_cap(bucket_cap_mb: float) -> float | None:
    """Return the ``bucket_cap_mb`` argument of DDP: ``None`` if the size is DDP's default.

    With its default DDP makes the first bucket only 1 MiB, so that communication begins early; an explicit size, even
    the same one, also applies to the first bucket.
    """
    return None if bucket_cap_mb == DEFAULT_BUCKET_CAP_MB else bucket_cap_mb


TRAININGS = {
    "single": SingleStrategy,
    "ddp": DdpStrategy,
}
"""The training of each strategy."""
