"""Strategies with a mistake in them, and ``python -m hpcbench.worker`` with one of them as ddp.

$WRONG names the class, $SLOW_S is how long a replica of the reference takes longer; it touches $REACHED first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import VerificationResult
from hpcbench.strategies.data.train import TRAININGS, DdpStrategy
from hpcbench.worker.data.feed import NO_FILES, DataFeed
from hpcbench.worker.distributed.process_groups import RankContext, TCPStore, to_timedelta
from hpcbench.worker.distributed.rendezvous import ControlChannel
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.verification import reference
from hpcbench.worker.verification import verify as verifying
from tests.distributed.cases import CPU, short_epoch

TENSOR = "3.weight"
"""Of the second convolution of ``build_small``."""

DTYPES = {"fp64": torch.float64}


def build_small(spec: RunSpec, _model_folder: str | None = None) -> nn.Sequential:
    """A network that trains in no time, for tests that are not about models."""
    torch.manual_seed(spec.seed)
    if spec.model_options.get("unstable"):
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(8)]
        return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(64, 10)).to(DTYPES.get(spec.precision, torch.float32))
    norm = [nn.BatchNorm2d(8)] if spec.model_options.get("batch_norm", True) else [nn.Identity()]
    layers = [nn.Conv2d(1, 8, 3), *norm, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Dropout(0.3)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
    return model.to(DTYPES.get(spec.precision, torch.float32))


def _enlarged(gradient: Tensor) -> Tensor:
    return gradient * 1.01


class Scaled(DdpStrategy):
    """The gradient of one tensor is one per cent too large."""

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        for name, parameter in module.named_parameters():
            if name == TENSOR:
                parameter.register_hook(_enlarged)  # type: ignore[no-untyped-call]
        return super().wrap(module, spec, place)


class ScaledInLowPrecision(Scaled):
    """As ``Scaled``, but right in fp64."""

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        return (
            super().wrap(module, spec, place)
            if spec.precision != "fp64"
            else DdpStrategy.wrap(self, module, spec, place)
        )


class Unreduced(DdpStrategy):
    """One tensor's gradient is never all_reduced."""

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        module._ddp_params_and_buffers_to_ignore = [TENSOR]  # type: ignore[assignment]
        return super().wrap(module, spec, place)


class LocalCount(DdpStrategy):
    """Divides by the replica's own sample count: wrong where shares are uneven alone."""

    def step(self, feed: DataFeed, step: int) -> Tensor:
        right = feed.global_count(step)
        self.loss_factor = feed.replicas * right / (feed.replica_count(step, self.replica) * feed.replicas)
        return super().step(feed, step)


class Forgetful(DdpStrategy):
    """Gives up on momentum after every step: right in the first one."""

    def step(self, feed: DataFeed, step: int) -> Tensor:
        self.optimizer.state.clear()
        return super().step(feed, step)


class Halved(DdpStrategy):
    """Computes in fp64 as it should, and in any other arithmetic half the gradients."""

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        runner = super().wrap(module, spec, place)
        self.loss_factor *= 1.0 if spec.precision == "fp64" else 0.5
        return runner


@contextlib.contextmanager
def changed(wrong: str | None, slow_s: float, small: bool) -> Iterator[None]:
    """Let ``ddp`` be the strategy of that name in this file, a replica of the reference take ``slow_s`` longer, and
    ``build_small`` be what is verified (not what is timed)."""
    right = reference._accumulate_replica

    def slowly(*arguments: Any) -> float:
        if "REACHED" in os.environ:
            Path(os.environ["REACHED"]).touch()
        time.sleep(slow_s)
        return right(*arguments)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(reference, "_accumulate_replica", slowly))
        if wrong is not None:
            stack.enter_context(mock.patch.dict(TRAININGS, {"ddp": globals()[wrong]}))
        if small:
            stack.enter_context(mock.patch.object(verifying, "build_model", build_small))
        yield


@dataclass(frozen=True)
class Told:
    """The verification of a run on the pool."""

    spec: RunSpec
    port: int
    samples: int
    wrong: str | None = None
    small: bool = True
    wait_s: float = 60.0
    slow_s: float = 0.0


def run_verify(told: Told, group: dist.ProcessGroup) -> VerificationResult | None:
    """``verify`` as a run calls it; on every rank of ``group``."""
    rank = dist.get_rank(group)
    store = TCPStore("127.0.0.1", told.port, None, False, to_timedelta(told.wait_s), wait_for_workers=False)
    place = RankContext(rank, told.spec.ranks, CPU, group)
    link = ControlChannel(store, rank, told.spec.ranks)
    with short_epoch(told.spec.dataset, told.samples), changed(told.wrong, told.slow_s, told.small):
        return verifying.verify_run(
            told.spec, place, verifying.VerificationInputs(NO_FILES, None), StopController(), link, told.wait_s
        )


if __name__ == "__main__":
    from hpcbench.worker.__main__ import main

    with changed(os.environ.get("WRONG"), float(os.environ.get("SLOW_S", "0")), small=True):
        sys.exit(main())
