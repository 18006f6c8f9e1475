"""``python -m hpcbench.worker.block_times``: forward and backward time, output and saved bytes of every block of a
model.

Reads a request as JSON from standard input and prints the answer. Blocks are measured one by one with fresh
parameters, so a model may be larger than the device."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, HpcbenchError, WorkerError, unsupported
from hpcbench.fileio import write_atomic
from hpcbench.parallel.pipeline import stage_balance
from hpcbench.parallel.resolve import InfeasiblePoint, single_device_run
from hpcbench.parallel.workloads import is_custom_model
from hpcbench.paths import cache_folder
from hpcbench.worker.layers import zero_batch
from hpcbench.worker.measure.clocks import synchronize
from hpcbench.worker.measure.environment_record import cpu_model
from hpcbench.worker.measure.host import keep_freed_memory
from hpcbench.worker.measure.layer_trace import counted_saved_tensors, storage_id, tensor_bytes
from hpcbench.worker.model_execution import MixedPrecision, disable_inplace_first_op, storage_dtype, summed_loss
from hpcbench.worker.models.build import build_meta_model

_WARM_UP_PASSES = 2
_MIN_REPEATS, _MAX_REPEATS = 3, 20
"""Measurements of a block: as many as fit into ``_BLOCK_BUDGET_S``, within these."""
_BLOCK_BUDGET_S = 0.5


def profile_blocks(
    request: stage_balance.BlockProfileRequest, refresh: bool = False, shapes: nn.Sequential | None = None
) -> stage_balance.BlockProfile:
    """The chain from the user's cache, or measured here and now and put there.

    ``shapes`` is the model on the meta device, where it is at hand; then a user's own model, whose text has no name,
    is measured in any case.
    Raises ``WorkerError`` where the model cannot take the data set or be built, or calls more than its blocks in order.
    """
    device = torch.device(request.device)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    version = str(torch.__version__)
    digest = stage_balance.block_profile_digest(request, name, version, threads)
    path = cache_folder() / "chains" / f"{digest}.json"
    is_cached = shapes is None or not is_custom_model(request.model)
    if is_cached and not refresh:
        with contextlib.suppress(OSError, ConfigError):
            return stage_balance.decode_block_profile(path.read_bytes(), str(path))
    blocks = _measure_blocks(request, device, shapes)
    profile = stage_balance.BlockProfile(
        request=request, device_name=name, torch=version, threads=threads, blocks=blocks
    )
    if is_cached:
        with contextlib.suppress(OSError, HpcbenchError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, msgspec.json.encode(profile))
    return profile


def block_profile_request(spec: RunSpec, device: torch.device) -> stage_balance.BlockProfileRequest:
    """Return the request of a run's pipeline: its largest micro-batch, in its precision."""
    names = ("model", "dataset", "input_size", "model_options", "precision", "channels_last")
    shared = {name: getattr(spec, name) for name in names}
    size = -(-spec.batch_size // spec.micro_batches)
    return stage_balance.BlockProfileRequest(**shared, micro_batch_size=size, device=device.type)


def _measure_blocks(
    request: stage_balance.BlockProfileRequest, device: torch.device, shapes: nn.Sequential | None
) -> list[stage_balance.MeasuredBlock]:
    spec = single_device_run(request.model, request.dataset, request.input_size, request.model_options)
    if isinstance(spec, InfeasiblePoint):
        raise WorkerError(spec.reason)
    spec = msgspec.structs.replace(spec, precision=request.precision, channels_last=request.channels_last)
    if shapes is None:
        shapes = build_meta_model(spec, request.model_folder)
    if type(shapes).forward is not nn.Sequential.forward:
        message = f"{request.model} has a forward of its own: its blocks cannot be measured one by one"
        raise unsupported(message, "put what it does into a block")
    inputs, targets = zero_batch(spec, request.micro_batch_size)
    if inputs.is_floating_point():
        inputs = torch.randn_like(inputs).to(storage_dtype(spec.precision))
    if targets.is_floating_point():
        targets = targets.to(inputs.dtype)
    bench = _BlockTimer(device, MixedPrecision(spec.precision, device), targets.to(device))
    blocks = []
    x, counted, is_kept = inputs.to(device), set[int](), False
    for place, (name, block) in enumerate(shapes.named_children()):
        parameters = [parameter for parameter in block.parameters() if id(parameter) not in counted]
        counted |= {id(parameter) for parameter in parameters}
        row, x, is_kept = bench.measure(materialize_block(block, device), x, is_kept, place == len(shapes) - 1)
        blocks.append(stage_balance.MeasuredBlock(name=name, parameter_bytes=sum(map(tensor_bytes, parameters)), **row))
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

    def measure(self, block: nn.Module, x: Tensor, is_kept: bool, is_last: bool) -> tuple[dict[str, Any], Tensor, bool]:
        """The row of ``block``, the next one's input, and whether this one keeps that itself.

        ``is_kept`` is the same of the block before: its counts are not counted again.
        """
        x = x.detach().requires_grad_(x.is_floating_point() and x.grad_fn is None)
        sizes: dict[int, int] = {}
        with counted_saved_tensors(block, sizes.__setitem__):
            y, ends = self._forward(block, x, is_last)
        kept_bytes = sum(size for storage, size in sizes.items() if not (is_kept and storage == storage_id(x)))
        forwards, backwards = self._times(block, x, is_last)
        row = {
            "forward_s": statistics.median(forwards),
            "forward_iqr_s": _iqr(forwards),
            "backward_s": statistics.median(backwards),
            "backward_iqr_s": _iqr(backwards),
            "output_bytes": 0 if is_last else tensor_bytes(y),
            "kept_bytes": kept_bytes,
        }
        del ends
        # Numbers of a size that no layer above has to fear, whatever fresh layers made of them.
        following = torch.randn_like(y.detach()) if y.is_floating_point() else y.detach()
        keeps_output = storage_id(y) in sizes
        return row, following, keeps_output

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


def _iqr(values: list[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def answer_request(data: bytes, refresh: bool = False) -> stage_balance.BlockProfileResponse:
    """Return the output for a request."""
    try:
        return stage_balance.BlockProfileResponse(
            chain=profile_blocks(msgspec.json.decode(data, type=stage_balance.BlockProfileRequest), refresh)
        )
    except msgspec.MsgspecError as error:
        hint = "see hpcbench/parallel/pipeline/stage_balance.py: BlockProfileRequest"
        return stage_balance.BlockProfileResponse(error=f"no request: {error}", hint=hint, is_input=True)
    except HpcbenchError as error:
        is_input = not isinstance(error, WorkerError)
        return stage_balance.BlockProfileResponse(error=error.message, hint=error.hint, is_input=is_input)


def main() -> int:
    """Answer the request on standard input."""
    parser = argparse.ArgumentParser(prog="python -m hpcbench.worker.block_times", description=__doc__)
    parser.add_argument("--refresh", action="store_true", help="measure anew, whatever the cache holds")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a cpu, as a rank of the run would have")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory(os.environ)
    sys.stdout.buffer.write(msgspec.json.encode(answer_request(sys.stdin.buffer.read(), args.refresh)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
