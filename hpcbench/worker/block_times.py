"""Forward and backward time of every block of a model. Blocks are measured one by one with fresh parameters, so a model
may be larger than the device."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError, unsupported
from hpcbench.fileio import write_atomic
from hpcbench.paths import cache_folder
from hpcbench.strategies.pipeline import stage_balance
from hpcbench.strategies.pipeline.stage_partition import BlockTimes
from hpcbench.worker.layers import zero_batch
from hpcbench.worker.measure.clocks import synchronize
from hpcbench.worker.measure.environment_record import cpu_model
from hpcbench.worker.model_execution import MixedPrecision, disable_inplace_first_op, storage_dtype, summed_loss
from hpcbench.workloads.models import is_custom_model

_WARM_UP_PASSES = 2
_MIN_REPEATS, _MAX_REPEATS = 3, 20
"""Measurements of a block: as many as fit into ``_BLOCK_BUDGET_S``, within these."""
_BLOCK_BUDGET_S = 0.5


def profile_blocks(
    spec: RunSpec, device: torch.device, shapes: nn.Sequential, refresh: bool = False
) -> stage_balance.BlockProfile:
    """Return the times of the blocks with the run's largest micro-batch in its precision, from the user's cache if they
    are there.

    ``shapes`` is the model on the meta device. A user's own model, whose text has no name, is always measured.
    Raises ``WorkerError`` where the model calls more than its blocks in order.
    """
    names = ("model", "dataset", "input_size", "model_options", "precision", "channels_last")
    request = stage_balance.BlockProfileRequest(
        **{name: getattr(spec, name) for name in names},
        micro_batch_size=-(-spec.batch_size // spec.micro_batches),
        device=device.type,
    )
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    version = str(torch.__version__)
    digest = stage_balance.block_profile_digest(request, name, version, threads)
    path = cache_folder() / "chains" / f"{digest}.json"
    is_cached = not is_custom_model(spec.model)
    if is_cached and not refresh:
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(path.read_bytes(), type=stage_balance.BlockProfile)
    blocks = _measure_blocks(spec, request.micro_batch_size, device, shapes)
    profile = stage_balance.BlockProfile(
        request=request, device_name=name, torch=version, threads=threads, blocks=blocks
    )
    if is_cached:
        with contextlib.suppress(OSError, HpcbenchError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, msgspec.json.encode(profile))
    return profile


def _measure_blocks(spec: RunSpec, samples: int, device: torch.device, shapes: nn.Sequential) -> list[BlockTimes]:
    if type(shapes).forward is not nn.Sequential.forward:
        message = f"{spec.model} has a forward of its own: its blocks cannot be measured one by one"
        raise unsupported(message, "put what it does into a block")
    inputs, targets = zero_batch(spec, samples)
    if inputs.is_floating_point():
        inputs = torch.randn_like(inputs).to(storage_dtype(spec.precision))
    if targets.is_floating_point():
        targets = targets.to(inputs.dtype)
    bench = _BlockTimer(device, MixedPrecision(spec.precision, device), targets.to(device))
    blocks = []
    x = inputs.to(device)
    for place, block in enumerate(shapes):
        times, x = bench.measure(materialize_block(block, device), x, place == len(shapes) - 1)
        blocks.append(times)
    return blocks


def materialize_block(block: nn.Module, device: torch.device) -> nn.Module:
    """A copy of ``block`` (on the meta device) with memory on ``device`` and numbers as a fresh layer has them."""
    fresh = copy.deepcopy(block)
    for module in fresh.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, torch.zeros_like(value, device=device))
    fresh.to_empty(device=device)
    with torch.no_grad():
        for tensor in [*fresh.parameters(), *fresh.buffers()]:
            tensor.normal_(0, 0.02) if isinstance(tensor, nn.Parameter) else tensor.zero_()
    for module in fresh.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    disable_inplace_first_op(fresh)
    return fresh.train()


class _BlockTimer:
    """Runs one block after another, each with the shape that the one before it hands on."""

    def __init__(self, device: torch.device, arithmetic: MixedPrecision, targets: Tensor) -> None:
        self._device, self._arithmetic, self._targets = device, arithmetic, targets

    def measure(self, block: nn.Module, x: Tensor, is_last: bool) -> tuple[BlockTimes, Tensor]:
        """The times of ``block``, and the next one's input."""
        x = x.detach().requires_grad_(x.is_floating_point() and x.grad_fn is None)
        y, _ = self._forward(block, x, is_last)
        # Numbers of a size that no layer above has to fear, whatever fresh layers made of them.
        following = torch.randn_like(y.detach()) if y.is_floating_point() else y.detach()
        del y
        forwards, backwards = self._times(block, x, is_last)
        return BlockTimes(statistics.median(forwards), statistics.median(backwards)), following

    def _forward(self, block: nn.Module, x: Tensor, is_last: bool) -> tuple[Tensor, Tensor]:
        """Return the output of the block, and the tensor at which its backward pass begins."""
        with self._arithmetic.autocast():
            y: Tensor = block(x)
        return y, (summed_loss(y, self._targets) / len(self._targets) if is_last else y)

    def _times(self, block: nn.Module, x: Tensor, is_last: bool) -> tuple[list[float], list[float]]:
        forwards: list[float] = []
        backwards: list[float] = []
        began = time.perf_counter()
        for number in range(_WARM_UP_PASSES + _MAX_REPEATS):
            if len(forwards) >= _MIN_REPEATS and time.perf_counter() - began > _BLOCK_BUDGET_S:
                break
            block.zero_grad(set_to_none=True)
            x.grad = None
            (_, end), forward_s = self._timed(lambda: self._forward(block, x, is_last))
            gradient = None if is_last else torch.ones_like(end)
            backward_s = 0.0
            if end.requires_grad:
                _, backward_s = self._timed(partial(torch.autograd.backward, end, gradient))
            if number >= _WARM_UP_PASSES:
                forwards.append(forward_s)
                backwards.append(backward_s)
        return forwards, backwards

    def _timed(self, do: Callable[[], Any]) -> tuple[Any, float]:
        synchronize(self._device)
        began = time.perf_counter()
        result = do()
        synchronize(self._device)
        return result, time.perf_counter() - began
